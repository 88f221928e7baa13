"""What a report reads beside the metadata."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """What a report reads beside the metadata.

    Attributes:
        verify: check every byte of every step.
        stats: so many of the newest steps to read the arrays of, for numbers about their leaves.
        step_prefix: of the names of the steps, as given to the Checkpointer.
    """

    verify: bool = False
    stats: int = 0
    step_prefix: str | None = None
