"""Adapters to trainers; what they import from others stays inside them."""
