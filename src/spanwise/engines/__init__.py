"""Adapters to RL trainers such as TRL and verl; only these modules import a trainer's package."""
