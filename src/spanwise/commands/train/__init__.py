"""`spanwise train`."""
