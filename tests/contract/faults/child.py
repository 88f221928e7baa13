"""What runs inside a child: the switch of the shim, reports that outlive a kill, and the states that it saves.

A child is a fork, or a fresh interpreter (`tests.support.forked`); it calls one function of a module in this folder.
"""

import contextlib
import ctypes
import errno
import filecmp
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

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


def cut_power(image: str, copy: str) -> None:
    """Copies what has reached the device: what a machine would find after losing power now."""
    for _ in range(20):
        subprocess.run(["cp", "--sparse=always", image, copy], check=True, timeout=60)
        if filecmp.cmp(image, copy, shallow=False):
            return  # nothing was written while it was being copied
    raise RuntimeError("the device is never quiet")


# ---- small training states that differ in every leaf from version to version, and exact equality

# Above the limit under which a leaf is stored as a small key, so that both ways are used.
LARGE_SHAPE = (300, 256)
FROZEN = np.random.default_rng(7).standard_normal((1024, 1024), dtype=np.float32)
"""A leaf that is the same in every version: steps share its file."""


def state(version: int) -> dict[str, Any]:
    """The state of `version`; no leaf is of jax, so that no backend has to start."""
    rng = np.random.default_rng(version)
    return {
        "params": {
            "w": rng.standard_normal((16, 16), dtype=np.float32),
            "b": rng.standard_normal(7).astype(ml_dtypes.bfloat16),
            "large": rng.standard_normal(LARGE_SHAPE, dtype=np.float32),
        },
        "opt": [rng.integers(0, 1000, 5, dtype=np.int32), rng.random(()), None],
        "mask": rng.random(9) < 0.5,
        "step": version,
        "name": f"version {version}",
    }


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where `a` and `b` are not the same bit for bit, types included; empty when they are."""
    if isinstance(a, np.ndarray | np.generic) and isinstance(b, np.ndarray | np.generic):
        kinds = (type(a), a.dtype, a.shape) == (type(b), b.dtype, b.shape)
        return [] if kinds and a.tobytes() == b.tobytes() else [path]
    if type(a) is not type(b):
        return [f"{path} ({type(a).__name__}, {type(b).__name__})"]
    if isinstance(a, dict):
        found = [] if a.keys() == b.keys() else [f"{path} keys"]
        return found + [
            line for key in a if key in b for line in differences(a[key], b[key], f"{path}/{key}")
        ]
    if isinstance(a, list | tuple):
        found = [] if len(a) == len(b) else [f"{path} length"]
        pairs = enumerate(zip(a, b, strict=False))
        return found + [line for i, (x, y) in pairs for line in differences(x, y, f"{path}/{i}")]
    return [] if a == b else [path]


def version_of(loaded: Any) -> int:
    """Which version `loaded` is; fails where it is none exactly, a mix above all."""
    if isinstance(loaded, dict) and "frozen" in loaded:
        loaded = dict(loaded)
        assert not differences(loaded.pop("frozen"), FROZEN), "the frozen leaf differs"
    version = loaded["step"] if isinstance(loaded, dict) else None
    assert type(version) is int, f"no state of any version: {loaded!r}"
    wrong = differences(loaded, state(version))
    assert not wrong, f"says it is version {version}, but differs at {wrong}"
    return version
