"""A program that replaces the checkpoint at a path all the time, for tests of who reads there meanwhile."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

from tests.support.children import environment

KINDS = ["exchange", "two-renames"]
_WRITER = """
import sys
import numpy as np
import ckpt_core as ckpt
from ckpt_core._directory import files

path, kind = sys.argv[1:]
if kind == "two-renames":
    files.exchange = lambda *_: False
options = ckpt.Options(durable=False)
number = 0
while True:
    number += 1
    state = {"a": np.full(5000, number), "b": [np.full(SIZE, number), "text"], "c": np.full(300_000, number)}
    ckpt.save(path, state, overwrite=True, options=options, metadata={"number": number})
    print(number, flush=True)
"""


@contextlib.contextmanager
def replacing(path: Path, told: Path, kind: str, size: int = 7) -> Generator[Callable[[], int]]:
    """While the block runs, another process replaces a checkpoint of one number throughout; yields how often it has. It is one of
    ``KINDS``, tells that in the file ``told``, and ``size`` is that of the small array in the list.
    """
    with told.open("w") as out:
        command = [sys.executable, "-c", _WRITER.replace("SIZE", str(size)), str(path), kind]
        writer = subprocess.Popen(command, stdout=out, env=environment())
    try:
        deadline = time.monotonic() + 60
        while not told.read_text():
            assert writer.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        yield lambda: len(told.read_text().split())
        assert writer.poll() is None, "the writer has failed"
    finally:
        writer.kill()
        writer.wait()
