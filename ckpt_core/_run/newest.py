"""Restore the newest intact step, skipping damaged steps and steps that are deleted meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, all_take_for
from ckpt_core._events import logger
from ckpt_core._results import RestoredStep

_LOOKS = 3
"""Number of times to list the directory, if every listed step is deleted before it is read."""


def restore_newest(
    directory: str,
    restore: Callable[[int, bool | None], RestoredStep],
    strict_latest: bool,
    list_steps: Callable[[], Sequence[tuple[int, bool | None]]],
    damaged: Callable[[int], None],
    alone: bool = True,
) -> RestoredStep | None:
    """The result of ``restore`` for the newest step it can restore; None if there is no step.

    Args:
        directory: for messages.
        restore: restores one step, of those that were listed.
        strict_latest: raise if the newest step is damaged, instead of trying older ones.
        list_steps: lists the steps as process 0 sees them, so that all processes try the same ones, from
            the same tier.
        damaged: called for each step that is skipped.
        alone: whether this process is the only one.

    Raises:
        CheckpointCorrupt: there are steps, and none can be loaded; or, with ``strict_latest``, the
            newest one cannot.
        CheckpointNotFound: all listed steps were deleted before they could be read.
    """
    for look in range(_LOOKS):
        candidates = list_steps()
        failures: list[tuple[int, CheckpointError]] = []
        for step, local_first in reversed(candidates):
            try:
                return restore(step, local_first)
            except (CheckpointCorrupt, CheckpointNotFound) as error:
                # as all processes take it: where they failed for different reasons, they must not go different ways
                if all_take_for(error, CheckpointNotFound, alone):
                    listed = {found for found, _ in list_steps()}
                    if step in listed:
                        raise
                    logger.info("%s: step %d was deleted meanwhile", directory, step)
                    if look < _LOOKS - 1 and max(listed, default=-1) > candidates[-1][0]:
                        break  # newer ones took its place, and an older one is not the newest
                    continue
                if strict_latest or not all_take_for(error, CheckpointCorrupt, alone):
                    raise
                failures.append((step, error))
                damaged(step)
                _warn(f"{directory}: step {step} is damaged and skipped: {error}")
        else:
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
        message, RuntimeWarning, stacklevel=6
    )  # the caller of Checkpointer: past restore_newest, the method and its in_turn wrapper


def _none_loads(directory: str, failures: list[tuple[int, CheckpointError]]) -> CheckpointCorrupt:
    step, error = failures[0]
    numbers = ", ".join(str(failed) for failed, _ in failures)
    newest = CheckpointCorrupt(
        f"{directory}: none of the steps {numbers} can be loaded, and training does not start from scratch by "
        f"accident. Newest, step {step}: {error}",
        file=getattr(error, "file", None),
        leaf=getattr(error, "leaf", None),
    )
    newest.__cause__ = error
    return newest
