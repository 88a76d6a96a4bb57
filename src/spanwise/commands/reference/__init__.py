"""The command `spanwise reference`: measure a reserved token's log-probability before training."""
