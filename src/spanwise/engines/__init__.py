"""Adapters to trainers; only these modules import a trainer's package."""
