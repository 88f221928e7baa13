"""Stored arrays into host memory: ``pipeline`` reads ahead, by the readers of ``extents``, ``derived`` and ``orbax``."""
