"""Helpers of several commands: folders, options, tasks, models, evaluation files and tables."""
