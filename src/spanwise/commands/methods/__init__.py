"""The command `spanwise methods`."""
