"""Saves, at once and in the background: what is written, held, refused."""
