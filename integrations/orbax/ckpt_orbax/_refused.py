"""What this package does not offer: an error that says what to write instead."""

from __future__ import annotations

from ckpt_core import CheckpointError


class NotOffered(CheckpointError, NotImplementedError):
    """A name or an option of Orbax that ckpt refuses: what it is, why, and what to write instead."""


def not_offered(name: str, why: str, instead: str) -> NotOffered:
    """The error for ``name``, to be raised by the caller."""
    return NotOffered(f"{name} is not offered by ckpt_orbax: {why}. Instead: {instead}")
