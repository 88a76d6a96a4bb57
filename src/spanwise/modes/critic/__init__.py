"""The value model that methods such as `gae` and `sae` need."""
