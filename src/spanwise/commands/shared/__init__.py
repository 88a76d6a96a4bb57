"""What several commands use: run folders, recipes as tasks, evaluation files, tables of the terminal."""
