"""Credit for trajectories of several turns, which are stored as rows or as merged sequences."""
