"""Policies and metrics that a ``Checkpointer`` refuses, and what its messages say to write."""

import logging
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import keep, when
from tests.contract.advice.said import logged, told
from tests.contract.advice.test_runs import resumes, resumes_unchanged, runs, saved, state


@pytest.mark.parametrize("given", [{"save_policy": when.first}, {"keep_policy": keep.latest}])
def test_a_policy_that_was_not_called(tmp_path, given):
    key = "is the function that makes a policy: write "
    with told(key, of=TypeError) as said:
        runs(tmp_path, **given)
    written = said.after(": write ").replace("...", "2")
    saved(tmp_path, [0, 1], **eval(f"dict({written})", {"ckpt": ckpt}))
    assert resumes(tmp_path, 0 if "save_policy" in given else 1)


def test_metrics_twice_or_an_object(tmp_path):
    with runs(tmp_path) as run:
        item = {"metrics": ckpt.Json({"loss": 2.0})}
        with told("pass the metrics by metrics=, or all of them as an"):
            run.save(0, params=state(0), items=item, metrics={"loss": 1.0})
        run.save(0, params=state(0), metrics={"loss": 1.0})
        run.save(1, params=state(1), items=item)
        run.wait_until_finished()
        assert (run.metrics(0), run.metrics(1)) == ({"loss": 1.0}, {"loss": 2.0})
        with told("an object that is to be an item of this name is passed as") as said:
            run.save(2, params=state(2), metrics=np.ones(2))  # pyright: ignore[reportArgumentType]
        items = eval(
            said.between("passed as items=", ", to save").replace("...", "one"), {"one": np.ones(2)}
        )
        run.save(2, params=state(2), items=items)
    with runs(tmp_path) as run:
        with told("an object that is to be an item of this name is passed as"):
            run.restore(2, params=state(0), metrics=np.zeros(2))
        found = run.restore(2, params=state(0), items={"metrics": np.zeros(2)})
        assert found["metrics"].tolist() == [1, 1]


def test_a_metric_that_no_step_has(tmp_path, caplog):
    best: dict[str, Any] = {"best_metric": "loss", "best_mode": "min", "max_to_keep": 1}
    with caplog.at_level(logging.WARNING), runs(tmp_path, **best) as run:
        for step in range(3):
            run.save(step, state(step))
    logged("by which steps are kept, so none is kept or deleted for it: pass it to save", caplog)
    assert resumes_unchanged(tmp_path, [0, 1, 2])
    with runs(tmp_path, **best) as run:
        run.restore_latest(state(0))["state"]  # pyright: ignore[reportOptionalSubscript]
        for step in range(3, 6):
            run.save(step, state(step), metrics={"loss": step})
        run.wait_until_finished()
        assert run.best_step() == 3
    assert resumes(tmp_path, 5)
