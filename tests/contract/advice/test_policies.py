"""Policies and metrics that a ``Checkpointer`` refuses, and what its messages say to write."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import keep, when
from tests.contract.advice.said import logged, told
from tests.contract.advice.test_runs import resumes, resumes_unchanged, runs, saved, state


def test_policies_that_exclude_each_other(tmp_path: Path):
    both: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (
            "pass save_interval_steps or save_policy, not both",
            {"save_interval_steps": 2},
            {"save_policy": when.every_steps(2)},
        ),
        (
            "pass max_to_keep and keep_period, or keep_policy, not both",
            {"max_to_keep": 1},
            {"keep_policy": keep.latest(1)},
        ),
    ]
    for number, (key, one, other) in enumerate(both):
        with told(key):
            runs(tmp_path, **one, **other)
        for name, which in (("one", one), ("other", other)):
            directory = tmp_path / f"{number}{name}"
            saved(directory, [0, 1, 2], **which)
            assert resumes(directory, 2)


def test_a_number_for_a_policy(tmp_path: Path):
    with told("save_policy must be one of ckpt.when") as said:
        runs(tmp_path, save_policy=2)
    assert "a function of (step, context)" in said.text
    own = "save_policy=lambda step, context: step % 2 == 0"
    for action in (
        own,
        said.between(" pass ", " or save_policy="),
        "save_policy=" + said.text.rpartition("or save_policy=")[2],
    ):
        directory = tmp_path / str(len(action))
        saved(directory, range(4), **eval(f"dict({action})", {"ckpt": ckpt}))
        assert sorted(p.name for p in directory.iterdir() if p.name.isdigit()) == ["0", "2"]
        assert resumes(directory, 2)


def test_a_text_for_a_short_argument(tmp_path: Path):
    with told(": write ", of=TypeError) as said:
        runs(tmp_path, max_to_keep="1")
    assert "max_to_keep must be a whole number, got '1', a str" in said.text
    saved(tmp_path, [0, 1], max_to_keep=eval(said.after(": write ")))
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["1"]


@pytest.mark.parametrize("given", [{"save_policy": when.first}, {"keep_policy": keep.latest}])
def test_a_policy_that_was_not_called(tmp_path: Path, given: dict[str, Any]):
    key = "is the function that makes a policy: write "
    with told(key, of=TypeError) as said:
        runs(tmp_path, **given)
    written = said.after(": write ").replace("...", "2")
    saved(tmp_path, [0, 1], **eval(f"dict({written})", {"ckpt": ckpt}))
    assert resumes(tmp_path, 0 if "save_policy" in given else 1)


def test_a_number_beside_a_policy(tmp_path: Path):
    with told("is no policy: join those of ckpt.when, such as") as said:
        _ = when.first() | 2  # pyright: ignore
    joined = when.first() | eval(said.between("such as ", ", or functions"), {"ckpt": ckpt})
    saved(tmp_path, range(102), save_policy=joined)
    assert resumes(tmp_path, 100)


def test_none_to_keep(tmp_path: Path):
    with told(": the newest step is always kept. Leave it out to keep"):
        runs(tmp_path, max_to_keep=0)
    saved(tmp_path, [0, 1])
    assert resumes(tmp_path, 1)
    with told(": leave it out to keep no more than max_to_keep"):
        runs(tmp_path, max_to_keep=2, keep_period=0)
    saved(tmp_path / "b", [0, 1, 2], max_to_keep=2)
    assert resumes(tmp_path / "b", 2)


METRICS: dict[str, tuple[str, Any, Callable[[str], dict[str, Any]]]] = {
    "a dict": (
        "give each number a name of its own, such as",
        {"loss": {"train": 1.0}},
        lambda text: {"metrics": {eval(text.rpartition("such as ")[2]): 1.0}},
    ),
    "left out": (
        "leave it out, save it as metadata={...}, or save all metrics",
        {"loss": 1.0, "name": "a"},
        lambda _: {"metrics": {"loss": 1.0}},
    ),
    "as metadata": (
        "leave it out, save it as metadata={...}, or save all metrics",
        {"loss": 1.0, "name": "a"},
        lambda text: {
            "metrics": {"loss": 1.0},
            **eval(
                f"dict({text.partition('save it as ')[2].partition(', or')[0]})".replace(
                    "...", "'name': 'a'"
                )
            ),
        },
    ),
    "as an item": (
        "leave it out, save it as metadata={...}, or save all metrics",
        {"loss": 1.0, "name": "a"},
        lambda text: eval(
            f"dict({text.rpartition('as an item: ')[2]})".replace(
                "{...}", "{'loss': 1.0, 'name': 'a'}"
            ),
            {"ckpt": ckpt},
        ),
    ),
    "an array": (
        "take one number of it, such as its mean",
        {"loss": np.ones(3)},
        lambda _: {"metrics": {"loss": np.ones(3).mean()}},
    ),
}


@pytest.mark.parametrize("kind", METRICS)
def test_metrics_that_are_no_numbers(tmp_path: Path, kind: str):
    key, metrics, action = METRICS[kind]
    with runs(tmp_path) as run:
        with told(key) as said:
            run.save(0, params=state(0), metrics=metrics)
        done = action(said.text)
        run.save(0, params=state(0), **done)
    with runs(tmp_path) as run:
        assert 1.0 in run.metrics(0).values()
        found = run.restore(0, params=state(5), unexpected="ignore")
        assert np.array_equal(found["params"]["w"], state(0)["w"])


def test_metrics_twice_or_an_object(tmp_path: Path):
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


def test_a_metric_that_no_step_has(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    best: dict[str, Any] = {"best_metric": "loss", "best_mode": "min", "max_to_keep": 1}
    with caplog.at_level(logging.WARNING), runs(tmp_path, **best) as run:
        for step in range(3):
            run.save(step, state(step))
    logged(
        "by which steps are kept, so none is kept or deleted for it: pass it to save",
        caplog,
    )
    assert resumes_unchanged(tmp_path, [0, 1, 2])
    with runs(tmp_path, **best) as run:
        run.restore_latest(state(0))["state"]  # pyright: ignore[reportOptionalSubscript]
        for step in range(3, 6):
            run.save(step, state(step), metrics={"loss": step})
        run.wait_until_finished()
        assert run.best_step() == 3
    assert resumes(tmp_path, 5)
