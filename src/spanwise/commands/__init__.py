"""The commands of the command line, one folder per command."""
