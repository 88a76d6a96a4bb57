"""Credit for trajectories of several turns, and their turns as rows or as merged sequences."""
