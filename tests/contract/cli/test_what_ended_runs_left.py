"""Fast directories of a host: what ended runs left there is found, and removed when it is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import ckpt_core as ckpt
from tests.support.command_line import make_call  # noqa: F401 (fixture)

MIB = 2**20
NEVER = ckpt.when.at_steps([0])


def state(value: float, mib: int = 1) -> dict[str, Any]:
    return {"w": np.full(mib * MIB // 4, value, np.float32)}


def open_run(tmp_path: Path, name: str, **more: Any) -> ckpt.Checkpointer:
    options = ckpt.Options(persist_policy=NEVER, **more)
    return ckpt.Checkpointer(
        tmp_path / name, local_directory=tmp_path / "local", asynchronous=False, options=options
    )


def train(tmp_path: Path, name: str, *, mib: int = 1, **more: Any) -> Path:
    """A run that has ended; its folder."""
    before = folders(tmp_path)
    with open_run(tmp_path, name, **more) as checkpointer:
        for step in (0, 1):
            checkpointer.save(step, state(step, mib))
    (made,) = folders(tmp_path) - before
    os.utime(made)
    return made


def folders(tmp_path: Path) -> set[Path]:
    return set((tmp_path / "local").glob("run-*"))


def runs_in(call: Any, tmp_path: Path) -> list[dict[str, Any]]:
    code, out, _ = call("ls", "--local", tmp_path / "local", "--json")
    assert code == 0
    return json.loads(out)["runs"]


def test_runs_are_listed(call: Any, tmp_path: Path) -> None:
    first = train(tmp_path, "a")
    (tmp_path / "local" / "notes").mkdir()
    with open_run(tmp_path, "b") as live:
        live.save(7, state(7))
        reported = {run["path"]: run for run in runs_in(call, tmp_path)}
        assert len(reported) == 2
        ended_run = reported.pop(str(first))
        (living,) = reported.values()
        assert (ended_run["steps"], ended_run["in_use"], ended_run["mine"]) == ([1], False, True)
        assert (living["steps"], living["in_use"]) == ([7], True)
        assert (ended_run["persistent"], living["persistent"]) == (
            str(tmp_path / "a"),
            str(tmp_path / "b"),
        )
        assert MIB < ended_run["size_bytes"] < 2 * MIB
        text = call("ls", "--local", tmp_path / "local")[1]
        assert "in use" in text and "ended" in text
        assert tmp_path.name in text and "/b" in text  # the directory of each run
    assert sorted(path.name for path in (tmp_path / "local").iterdir()) == sorted(
        ["notes", *(path.name for path in folders(tmp_path))]
    )


def test_what_ended_runs_left_is_removed_and_no_more(call: Any, tmp_path: Path) -> None:
    for name in "ab":
        train(tmp_path, name)
    keep = tmp_path / "local" / "notes"
    keep.mkdir()
    with open_run(tmp_path, "c") as live:
        live.save(7, state(7))
        code, out, _ = call("rm", "--local", tmp_path / "local", "--yes")
        assert code == 0 and "2 of 2 runs removed" in out
        assert [run["in_use"] for run in runs_in(call, tmp_path)] == [True]
        assert keep.is_dir()
        assert live.load(7)["w"][0] == 7
        assert live.save(8, state(8))
        (name,) = (path.name for path in folders(tmp_path))
        code, _, err = call("rm", "--local", tmp_path / "local", "--run", name, "--yes")
        assert code == 2 and "in use by a run that lives" in err
    # the run that was removed goes on from its persistent directory
    with open_run(tmp_path, "a") as again:
        found = again.restore_latest(state(9))
        assert found is not None and found.step == 0


def test_a_run_of_another_process_lives(call: Any, tmp_path: Path) -> None:
    """Its lock says so; when it is killed, it has ended."""
    code = (
        "import sys, numpy as np, ckpt_core as ckpt\n"
        "options = ckpt.Options(persist_policy=ckpt.when.at_steps([0]))\n"
        f"c = ckpt.Checkpointer({str(tmp_path / 'a')!r}, local_directory={str(tmp_path / 'local')!r}, options=options)\n"
        "c.save(3, {'w': np.ones(4)}); c.wait_until_finished()\n"
        "print('saved', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"saved\n"
        (run,) = runs_in(call, tmp_path)
        assert run["in_use"]
        assert "nothing was removed" in call("rm", "--local", tmp_path / "local", "--yes")[1]
        assert runs_in(call, tmp_path) == [run]
    finally:
        child.kill()
        child.communicate(timeout=60)
    assert not runs_in(call, tmp_path)[0]["in_use"]
    local, name = tmp_path / "local", os.path.basename(run["path"])
    code, _, err = call("rm", "--local", local, "--run", "run-x", "--yes")
    assert code == 2 and name in err
    assert "1 of 1 run removed" in call("rm", "--local", local, "--run", name, "--yes")[1]
    assert not os.path.lexists(run["path"])
