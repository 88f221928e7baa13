"""Coming back: the newest step that is whole, past those that are damaged or just being deleted."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from ckpt_core._errors import CheckpointCorrupt, CheckpointNotFound
from ckpt_core._events import logger
from ckpt_core._results import Restored

_LOOKS = 3
"""How often the directory is listed again when every step seen in it was deleted meanwhile."""


def restore_newest(
    directory: str,
    restore: Callable[[int], Restored],
    strict_latest: bool,
    list_steps: Callable[[], list[int]],
    damaged: set[int],
) -> Restored | None:
    """What ``restore`` gives for the newest step that it can; None where there is no step.

    Args:
        directory: for messages.
        restore: restores one of them.
        strict_latest: raise for the newest, instead of going back past it.
        list_steps: those that process 0 sees in the directory, for all to try the same.
        damaged: gets the steps that were skipped.

    Raises:
        CheckpointCorrupt: there are steps, and none can be loaded; or the newest cannot, and
            ``strict_latest``.
    """
    for _ in range(_LOOKS):
        candidates = list_steps()
        failures: list[tuple[int, CheckpointCorrupt]] = []
        for step in reversed(candidates):
            try:
                restored = restore(step)
                damaged.discard(step)
                return restored
            except CheckpointCorrupt as error:
                if strict_latest:
                    raise
                failures.append((step, error))
                damaged.add(step)
                _warn(f"{directory}: step {step} is damaged and skipped: {error}")
            except CheckpointNotFound:
                if step in list_steps():
                    raise
                logger.info("%s: step %d was deleted meanwhile", directory, step)
        if failures:
            raise _none_loads(directory, failures)
        if not candidates:
            return None
    raise CheckpointNotFound(
        f"{directory}: the steps in it are deleted faster than they can be read: does its "
        "writer keep at least the latest two, or give readers time (Options.delete_grace_secs)?"
    )


def _warn(message: str) -> None:
    logger.warning(message)
    warnings.warn(
        message, RuntimeWarning, stacklevel=5
    )  # past Checkpointer and the turn that it takes


def _none_loads(directory: str, failures: list[tuple[int, CheckpointCorrupt]]) -> CheckpointCorrupt:
    step, error = failures[0]
    numbers = ", ".join(str(failed) for failed, _ in failures)
    newest = CheckpointCorrupt(
        f"{directory}: none of the steps {numbers} can be loaded, and training does not start from scratch by "
        f"accident. Newest, step {step}: {error}",
        file=error.file,
        leaf=error.leaf,
    )
    newest.__cause__ = error
    return newest
