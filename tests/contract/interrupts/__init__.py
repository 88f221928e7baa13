"""Ctrl-C and SIGTERM in every phase of a call."""
