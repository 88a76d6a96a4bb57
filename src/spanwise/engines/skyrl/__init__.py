"""Let SkyRL train with a spanwise recipe: an entrypoint, and advantage estimators for SkyRL's own registry."""
