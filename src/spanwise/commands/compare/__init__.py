"""`spanwise compare`."""
