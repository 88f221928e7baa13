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
        told = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            told += more
            if not more:
                break
    os.close(ours)
    return told.decode().splitlines()


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
