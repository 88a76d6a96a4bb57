"""`spanwise fidelity`."""
