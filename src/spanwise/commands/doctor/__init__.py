"""The command `spanwise doctor`."""
