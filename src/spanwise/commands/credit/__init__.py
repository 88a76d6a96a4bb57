"""`spanwise credit`."""
