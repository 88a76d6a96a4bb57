"""The command `spanwise demo`."""
