"""From a recipe to a trained, measured model on disk."""
