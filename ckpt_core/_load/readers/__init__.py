"""Stored arrays into host memory: from our format, and from Orbax's."""
