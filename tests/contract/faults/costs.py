"""The child that opens one crafted directory or file in one way.

It reports "refused" with the text, or "took" with what the call gave, and its seconds.
"""

import time
from collections.abc import Callable
from typing import Any

import child

import ckpt_core as ckpt
from ckpt_core.convert import import_weights


def opened(call: str, path: str) -> None:
    """One call."""
    calls: dict[str, Callable[[], Any]] = {
        "inspect": lambda: ckpt.inspect(path),
        "load": lambda: ckpt.load(path, as_numpy=True),
        "verify": lambda: _sound(ckpt.verify(path)),
        "import": lambda: import_weights(path, f"{path}.imported"),
    }
    started = time.process_time()  # what it takes of a core, whatever else the machine does
    try:
        calls[call]()
    except ckpt.CheckpointError as error:
        child.report(refused=f"{type(error).__name__}: {error}"[-3000:])
    else:
        child.report(took=call)
    child.report(secs=time.process_time() - started)


def _sound(report: Any) -> None:
    if not report.ok:
        raise ckpt.CheckpointCorrupt(str(report.problems[0]))
