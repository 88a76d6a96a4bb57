"""Train with SkyRL by a recipe of spanwise: an entrypoint, and advantage estimators for SkyRL's own registry."""
