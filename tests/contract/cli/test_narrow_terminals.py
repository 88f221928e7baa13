"""Numbers about leaves in 80 columns: names stay whole, and stand in the order in which people count."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt

pytest.importorskip("typer")


def on_terminal(columns: int, *arguments: object) -> list[str]:
    """The lines that a command prints on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ckpt_core.cli", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(command, stdout=theirs, stdin=subprocess.DEVNULL, env=environment):
        os.close(theirs)
        reported = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            reported += more
            if not more:
                break
    os.close(ours)
    return reported.decode().splitlines()


def test_a_table_of_steps_spends_no_column_on_what_is_the_same(tmp_path: Path) -> None:
    """Times stay whole in 80 columns: who wrote a step is said only if somebody else did, metrics if there are any."""
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        for step in range(2):
            checkpointer.save(step, model={"w": np.ones(3)}, optimizer={"mu": np.ones(3)})
    lines = on_terminal(80, "ls", tmp_path / "run")
    assert "written by" not in "".join(lines) and "metrics" not in "".join(lines)
    rows = [line for line in lines if "model, optimizer" in line]
    assert len(rows) == 2 and all(line.count(":") == 2 and len(line) <= 80 for line in rows)


def test_damage_is_said_once_and_the_path_once(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "one", {"w": np.arange(100000.0)})
    data = max((tmp_path / "one").rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    first, *problems = on_terminal(80, "verify", tmp_path / "one")
    assert first == f"not ok: {tmp_path / 'one'}" and len(problems) == 1
    assert "leaf w" in problems[0] and str(tmp_path) not in problems[0]


def test_what_doctor_says_is_folded_between_words(tmp_path: Path) -> None:
    lines = on_terminal(80, "doctor", tmp_path)
    at = next(n for n, line in enumerate(lines) if line.startswith("packages"))
    assert len(lines[at]) <= 80 and lines[at + 1].startswith(" " * 10)
