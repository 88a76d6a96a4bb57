"""Helpers of several commands: output folders, options, tasks and models, evaluation files, and printed tables."""
