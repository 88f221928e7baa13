"""Saving a checkpoint piece by piece: refused until the engine can."""

from __future__ import annotations

from typing import Any, NoReturn

from ckpt_orbax._refused import not_offered


def save(path: Any, state: Any, *, custom_metadata: Any = None) -> NoReturn:
    """Refused."""
    raise not_offered(
        "ocp.partial.save()",
        "a checkpoint has one commit, of all of its arrays",
        "one ocp.save_checkpointables(path, {'layer_0': ..., 'layer_1': ...}), or a checkpoint for each part",
    )


def save_async(path: Any, state: Any, *, custom_metadata: Any = None) -> NoReturn:
    """Refused."""
    save(path, state, custom_metadata=custom_metadata)


def finalize(path: Any) -> NoReturn:
    """Refused."""
    save(path, None)
