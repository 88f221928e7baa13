"""What runs inside a child: the switch of the shim, and reports that outlive a kill.

A child is a fork of `nursery`, or a fresh interpreter; it calls one function of `scenarios`.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
from collections.abc import Iterator
from typing import Any

_PR_SET_PDEATHSIG = 1

_events_fd = -1


def report(**event: Any) -> None:
    """Appends one event to the file that the parent reads; one write, so a kill cannot tear it."""
    os.write(_events_fd, (json.dumps(event) + "\n").encode())


@contextlib.contextmanager
def armed() -> Iterator[None]:
    """Operations inside are counted and may fail; without the shim this does nothing."""
    shim = _shim()
    if shim is None:
        yield
        return
    shim.fault_arm()
    try:
        yield
    finally:
        shim.fault_disarm()
        report(counted=shim.fault_counted(), struck=shim.fault_struck())


def refuse_exchange() -> None:
    """From now on the file system cannot swap two names, as some cannot."""
    shim = _shim()
    if shim is not None:
        shim.fault_refuse_exchange(1)


def describe(error: BaseException) -> dict[str, Any]:
    """The error in plain values: its class and their bases by name, errno, text."""
    cause = error.__cause__ or error.__context__
    return {
        "type": type(error).__name__,
        "bases": [cls.__name__ for cls in type(error).__mro__],
        "errno": errno.errorcode.get(getattr(error, "errno", None) or 0),
        "text": str(error),
        "cause": None if cause is None else f"{type(cause).__name__}: {cause}",
    }


def begin(request: dict[str, Any]) -> None:
    """Turns this process into the child that `request` describes."""
    global _events_fd
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a dead nursery leaves no orphan
    _events_fd = os.open(request["events"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, amount in request.get("limits", {}).items():
        resource.setrlimit(getattr(resource, name), (amount, amount))
    shim = _shim()
    if shim is not None and request.get("path"):
        fault = request["fault"]
        shim.fault_configure(
            os.fsencode(request["path"]),
            fault["ops"].encode(),
            fault["action"].encode(),
            ctypes.c_long(fault["nth"]),
            os.fsencode(request["log"]),
        )


def _shim() -> ctypes.CDLL | None:
    symbols = ctypes.CDLL(None)
    return symbols if hasattr(symbols, "fault_arm") else None
