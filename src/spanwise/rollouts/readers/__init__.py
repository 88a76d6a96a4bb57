"""Readers of rollout files, one per format."""
