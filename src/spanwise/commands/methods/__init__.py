"""`spanwise methods`."""
