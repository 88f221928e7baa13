"""Snapshots on Pathways: refused."""

from __future__ import annotations

from typing import Any

from ckpt_orbax._refused import not_offered


class Snapshotter:
    """Refused: ckpt does not support Pathways."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise not_offered(
            "training.pathways.Snapshotter",
            "ckpt does not support Pathways",
            "ckpt_core.Checkpointer(local_directory=...) keeps every step in the memory of the hosts",
        )
