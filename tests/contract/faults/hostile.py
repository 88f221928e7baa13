"""The child that opens checkpoints made to harm: tries every reader on each and reports the result.

What must not happen (an abort, a hang, much memory, a file outside) is for the parent to see; here
each call is only classed: "ok", "good", "problems ..." of `verify`, the name and text of a
`CheckpointError`, or "untyped ...".
"""

import time
from collections.abc import Callable
from typing import Any

import child
import jax
import numpy as np
from states import differences

import ckpt_core as ckpt

GOOD = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": [np.int32(7), "text", 1.5],
    "large": np.arange(90_000, dtype=np.float32),
}


def make(path: str) -> None:
    """Saves the good checkpoint that the cases are made from; compressed, and as a step too."""
    ckpt.save(path, GOOD)
    for codec in ("zstd", "blosc"):
        ckpt.save(f"{path}-{codec}", GOOD, options=ckpt.Options(compression=codec))
    with ckpt.Checkpointer(f"{path}-steps", asynchronous=False) as checkpointer:
        checkpointer.save(0, GOOD)


def open_all(cases: list[tuple[str, str]]) -> None:
    """Opens every `(name, path)`; the name is reported first, so that a crash has one."""
    for name, path in cases:
        child.report(opening=name)
        readers: dict[str, Callable[[], Any]] = {
            "inspect": lambda path=path: ckpt.inspect(path),
            "as_numpy": lambda path=path: ckpt.load(path, as_numpy=True),
            "load": lambda path=path: jax.block_until_ready(ckpt.load(path)),
            "like": lambda path=path: ckpt.load(path, GOOD),
            "verify": lambda path=path: ckpt.verify(path),
        }
        started = time.perf_counter()
        results = {reader: _class(call) for reader, call in readers.items()}
        secs = time.perf_counter() - started
        child.report(opened=name, results=results, rss_bytes=_peak_bytes(), secs=secs)


def open_steps(directory: str) -> None:
    """What a resuming trainer does with a directory whose only step is hostile."""

    def resume() -> Any:
        with ckpt.Checkpointer(directory, read_only=True) as checkpointer:
            return checkpointer.restore_latest(state=GOOD)

    child.report(opened=directory, results={"restore_latest": _class(resume)})


def _class(call: Callable[[], Any]) -> str:
    result: Any
    try:
        result = call()
    except ckpt.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"untyped {type(error).__name__}: {error}"[:300]
    if isinstance(result, dict):
        return "ok" if differences(result, GOOD) else "good"
    if hasattr(result, "problems"):
        return "ok" if result.ok else f"problems {'; '.join(map(str, result.problems))}"
    return "ok"


def _peak_bytes() -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
