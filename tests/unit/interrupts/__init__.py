"""Exceptions of signal handlers at any moment."""
