"""The CPU priority of the threads that save in the background, on Linux, where each thread has its own.

Elsewhere, and where /proc is hidden, they keep that of the process, and a warning says so once.

Nobody may raise a priority again without CAP_SYS_NICE or a limit (RLIMIT_NICE) that admits it. A save has a thread of
its own, so its priority ends with it. The threads of TensorStore outlive it: they are lowered at the start of each
save, those that they start later inherit it, and where it is not permitted to raise them they keep it until
TensorStore ends them for having nothing to do.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading

from ckpt_core._platform import LINUX

_LOWEST_NICE = 19
_POOL_NAME = "ts_pool_worker"
"""Name of TensorStore's threads, which read, compress, write and fsync."""


def give_way() -> int:
    """Gives this thread and TensorStore's the lowest priority; returns the nice value that this one had."""
    nice = os.getpriority(os.PRIO_PROCESS, 0) if LINUX else _LOWEST_NICE
    set_nice(threading.get_native_id(), _LOWEST_NICE)
    return nice


def set_nice(thread: int | None, nice: int) -> None:
    """Sets the nice value of TensorStore's threads, and of the thread with this native id if one is given, as far as
    permitted.
    """
    try:
        threads = os.listdir("/proc/self/task") if LINUX else []
    except OSError:
        threads = []
    if not threads:
        _say_that_it_has_no_effect()
    for name in threads:
        if int(name) == thread or _is_of_pool(name):
            with contextlib.suppress(OSError):  # it has ended, or may not be raised
                os.setpriority(os.PRIO_PROCESS, int(name), nice)


@functools.cache  # once for each process
def _say_that_it_has_no_effect() -> None:
    logging.getLogger("ckpt_core").warning(
        "Options.background_priority='low' has no effect on this system, where threads have no priority of their own or "
        "/proc does not show them: background saves take cores as the training step does"
    )


def _is_of_pool(name: str) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{name}/comm", "rb") as file:
        return file.read().strip() == _POOL_NAME.encode()
    return False
