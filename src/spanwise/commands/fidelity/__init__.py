"""The command `spanwise fidelity`."""
