"""What runs inside a child: the switch of the shim, and reports that outlive a kill.

A child is a fork, or a fresh interpreter (`tests.support.forked`); it calls one function of a module in this folder.
"""

import contextlib
import ctypes
import errno
import importlib
import json
import os
import resource
import signal
import sys
import traceback
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


def main() -> None:
    """Becomes the child that a request describes, runs its function, and ends."""
    global _events_fd
    request = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # who is killed has no orphans
    _events_fd = os.open(request["events"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, amount in request["limits"].items():
        resource.setrlimit(getattr(resource, name), (amount, amount))
    shim, fault = _shim(), request["fault"]
    if shim is not None and request["path"]:
        shim.fault_configure(
            os.fsencode(request["path"]),
            fault["ops"].encode(),
            fault["action"].encode(),
            ctypes.c_long(fault["nth"]),
            os.fsencode(request["log"]),
        )
    code = 1
    try:
        module, _, name = request["function"].partition(":")
        getattr(importlib.import_module(module), name)(*request["args"])
        code = 0
    except BaseException as error:
        report(raised=describe(error))
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # tearing down what was imported takes longer than most children live


def _shim() -> ctypes.CDLL | None:
    symbols = ctypes.CDLL(None)
    return symbols if hasattr(symbols, "fault_arm") else None
