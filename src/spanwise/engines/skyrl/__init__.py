"""SkyRL: an entrypoint that trains by a recipe, and estimators for SkyRL's own registry."""
