"""A restore as others see it: what they are told, and that the checkpoint stays meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence

from ckpt_core._errors import CheckpointCorrupt, CheckpointNotFound
from ckpt_core._events import Event, Kind, Progress, tell
from ckpt_core._format.record import RECORD_FILE
from ckpt_core._load.opened import Opened, naming_checkpoint
from ckpt_core._load.request import Tally
from ckpt_core._load.wants import Planned
from ckpt_core._options import Options


@contextlib.contextmanager
def watched(opened: Opened, options: Options, step: int | None) -> Generator[Tally]:
    """Holds a checkpoint against deletion and tells of the restore; gives the tally to fill.

    Raises:
        CheckpointNotFound: it was deleted after it was opened.
    """
    began = time.monotonic()
    tally = Tally()

    def happened(kind: Kind, error: BaseException | None = None) -> None:
        event = Event(
            kind=kind,
            path=opened.path,
            step=step,
            bytes=tally.bytes,
            secs=time.monotonic() - began,
            error=error,
        )
        tell(event, options.on_event)

    happened("restore_started")
    try:
        with held(opened), naming_checkpoint(opened.path):
            yield tally
    except BaseException as error:
        happened("restore_failed", error)
        if isinstance(error, CheckpointCorrupt) and _was_replaced(opened):
            raise _replaced(opened) from error
        raise
    happened("restored")


def _was_replaced(opened: Opened) -> bool:
    """Whether another checkpoint, or none, is at the path now: what was read is of two."""
    if opened.record is None:
        return False
    try:
        record = opened.form.read(opened.path, RECORD_FILE)
    except (OSError, CheckpointCorrupt):
        return False  # what is there is damaged
    return record is None or not record.startswith(opened.head)


def _replaced(opened: Opened) -> CheckpointNotFound:
    return CheckpointNotFound(
        f"{opened.path} was deleted or replaced just now, by retention or another writer"
    )


@contextlib.contextmanager
def held(opened: Opened) -> Generator[None]:
    """Keeps an open checkpoint from being deleted while the block runs.

    Raises:
        CheckpointNotFound: it was deleted after it was opened.
    """
    if opened.record is None:  # what Orbax wrote, no retention of ours deletes while it is in use
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(opened.form.reading(opened.path, opened.head))
        except FileNotFoundError:
            raise _replaced(opened) from None
        yield


def progress(
    opened: Opened, planned: Sequence[Planned], options: Options, step: int | None
) -> Progress | None:
    """Counts what the planned items will read; None where nobody listens."""
    if options.on_event is None:
        return None
    total_bytes = sum(
        item.item.specs[position].stored_bytes
        for item in planned
        for result, position in enumerate(item.positions)
        if position is not None and result in item.targets
    )
    return Progress(opened.path, step, total_bytes, options.on_event)
