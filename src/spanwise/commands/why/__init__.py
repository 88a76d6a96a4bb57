"""The command `spanwise why`."""
