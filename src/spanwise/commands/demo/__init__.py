"""`spanwise demo`."""
