"""The command `spanwise eval`."""
