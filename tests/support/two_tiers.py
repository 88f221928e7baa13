"""Checkpointers of one run with a local directory beside its persistent one, started as often as a test likes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckpt_core as ckpt

Starts = Callable[..., ckpt.Checkpointer]


def starts(root: Path, *, persists_every: int, local_max_to_keep: int) -> Starts:
    """Starts a blocking Checkpointer on ``root/steps`` and ``root/local``; takes further arguments of it."""
    options = ckpt.Options(
        persist_policy=ckpt.when.every_steps(persists_every),
        local_max_to_keep=local_max_to_keep,
        durable=False,
    )

    def start(**more: Any) -> ckpt.Checkpointer:
        local = root / "local"
        return ckpt.Checkpointer(
            root / "steps", local_directory=local, options=options, asynchronous=False, **more
        )

    return start
