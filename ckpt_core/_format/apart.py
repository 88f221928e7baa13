"""Keys of the small files that an attempt in an object store writes, and that do not stand in its record."""

from __future__ import annotations

STAGING = ".attempt."
"""What all of them begin with; the token follows."""


def apart(token: str, name: str = "") -> str:
    """The key of an attempt's own small file; without a name, what all of them begin with.

    It is one name without a slash: Orbax takes every folder of a checkpoint for an item.
    """
    return f"{STAGING}{token}." + name.replace("!", "!1").replace("/", "!0")


def name_apart(token: str, key: str) -> str:
    """The name of a small file with such a key."""
    return key.removeprefix(apart(token)).replace("!0", "/").replace("!1", "!")
