"""The command `spanwise reference`, which measures the probability of a reserved token before training."""
