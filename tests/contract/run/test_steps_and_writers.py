"""One directory of steps: which stay, who may write there, and what becomes of a failure."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import seams


def tree(n: int) -> dict[str, Any]:
    return {"w": np.full(3, n), "n": n}


def start(directory: Path, **more: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(directory, options=ckpt.Options(durable=False), **more)


def test_a_step_that_is_being_saved_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.at(monkeypatch, "commit", before=lambda *_: seams.threading.Event().wait(0.3))
    with start(tmp_path) as run:
        run.save(0, tree(0))
        assert run.load(0)["n"] == 0


def test_a_failure_masks_no_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seams.at(monkeypatch, "commit", before=seams.fail(), nth=1)

    def loop() -> None:
        with start(tmp_path) as run:
            run.save(0, tree(0))
            raise KeyError("of the loop")

    with pytest.raises(KeyError) as caught:
        loop()
    (note,) = caught.value.__notes__
    assert "No space left" in note and str(tmp_path) in note
    assert not [name for name in os.listdir(tmp_path) if "0" in name]


def test_local_directories_that_are_left_out_are_named(tmp_path, caplog):
    for local in (tmp_path / "local", None):
        with ckpt.Checkpointer(tmp_path / "run", local_directory=local) as checkpointer:
            assert "had local directories" not in caplog.text
            checkpointer.restore_latest({"n": 0})
            checkpointer.save(1, {"n": 0})
    assert "had local directories" in caplog.text


TWO_USERS = """
import os, sys
import ckpt_core as ckpt
with ckpt.Checkpointer(sys.argv[1], asynchronous=False) as first:
    first.save(0, {"n": 0}), first.save(1, {"n": 1})
os.chmod(sys.argv[1], 0o777)
os.setgroups([]), os.setgid(12345), os.setuid(12345)
with ckpt.Checkpointer(sys.argv[1], asynchronous=False) as second:
    print(second.restore(0, {"n": 0}).state, flush=True)
    for call in (second.delete, second.rollback_to, lambda step: second.save(1, {"n": 2})):
        try:
            call(0)
        except PermissionError as error:
            print("refused:", error, file=sys.stderr)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two other users")
def test_a_second_user_hears_at_the_restore_whose_steps_it_cannot_move() -> None:
    """It may write beside them; a training of hours would end at the first save that has to retire one."""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)  # the directories of pytest are for their owner alone
        command = [sys.executable, "-c", TWO_USERS, f"{root}/run"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110)
        said, *refused = done.stderr.split("refused:")
        assert done.stdout == "{'n': 0}\n", done.stderr
        assert len(refused) == 3, done.stderr
        for text in (said, *refused):
            assert "belongs to user 0" in text and f"chmod -R g+w {root}/run" in text, done.stderr
        assert ckpt.Checkpointer(f"{root}/run", read_only=True).all_steps() == [0, 1]
