"""The command line: the commands with their arguments, and their terminal output."""
