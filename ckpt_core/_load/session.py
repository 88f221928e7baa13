"""Side effects of a restore: events, and a shared lock that keeps retention away."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence

from ckpt_core import _slow as slow
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._events import Event, Kind, Progress, tell
from ckpt_core._load.checkpoint import Checkpoint, replaced
from ckpt_core._load.opening import naming_checkpoint
from ckpt_core._load.planned import ItemPlan
from ckpt_core._load.request import Tally
from ckpt_core._options import Options
from ckpt_core._slow import Activity


@contextlib.contextmanager
def watched(checkpoint: Checkpoint, options: Options, step: int | None) -> Generator[Tally]:
    """While the block runs, locks the checkpoint against deletion; sends the events of the restore.

    Yields:
        The tally to which the caller adds the bytes that it reads.

    Raises:
        CheckpointNotFound: the checkpoint was deleted or replaced after it was opened.
    """
    activity = Activity("load", checkpoint.path, step, options.report_secs, options.on_event)
    tally = Tally(activity=activity)

    def happened(kind: Kind, error: BaseException | None = None) -> None:
        event = Event(
            kind=kind,
            path=checkpoint.path,
            step=step,
            bytes=tally.bytes,
            secs=time.monotonic() - activity.began,
            error=error,
        )
        tell(event, options.on_event)

    happened("restore_started")
    try:
        with (
            slow.watched(activity, "reading"),
            checkpoint.held(),
            naming_checkpoint(checkpoint.path),
        ):
            yield tally
    except BaseException as error:
        happened("restore_failed", error)
        if isinstance(error, CheckpointCorrupt) and checkpoint.was_replaced():
            raise replaced(checkpoint.path) from error
        raise
    happened("restored")


def progress(
    checkpoint: Checkpoint, plans: Sequence[ItemPlan], options: Options, step: int | None
) -> Progress | None:
    """Sends progress events for the bytes that the plans will read; None without a listener."""
    if options.on_event is None:
        return None
    total_bytes = sum(
        plan.item.specs[position].stored_bytes
        for plan in plans
        for result, position in enumerate(plan.positions)
        if position is not None and result in plan.targets
    )
    return Progress(checkpoint.path, step, total_bytes, options.on_event)
