"""Methods that no primary source confirms (see the `source` of each)."""
