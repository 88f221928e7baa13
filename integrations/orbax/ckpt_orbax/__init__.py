"""Orbax's names on ckpt's engine; Orbax itself is never imported.

::

    from ckpt_orbax import v1 as ocp      # was: from orbax.checkpoint import v1 as ocp

    with ocp.training.Checkpointer(directory) as checkpointer:
        checkpointer.save(step, state)

The directories are Orbax's, and what ckpt adds is theirs: checksums, a commit that survives a power
cut, and speed. ``docs/moving_from_orbax.md`` has the list of what is offered, and the native way
beside it.
"""

from ckpt_orbax import multihost, pathways, v1
from ckpt_orbax._refused import NotOffered

__all__ = ["NotOffered", "multihost", "pathways", "v1"]


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"ckpt_orbax has no {name!r}: of Orbax's first API it offers `multihost` only. Use the second "
        "one, `from ckpt_orbax import v1 as ocp`, or ckpt_core itself: ckpt_core.Checkpointer"
    )
