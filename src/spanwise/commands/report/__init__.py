"""The command `spanwise report`."""
