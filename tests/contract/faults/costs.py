"""The child that opens one crafted directory or file in one way, with or without some of ckpt's bounds.

It reports "refused" with the text and the bounds behind it, or "took" with what the call gave, and its seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import child
from mutant import PACKAGE, _Finder


def opened(call: str, path: str, bounds: list[list[Any]]) -> None:
    """One call, without the bounds, each `[file, line]`."""
    lines: dict[str, set[int]] = {}
    for file, line in bounds:
        lines.setdefault(str(PACKAGE / file), set()).add(line)
    if lines:
        sys.meta_path.insert(0, _Finder(lines))
    from hostile import _bounds_of

    import ckpt_core as ckpt
    from ckpt_core.convert import import_weights

    calls: dict[str, Callable[[], Any]] = {
        "inspect": lambda: ckpt.inspect(path),
        "load": lambda: ckpt.load(path, as_numpy=True),
        "verify": lambda: _sound(ckpt.verify(path)),
        "import": lambda: import_weights(path, f"{path}.imported"),
    }
    started = time.process_time()  # what it takes of a core, whatever else the machine does
    try:
        calls[call]()
    except Exception as error:
        if not (lines or isinstance(error, ckpt.CheckpointError)):
            raise  # without a bound that gives it our type, another error goes on as it is
        child.report(
            refused=f"{type(error).__name__}: {error}"[-3000:],
            raised=[list(one) for one in _bounds_of(error)],
        )
    else:
        child.report(took=call)
    child.report(secs=time.process_time() - started)


def _sound(report: Any) -> None:
    import ckpt_core as ckpt

    if not report.ok:
        raise ckpt.CheckpointCorrupt(str(report.problems[0]))
