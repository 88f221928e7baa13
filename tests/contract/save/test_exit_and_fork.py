"""The end of the interpreter, and a fork, while a save is or was under way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt

SAVES = """
import sys, time
import numpy as np
import ckpt_core as ckpt
from tests.support import seams

def late(*_):
    time.sleep(1)
    if sys.argv[2] == "fails":
        raise OSError(28, "No space left on device")

seams.at(None, "commit", before=late)
ckpt.save_async(sys.argv[1], {"w": np.arange(5)})
"""
FORKS = """
import os, sys
import numpy as np
import ckpt_core as ckpt

ckpt.save(sys.argv[1], {"w": np.arange(5)})
if not os.fork():
    try:
        ckpt.load(sys.argv[1])
    except ckpt.ForkedProcess:
        os._exit(7)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("how", ["goes well", "fails"])
def test_exit_waits_for_a_save_and_tells_of_its_failure(tmp_path: Path, how: str) -> None:
    ended = run(SAVES, tmp_path / "c", how)
    if how == "fails":
        assert ended.returncode == 1 and "No space left" in ended.stderr
        assert not [*tmp_path.iterdir()]
    else:
        assert ended.returncode == 0, ended.stderr
        np.testing.assert_array_equal(ckpt.load(tmp_path / "c")["w"], np.arange(5))


def test_a_forked_child_is_told(tmp_path: Path) -> None:
    assert run(FORKS, tmp_path / "c").returncode == 7
