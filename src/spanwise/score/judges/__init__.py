"""Rewards that ask a model: a judge behind an HTTP endpoint, by a template or a rubric; a reward model of `transformers`."""
