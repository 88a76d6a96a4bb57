"""Let SkyRL train with a spanwise recipe: an entrypoint, and estimators for SkyRL's registry."""
