"""The command `spanwise compare`."""
