"""Steps that another job saves, one after the other: for evaluators."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from ckpt_orbax import multihost
from ckpt_orbax._paths import as_text
from ckpt_orbax.v0.utils import checkpoint_steps


@contextlib.contextmanager
def wait_for_new_checkpoint(
    checkpoint_dir: Any,
    *,
    until_step: int | None = None,
    seconds_to_sleep: int = 1,
    timeout: int | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    **_: Any,
) -> Generator[int]:
    """The newest step of a directory, once there is one; -1 after the timeout. A context manager.

    The step is not held: whoever saves may delete it by its own policy, and a restore that has begun
    by then fails by name.

    Args:
        checkpoint_dir: of the steps; it may come later.
        until_step: wait for a step of at least this number.
        seconds_to_sleep: between two looks.
        timeout: seconds; None to wait for ever.
        timeout_fn: called after the timeout; False goes on waiting.
        **_: of Orbax's function: names of steps, which are found whatever they begin with, and
            snapshots, which ckpt has not.
    """
    directory, began = as_text(checkpoint_dir), time.monotonic()
    found = -1
    while multihost.process_index() == 0:
        newest = max(checkpoint_steps(directory), default=None)
        if newest is not None and newest >= (until_step or 0):
            found = newest
            break
        late = timeout is not None and time.monotonic() - began + seconds_to_sleep > timeout
        if late and (timeout_fn is None or timeout_fn()):
            break
        time.sleep(seconds_to_sleep)
    yield int(multihost.broadcast_one_to_all(found))


def checkpoints_iterator(
    checkpoint_dir: Any,
    *,
    min_interval_secs: int = 0,
    seconds_to_sleep: int = 1,
    timeout: int | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    **names: Any,
) -> Iterator[int]:
    """The newest step of a directory, again and again, each once; ends after the timeout.

    Args:
        checkpoint_dir: of the steps; it may come later.
        min_interval_secs: at least this long between two steps.
        seconds_to_sleep: between two looks.
        timeout: seconds to wait for each step; None for ever.
        timeout_fn: called after the timeout; False goes on waiting.
        **names: see ``wait_for_new_checkpoint``.

    Example:
        >>> import ckpt_orbax as ocp, numpy as np, tempfile
        >>> directory = tempfile.mkdtemp()
        >>> ocp.PyTreeCheckpointer().save(directory + "/7", {"w": np.ones(2)})
        >>> list(ocp.checkpoint_utils.checkpoints_iterator(directory, timeout=0))
        [7]
    """
    until_step = None
    while True:
        waiting = wait_for_new_checkpoint(
            checkpoint_dir,
            until_step=until_step,
            seconds_to_sleep=seconds_to_sleep,
            timeout=timeout,
            timeout_fn=timeout_fn,
            **names,
        )
        with waiting as step:
            if step < 0:
                return
            began = time.monotonic()
            yield step
        until_step = step + 1
        time.sleep(max(0.0, began + min_interval_secs - time.monotonic()))
