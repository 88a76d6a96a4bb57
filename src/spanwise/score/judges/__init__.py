"""Rewards from a model: a judge behind an HTTP endpoint, or a reward model of `transformers`."""
