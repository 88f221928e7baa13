"""``ckpt plan``: the interval that loses least time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import make_call  # noqa: F401 (fixture)

pytest.importorskip("typer")


COMMON = ("--state-bytes", "1GiB", "--step-secs", 0.5, "--mtbf", 24, "--mib", 1)


def test_what_is_printed(call, tmp_path: Path) -> None:
    code, out, err = call("plan", tmp_path, *COMMON)
    assert (code, err) == (0, "") and "save_interval_steps=" in out and "useful time" in out
    reported = json.loads(call("plan", tmp_path, *COMMON, "--local", tmp_path / "f", "--json")[1])
    fast, slow = reported["tiers"]
    assert fast["name"] == str(tmp_path / "f") and slow["steps"] % fast["steps"] == 0
    assert 0.5 < reported["useful"] < 1
    assert list(tmp_path.iterdir()) == []


def test_the_line_it_prints_runs(call, tmp_path: Path) -> None:
    import ckpt_core as ckpt

    local = ("--local", tmp_path / "f")
    line = call("plan", tmp_path / "r", *COMMON, *local)[1].strip().splitlines()[-1]
    with eval(line, {"ckpt": ckpt, "Checkpointer": ckpt.Checkpointer}) as checkpointer:
        assert checkpointer.save(0, {"w": 1})
