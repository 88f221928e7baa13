"""The command line, and what a newcomer meets."""
