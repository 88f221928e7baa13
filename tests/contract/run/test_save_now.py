"""`ckpt save-now RUN`: a job that runs saves a step, whatever its policy, because somebody outside asks."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.command_line import Call, make_call  # noqa: F401 (fixture)
from tests.support.launch import launch, reports

STATE = {"w": np.arange(3.0)}
REQUEST = ".ckpt-save-now"
NEVER = ckpt.when.at_steps([])


def steps(secs: float = 60) -> Iterator[int]:
    """The steps of a loop that somebody would stop."""
    deadline = time.monotonic() + secs
    for step in range(10**6):
        assert time.monotonic() < deadline, "nothing was saved"
        yield step
        time.sleep(0.01)


@pytest.mark.parametrize("tiers", [False, True])
def test_it_is_asked_until_a_step_is_committed(tmp_path, call: Call, tiers):
    """Also before the start of the job, as after one that was killed; and if the first save for it fails."""
    (run_path := tmp_path / "run").mkdir()
    code, out, _ = call("save-now", run_path)
    assert code == 0 and "nobody on this machine writes there now" in out
    assert call("save-now", run_path, "--wait", "0.1")[0] == 1
    options = ckpt.Options(persist_policy=NEVER, durable=False)
    where: Any = {"save_policy": NEVER, "options": ckpt.Options(durable=False)}
    if tiers:
        every = ckpt.when.every_steps(1)
        where = {"save_policy": every, "local_directory": tmp_path / "local", "options": options}
    with ckpt.Checkpointer(run_path, **where) as run:
        fails = failed = None
        for step in steps():
            try:
                run.save(step, {"w": object()} if failed is None and not tiers else STATE)
            except ckpt.UnsupportedLeaf:
                fails, failed = step, (run_path / REQUEST).exists()
            if not (run_path / REQUEST).exists():
                break
        run.wait_until_finished()
    assert tiers or (fails and failed)
    with ckpt.Checkpointer(run_path, read_only=True) as run:
        (saved,) = run.all_steps()
        assert saved > (fails or 0)
        assert run.load(saved)["w"].tolist() == STATE["w"].tolist()
    told = json.loads(call("save-now", run_path, "--json")[1])
    assert told == {
        "directory": str(run_path),
        "new": True,
        "saved": False,
        "newest_step": None,
    }


def test_in_a_bucket(call: Call):
    url = "memory://save-now/run"
    with ckpt.Checkpointer(url, save_policy=NEVER) as run:
        assert call("save-now", url)[0] == 0
        for step in steps(90):
            if run.save(step, STATE):
                break
        run.wait_until_finished()
        assert run.all_steps() == [step]
    assert "is asked" in call("save-now", url)[1]


def test_where_nothing_runs_is_said(tmp_path, call: Call):
    assert call("save-now", tmp_path / "nowhere")[0] == 2
    ckpt.save(tmp_path / "one", STATE)
    code, _, said = call("save-now", tmp_path / "one")
    assert code == 2 and "is one checkpoint" in said
    assert not [*Path(tmp_path).rglob(REQUEST)]


PROCESSES = """
policy = {"by step": ckpt.when.at_steps([3]), "by time": ckpt.when.every_secs(1e6)}[kind]
saved = []
with ckpt.Checkpointer(directory, save_policy=policy, options=options) as run:
    run.save(0, {"w": put(np.arange(8.0))}, force=True)
    run.wait_until_finished()
    for step in range(1, 6000):
        time.sleep(0.001 if (step // 20 + index) % 2 else 0.03)  # one is ahead, then the other
        if step == 20 and index == 1:
            open(f"{directory}/.ckpt-save-now", "w").write("please")
        if asks and index == 0:
            run.should_save(step)  # one alone may ask
        if not asks or run.should_save(step):
            saved += [step] * run.save(step, {"w": put(np.arange(8.0) + step)})
        if saved and saved[-1] > 20:
            break
    run.wait_until_finished()
    found = run.all_steps()
    there = os.path.exists(f"{directory}/.ckpt-save-now")
report(saved=saved, steps=found, there=there)
"""


@pytest.mark.parametrize(
    ("kind", "asks"), [("by step", False), ("by step", True), ("by time", False)]
)
def test_two_processes_save_one_step(tmp_path, kind, asks):
    one, two = reports(launch(f"kind, asks = {kind!r}, {asks}\n{PROCESSES}", tmp_path / "run"))
    assert one["saved"] == two["saved"] and not one["there"]  # process 0 removes it
    assert one["saved"][-1] > 20 and one["steps"] == sorted({0, *one["saved"]})
