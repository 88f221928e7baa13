"""Loads and restores: targets, parts, memory, bytes that are read."""
