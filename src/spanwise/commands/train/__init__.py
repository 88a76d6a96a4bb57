"""The command `spanwise train`."""
