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


@pytest.mark.parametrize(
    "policy",
    [
        {"max_to_keep": 1, "best_metric": "loss", "best_mode": "min"},
        {"keep_policy": ckpt.keep.best("loss", n=1, mode="min")},
    ],
    ids=["best beside the latest", "best alone"],
)
def test_the_best_step_and_the_newest_stay(tmp_path: Path, policy: dict[str, Any]) -> None:
    with start(tmp_path, **policy) as run:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            run.save(step, tree(step), metrics={"loss": loss})
            run.wait_until_finished()
        assert list(run.all_steps()) == [1, 3]


def test_a_step_that_somebody_waits_for_stays(tmp_path: Path) -> None:
    with (
        start(tmp_path, max_to_keep=1, asynchronous=False) as run,
        start(tmp_path, read_only=True) as evaluator,
    ):
        run.save(0, tree(0))
        assert evaluator.wait_for_new_step(timeout_secs=10) == 0
        run.save(1, tree(1))
        assert evaluator.load(0)["n"] == 0


def test_an_older_writer_commits_nothing_more(tmp_path: Path) -> None:
    old = start(tmp_path, asynchronous=False)
    old.save(0, tree(0))
    with start(tmp_path, asynchronous=False) as new:
        new.restore_latest(tree(9))
        with pytest.raises(ckpt.CheckpointError, match="took this directory over"):
            old.save(1, tree(1))
        assert list(new.all_steps()) == [0]


def test_what_another_writes_at_the_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = seams.Gate()
    seams.at(monkeypatch, "record", before=gate)
    pending = ckpt.save_async(tmp_path / "1", tree(1))
    assert gate.entered.wait(60)
    start(tmp_path).close()
    gate.go.set()
    pending.result()
    assert ckpt.load(tmp_path / "1")["n"] == 1


def test_a_step_that_is_being_saved_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.at(monkeypatch, "commit", before=lambda *_: seams.threading.Event().wait(0.3))
    with start(tmp_path) as run:
        run.save(0, tree(0))
        assert run.load(0)["n"] == 0


def test_a_failure_in_the_background_is_raised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.at(monkeypatch, "commit", before=seams.fail(), nth=1)
    with start(tmp_path) as run:
        run.save(0, tree(0))
        with pytest.raises(OSError, match="No space left"):
            run.wait_until_finished()
        run.save(1, tree(1))
        run.wait_until_finished()
        assert list(run.all_steps()) == [1]


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


def test_a_changed_array_is_not_that_of_the_step_before(tmp_path: Path) -> None:
    """Files of unchanged arrays are linked; a numpy array may change and stay the same object."""
    array = np.zeros(1 << 18)
    with start(tmp_path, asynchronous=False) as run:
        for step in range(3):
            array[-1] = step // 2
            run.save(step, {"w": array})
    links = [max(file.stat().st_nlink for file in tmp_path.glob(f"{n}/**/d/*")) for n in range(3)]
    assert links == [2, 2, 1]
    assert [ckpt.load(tmp_path / str(n))["w"][-1] for n in range(3)] == [0, 0, 1]


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
