"""Helpers of several commands: run folders, recipes as tasks, evaluation files, tables of the terminal."""
