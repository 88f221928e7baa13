"""Profiles one save and one load: python benchmarks/profile_save.py [--leaves 5000]

Prints the time inside each module of `ckpt_core`, including the functions it called, in all threads
that run Python, and then the most expensive functions of the calling thread. Profiled calls are
slower than normal ones; the wall times above the tables are from a run without profiling.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import gc
import os
import pstats
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the working tree, uninstalled

import jax
import numpy as np

import ckpt_core as ckpt

PACKAGE = str(Path(ckpt.__file__).parent) + os.sep


class Stages:
    """Seconds and calls by module, over all threads, from a profile hook."""

    def __init__(self) -> None:
        self.inside: dict[str, float] = collections.defaultdict(float)
        self.calls: dict[str, int] = collections.Counter()
        self._stacks = threading.local()

    def __enter__(self) -> Stages:
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _hook(self, frame: FrameType, event: str, arg: object) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        stack = self._stacks.__dict__.setdefault("entries", [])
        module = frame.f_code.co_filename[len(PACKAGE) :]
        if event == "call":
            self.calls[module] += 1
            # Measure from the outermost call into a module until that call returns.
            outer = any(entered == module for entered, _ in stack)
            stack.append((module, None if outer else time.perf_counter()))
        elif stack:
            entered, since = stack.pop()
            if since is not None:
                self.inside[entered] += time.perf_counter() - since

    def print(self, title: str) -> None:
        print(f"\n{title}: by module, with all that it calls, over all threads")
        for module, secs in sorted(self.inside.items(), key=lambda entry: -entry[1]):
            print(f"  {secs * 1e3:9.1f} ms  {self.calls[module]:8d} calls  {module}")


def _profiled(title: str, action: Callable[[], Any], reset: Callable[[], None], top: int) -> None:
    gc.collect()
    for _ in range(3):
        reset()
        start = time.perf_counter()
        jax.block_until_ready(action())
        print(f"{title}: {(time.perf_counter() - start) * 1e3:.1f} ms")
    reset()
    with Stages() as stages:
        jax.block_until_ready(action())
    stages.print(title)
    reset()
    profile = cProfile.Profile()
    profile.runcall(lambda: jax.block_until_ready(action()))
    print(f"\n{title}: the calling thread, by own time")
    pstats.Stats(profile, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(top)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, default=5000)
    parser.add_argument("--shape", default="16,16", help="of every leaf (default 16,16)")
    parser.add_argument("--directory", type=Path, help="on a real disk (default: here)")
    parser.add_argument("--top", type=int, default=20, help="functions to show (default 20)")
    args = parser.parse_args()

    shape = tuple(int(size) for size in args.shape.split(","))
    rng = np.random.default_rng(0)
    state = {
        f"w{i}": jax.device_put(rng.standard_normal(shape, np.float32)) for i in range(args.leaves)
    }
    with tempfile.TemporaryDirectory(prefix="ckpt-profile-", dir=args.directory or ".") as scratch:
        path = Path(scratch) / "checkpoint"

        def remove() -> None:
            shutil.rmtree(path, ignore_errors=True)
            os.sync()

        pending: list[ckpt.PendingSave] = []

        def start() -> None:
            pending.append(ckpt.save_async(path, state))

        def finish_and_remove() -> None:
            while pending:
                pending.pop().result()
            remove()

        _profiled("save_async, until it returns", start, finish_and_remove, args.top)
        finish_and_remove()
        _profiled("save", lambda: ckpt.save(path, state), remove, args.top)
        _profiled("load", lambda: ckpt.load(path), lambda: None, args.top)


if __name__ == "__main__":
    main()
