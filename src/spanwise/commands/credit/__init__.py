"""The command `spanwise credit`."""
