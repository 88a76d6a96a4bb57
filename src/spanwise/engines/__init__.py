"""Adapters to RL trainers such as TRL and verl. Only these modules import a trainer's package."""
