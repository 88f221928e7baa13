"""How fast this machine copies memory, which is what a snapshot in host memory costs."""

from __future__ import annotations

import statistics
import time


def copy_bytes_per_sec(probe_bytes: int) -> float:
    """Speed at which one thread copies memory into memory that it used before."""
    source, target = bytes(probe_bytes), bytearray(probe_bytes)
    secs: list[float] = []
    for _ in range(6):
        began = time.perf_counter()
        target[:] = source
        secs.append(time.perf_counter() - began)
    return probe_bytes / max(statistics.median(secs[1:]), 1e-9)  # the first faults the pages in
