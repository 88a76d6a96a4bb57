"""`spanwise doctor`."""
