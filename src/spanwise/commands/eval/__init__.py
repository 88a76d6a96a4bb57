"""`spanwise eval`."""
