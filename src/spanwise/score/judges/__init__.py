"""Rewards that a model gives: a judge behind an HTTP endpoint, or a reward model of `transformers`."""
