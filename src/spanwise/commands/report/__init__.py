"""`spanwise report`."""
