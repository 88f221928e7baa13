"""``ckpt doctor`` and ``ckpt plan``: what they measure, and that they leave nothing."""

import errno
import json
import os

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import seams
from tests.support.command_line import LOADED
from tests.support.stores import keys_at, tree

pytest.importorskip("typer")


def test_a_directory(call, tmp_path):
    code, out, err = call("doctor", tmp_path, "--mib", 1, "--devices", "--state-bytes", "1KiB")
    assert (code, err) == (0, "") and "cpu 0" in out and "steps of 1.0 KiB" in out
    assert "fsync" in out and "jax " in out and str(tmp_path) in out
    reported = json.loads(call("doctor", tmp_path / "not" / "yet", "--mib", 1, "--json")[1])
    assert reported["place"]["directory"] == str(tmp_path)
    assert reported["place"]["write_bytes_per_sec"] > 0 and reported["place"]["locks"] is True
    assert os.listdir(tmp_path) == []


def test_a_directory_that_does_not_exist(call, tmp_path):
    (tmp_path / "runs").mkdir()
    code, out, _ = call("doctor", tmp_path / "rusn", "--mib", 1)
    assert (
        code == 0 and f"{tmp_path}/rusn does not exist, so what was measured is {tmp_path}; " in out
    )
    assert f"beside it is {'runs'}" in out and "nothing wrong" not in out
    assert "does not exist" not in call("doctor", tmp_path / "runs", "--mib", 1)[1]


def test_a_store(call, store):
    code, out, _ = call("doctor", store, "--mib", 1)
    assert code == 0 and "get" in out
    assert not [key for key in keys_at(store).list() if "doctor" in key]


def test_nothing_is_written_into_a_checkpoint_in_a_store(call, server):
    run = f"{server.root}/run"
    ckpt.save(f"{run}/3", model=tree(1))
    for inside in ("", "/model", "/model/deeper"):
        server.requests.clear()
        reported = json.loads(call("doctor", f"{run}/3{inside}", "--mib", 1, "--json")[1])
        assert reported["place"]["url"] == run
        written = [one.name for one in server.requests if one.kind == "put"]
        assert written and all("run/.ckpt-doctor" in name for name in written)


@pytest.mark.parametrize(
    ("call_of_system", "number", "reported"),
    [("mkdir", errno.EACCES, "Permission denied"), ("fsync", errno.ENOSPC, "No space")],
)
def test_a_probe_that_fails_is_a_problem_and_leaves_nothing(
    call, tmp_path, monkeypatch, call_of_system, number, reported
):
    with monkeypatch.context() as patch:
        patch.setattr(os, call_of_system, seams.fail(OSError, number, os.strerror(number)))
        code, out, _ = call("doctor", tmp_path)
    assert code == 1 and "problem" in out and reported in out
    assert os.listdir(tmp_path) == []


def test_a_writer_and_leftovers_are_reported(call, tmp_path):
    with ckpt.Checkpointer(tmp_path) as run:
        run.save(1, tree(1))
        run.wait_until_finished()
        code, out, _ = call("doctor", tmp_path, "--mib", 1)
    assert code == 0 and "is writing to it" in out


def test_no_framework_is_imported(run_python, tmp_path):
    code, modules = run_python(LOADED, "doctor", str(tmp_path), "--mib", "1")
    assert code == 0 and not {"flax", "torch", "keras"} & set(modules)


def test_a_checkpoint_is_not_written_into(call, tmp_path):
    ckpt.save(tmp_path / "1", {"w": np.ones(3)})
    for path in ("1", "1/state", "1/new/deep"):
        reported = json.loads(call("doctor", tmp_path / path, "--mib", 1, "--json")[1])
        assert reported["place"]["directory"] == str(tmp_path)
    assert ckpt.verify(tmp_path / "1").ok and os.listdir(tmp_path) == ["1"]


COMMON = ("--state-bytes", "1GiB", "--step-secs", 0.5, "--mtbf", 24, "--mib", 1)


def test_a_plan(call, tmp_path):
    code, out, err = call("plan", tmp_path, *COMMON)
    assert (code, err) == (0, "") and "save_interval_steps=" in out and "useful time" in out
    reported = json.loads(call("plan", tmp_path, *COMMON, "--local", tmp_path / "f", "--json")[1])
    fast, slow = reported["tiers"]
    assert fast["name"] == str(tmp_path / "f") and slow["steps"] % fast["steps"] == 0
    assert 0.5 < reported["useful"] < 1
    assert list(tmp_path.iterdir()) == []


def test_the_line_that_a_plan_prints_runs(call, tmp_path):
    local = ("--local", tmp_path / "f")
    line = call("plan", tmp_path / "r", *COMMON, *local)[1].strip().splitlines()[-1]
    with eval(line, {"ckpt": ckpt, "Checkpointer": ckpt.Checkpointer}) as checkpointer:
        assert checkpointer.save(0, {"w": 1})
