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
PREFIX = "decoder/transformer/layer"


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


@pytest.fixture(name="runs", scope="module")
def make_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, value in (("a", 1.0), ("b", 2.0)):
        layers = {f"layer_{n}": {"kernel": np.full((64, 32), value)} for n in (10, 2, 1)}
        ckpt.save(folder / name, model={"decoder": {"transformer": layers}})
    return folder


@pytest.mark.parametrize("columns", [80, 160])
@pytest.mark.parametrize("command", ["stats", "diff"])
def test_names_are_whole_and_in_order(runs: Path, command: str, columns: int):
    paths = [runs / "a"] if command == "stats" else [runs / "a", runs / "b"]
    lines = on_terminal(columns, command, *paths)
    names = [line.split()[0] for line in lines if line.startswith("model/")]
    assert names == [f"model/{PREFIX}_{n}/kernel" for n in (1, 2, 10)]
    numbers = {"stats": "norm", "diff": "cosine"}[command]
    rows = [line for line in lines if numbers in line]
    assert len(rows) == (3 if columns == 80 else 1)
    if columns == 80:
        assert all(len(line) <= columns for line in rows)


def test_a_table_of_steps_spends_no_column_on_what_is_the_same(tmp_path: Path) -> None:
    """Times stay whole in 80 columns: who wrote a step is said only if somebody else did, metrics if there are any."""
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        for step in range(2):
            checkpointer.save(step, model={"w": np.ones(3)}, optimizer={"mu": np.ones(3)})
    lines = on_terminal(80, "ls", tmp_path / "run")
    assert "written by" not in "".join(lines) and "metrics" not in "".join(lines)
    rows = [line for line in lines if "model, optimizer" in line]
    assert len(rows) == 2 and all(line.count(":") == 2 and len(line) <= 80 for line in rows)


def test_no_column_of_shardings_that_nothing_has(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "one", {"w": np.ones(3)})
    (header,) = (line for line in on_terminal(80, "show", tmp_path / "one") if "dtype" in line)
    assert "sharding" not in header


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
