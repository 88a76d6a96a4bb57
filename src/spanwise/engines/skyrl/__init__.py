"""SkyRL with the credit of a recipe: an entrypoint, and estimators for SkyRL's own registry."""
