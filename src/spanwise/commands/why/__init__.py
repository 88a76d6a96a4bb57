"""`spanwise why`."""
