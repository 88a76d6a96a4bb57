"""Credit for trajectories of several turns, stored as one row per turn or as merged sequences."""
