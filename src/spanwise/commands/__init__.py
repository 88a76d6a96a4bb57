"""What the command line does, a folder per command."""
