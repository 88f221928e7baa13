"""Computes where to continue an interrupted epoch, even if the batch size changed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_keras._progress import Progress


@dataclass(frozen=True)
class Batches:
    """What ``fit`` trains from.

    Attributes:
        size: samples per batch; None if unknown.
        count: batches per epoch; None if unknown.
    """

    size: int | None = None
    count: int | None = None


def entered_at(saved: Progress, now: Batches, together: int = 1) -> tuple[int, str | None]:
    """The number of finished batches of the epoch, and a warning for the user or None.

    If the batch size changed, samples are counted: none is left out, and at most a part of a batch
    is trained twice.

    Args:
        saved: where the epoch was interrupted.
        now: the batches of the ``fit`` that continues.
        together: batches per call of the compiled step; a partly finished group is run again.
    """
    before = Batches(saved.batch_size, saved.batches_per_epoch)
    done = saved.batch
    resized = None not in (before.size, now.size) and before.size != now.size
    recounted = None not in (before.count, now.count) and before.count != now.count
    if resized and before.size and now.size:
        samples = done * before.size
        done = _whole(samples // now.size, together)
        again = samples - done * now.size
        left = f"; {again} samples are trained twice" if again else ""
        why = f"{_amount(saved.batch, before)} ({samples} samples)"
    elif recounted and before.count and now.count:
        done = _whole(saved.batch * now.count // before.count, together)
        left = "; some samples may be trained twice"
        why = _amount(saved.batch, before)
    else:
        if done == _whole(done, together) and (now.count is None or done <= now.count):
            return done, None
        done = _whole(done, together)
        left, why = "; some batches may be trained twice", f"{saved.batch} batches"
    done = done if now.count is None else min(done, now.count)
    return done, (
        f"epoch {saved.epoch + 1} was interrupted after {why}, and this fit has other batches: it "
        f"goes on after {_amount(done, now)}{left}. With the batches that the run began with it goes on exactly "
        "where it stopped"
    )


def _amount(done: int, batches: Batches) -> str:
    of = "" if batches.count is None else f" of {batches.count}"
    size = "" if batches.size is None else f" of {batches.size} samples"
    return f"{done}{of} batches{size}"


def _whole(done: int, together: int) -> int:
    return done - done % together
