"""What policies keep and delete: into the trash on request, failures told, nothing that no Checkpointer has saved."""

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import keep
from tests.support import seams
from tests.support.places import Place, make_asynchronous, make_place, open_at, same, state, write  # noqa: F401 (fixture)


def blocking(directory: Path, **more: Any) -> ckpt.Checkpointer:
    return open_at(Place(str(directory)), asynchronous=False, **more)


def visible(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.name[0] != "."}


# ---- what is kept --------------------------------------------------------------------------------


def test_max_to_keep(place: Place, asynchronous: bool) -> None:
    with open_at(place, max_to_keep=2, asynchronous=asynchronous) as checkpointer:
        for step in range(5):
            checkpointer.save(step, state(step))
    assert checkpointer.all_steps() == [3, 4]
    # nothing of a deleted step is left
    assert {name.partition("/")[0] for name in place.names()} == {"3", "4"}
    if place.local:
        assert place.entries() == ["3", "4"]


@pytest.mark.parametrize(
    ("arguments", "metrics", "kept", "best", "explained"),
    [
        ({"max_to_keep": 2, "keep_period": 3}, [0.0] * 8, [0, 3, 6, 7], None, "a multiple of 3"),
        (
            {"max_to_keep": 2, "best_metric": "m", "best_mode": "min"},
            [0.5, 0.1, 0.3, 0.2, 0.9, 0.8],
            *([1, 3, 5], 1, "best 2 by m"),
        ),
        (  # of equal ones the newer, never NaN, nor one without
            {"max_to_keep": 1, "best_metric": "m", "best_mode": "max"},
            [1.0, 7.0, float("nan"), 7.0, 2.0, None],
            *([3, 5], 3, "best 1 by m"),
        ),
        ({"keep_policy": keep.steps([0])}, [0.0] * 3, [0, 2], None, "kept: the newest step"),
        (
            {"keep_policy": keep.latest(1) | keep.every_steps(4)},
            *([0.0] * 7, [0, 4, 6], None, "latest 1"),
        ),
    ],
)
def test_what_policies_keep(place, arguments, metrics, kept, best, explained):
    with open_at(place, **arguments) as checkpointer:
        for step, metric in enumerate(metrics):
            checkpointer.save(step, state(step), metrics=None if metric is None else {"m": metric})
    assert checkpointer.all_steps() == kept
    assert [*checkpointer.explain()] == kept
    assert explained in " ".join(checkpointer.explain().values())
    if best is not None:
        assert checkpointer.best_step() == best


def test_a_function_says_what_to_keep(tmp_path: Path) -> None:
    def odd(facts: Sequence[keep.StepFacts]) -> list[int]:
        return [entry.step for entry in facts if entry.step % 2]

    with blocking(tmp_path, keep_policy=odd) as checkpointer:
        for step in range(7):
            checkpointer.save(step, state(step))
        assert checkpointer.explain() == {
            **{step: "kept: chosen by odd" for step in (1, 3, 5)},
            6: "kept: the newest step",
        }
    facts = [keep.StepFacts(step) for step in range(5)]
    for policy in (keep.latest(1) | odd, keep.by(odd) | keep.latest(1), odd | keep.latest(1)):
        assert {*policy(facts)} == {1, 3, 4}
    assert keep.by(lambda facts: {0: "my reason"})(facts) == {0: "my reason"}


def test_a_policy_that_is_none_costs_no_step(tmp_path: Path) -> None:
    for policy in ("latest", 3):
        with pytest.raises(TypeError, match="keep_policy"):
            blocking(tmp_path, keep_policy=policy)
    with blocking(tmp_path, keep_policy=lambda facts: 5) as checkpointer:
        checkpointer.save(1, state(1))
        with pytest.raises(TypeError, match="must give step numbers"):
            checkpointer.save(2, state(2))
        assert checkpointer.all_steps() == [1, 2]


def test_the_newest_whole_step_is_kept_and_what_cannot_be_read(place: Place) -> None:
    write(place, 0, 1, 2)
    place.write("2/ckpt.json", b"{}")
    explained = open_at(place, max_to_keep=1).explain()
    assert explained[0].startswith("deleted") and explained[1].startswith("kept")
    assert "cannot be read" in explained[2]


def test_metrics_that_steps_lack_are_named(tmp_path, caplog):
    """A misspelt one keeps its step, one that no step has keeps all."""
    best: dict[str, Any] = {"best_mode": "min", "max_to_keep": 1}
    with blocking(tmp_path / "one", best_metric="loss", **best) as checkpointer:
        for step, name in enumerate(("loss", "loss", "los", "loss")):
            checkpointer.save(step, state(step), metrics={name: 9.0 - step})
        assert checkpointer.all_steps() == [2, 3]
    assert caplog.text.count("step 2 has the metrics 'los', and not 'loss'") == 1
    caplog.clear()
    with blocking(tmp_path / "none", best_metric="losss", **best) as checkpointer:
        for step in range(5):
            checkpointer.save(step, state(step), metrics={"loss": 1.0})
        assert checkpointer.all_steps() == [0, 1, 2, 3, 4]
    (said,) = [one for one in caplog.messages if "losss" in one]
    assert "'loss'" in said


def test_what_many_steps_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, not times: a save reads one record, and none of an older step once they are known."""
    with blocking(tmp_path) as checkpointer:
        checkpointer.save(0, state(0))
    for step in range(1, 100):
        shutil.copytree(tmp_path / "0", tmp_path / str(step))
    real, records = os.open, list[str]()

    def opens(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).endswith("/ckpt.json") and not flags & os.O_WRONLY:
            records.append(os.path.basename(os.path.dirname(path)))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", opens)
    with blocking(tmp_path, keep_policy=keep.every_steps(1)) as checkpointer:
        assert checkpointer.latest_step() == 99 and records == []
        assert checkpointer.save(100, state(100))
        assert sorted(map(int, records)) == [*range(101)]  # the policy has to know them
        records.clear()
        assert checkpointer.save(101, state(101))
        assert records == ["101"]


# ---- how it is deleted ---------------------------------------------------------------------------


def test_into_the_trash(tmp_path: Path) -> None:
    options = ckpt.Options(trash_directory="todelete")
    for _ in range(2):
        with blocking(tmp_path, max_to_keep=1, options=options) as checkpointer:
            checkpointer.save(1, state(1), overwrite=True)
            checkpointer.save(2, state(2))
            assert checkpointer.all_steps() == [2]
            checkpointer.delete(2)
    trashed = sorted(os.listdir(tmp_path / "todelete"))
    assert [name.split(".")[0] for name in trashed] == ["1", "1", "2", "2"]
    for name in trashed:
        assert same(ckpt.load(tmp_path / "todelete" / name), int(name[0]))
    assert visible(tmp_path) == {"todelete"}


def test_a_bucket_has_a_trash_too(tmp_path: Path) -> None:
    """Object by object, since nothing can be renamed there."""
    place = Place(f"memory://{tmp_path.name}/run")
    write(place, 1, 2, max_to_keep=1, options=ckpt.Options(trash_directory="todelete"))
    assert open_at(place).all_steps() == [2]
    assert same(ckpt.load(f"{place.url}/todelete/1"), 1)


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "12"])
def test_names_of_the_trash_refused(name: str) -> None:
    with pytest.raises(ValueError, match="trash_directory"):
        ckpt.Options(trash_directory=name)


def test_time_for_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later, clock = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + later[0])
    options = ckpt.Options(delete_grace_secs=10_000)
    with blocking(tmp_path, max_to_keep=1, options=options) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state(step))
            later[0] += 4_000
        assert checkpointer.all_steps() == [0, 1, 2]
        later[0] += 4_000  # step 0 has not been needed since 4,000, step 1 since 8,000
        checkpointer.save(3, state(3))
        assert checkpointer.all_steps() == [1, 2, 3]
        later[0] += 100_000
        checkpointer.save(4, state(4))
        assert checkpointer.all_steps() == [3, 4]


def test_a_failed_deletion_is_reported_and_not_fatal(tmp_path, monkeypatch, caplog):
    told: list[ckpt.Event] = []
    options = ckpt.Options(on_event=told.append)
    with blocking(tmp_path, max_to_keep=1, options=options) as checkpointer:
        checkpointer.save(1, state(1))
        with monkeypatch.context() as patch:
            seams.at(patch, "delete", before=seams.fail(OSError, 5, "broken"))
            assert checkpointer.save(2, state(2))
        assert checkpointer.all_steps() == [1, 2]
        failed = [event for event in told if event.kind == "delete_failed"]
        assert [(event.step, str(event.error)) for event in failed] == [(1, "[Errno 5] broken")]
        assert "could not delete" in caplog.text
        checkpointer.save(3, state(3))  # tried again
        assert checkpointer.all_steps() == [3]


def test_a_writer_elsewhere_that_still_writes_is_left_alone(tmp_path: Path) -> None:
    hours_ago = time.time() - 2 * 3600
    for name in ("alive", "dead"):
        temporary = tmp_path / f".ckpt-tmp.{name}.00000000-1-1.abcdabcdabcdabcdabcdabcd"
        deepest = temporary / "state" / "d"
        deepest.mkdir(parents=True)
        (deepest / "data").write_bytes(b"data")
        for path in (deepest / "data", deepest, deepest.parent, temporary):
            if name == "dead" or path.name != "data":
                os.utime(path, (hours_ago, hours_ago))
    blocking(tmp_path).close()
    (left,) = os.listdir(tmp_path)
    assert "alive" in left


# ---- what no Checkpointer has saved --------------------------------------------------------------


@pytest.mark.parametrize("prefix", [None, "run"])
def test_single_checkpoints_beside_a_run_are_not_deleted(tmp_path, prefix):
    """Their names end in numbers, so they count as steps; a sweep was deleted by the first save of a run beside it."""
    for name in ("lr_1", "wd_1", "lr_2"):
        ckpt.save(tmp_path / name, {"other": np.ones(5)})
    with blocking(tmp_path, max_to_keep=1, step_prefix=prefix) as checkpointer:
        for step in (10, 11, 12):
            checkpointer.save(step, state(step))
        assert checkpointer.all_steps() == [1, 2, 12]
        assert "lr_2 has another prefix" in checkpointer.explain()[2]
    last = "12" if prefix is None else "run_12"
    assert visible(tmp_path) == {"lr_1", "lr_2", "wd_1", last}
    with blocking(tmp_path) as checkpointer:
        checkpointer.delete(2)
    assert "lr_2" not in visible(tmp_path)


def test_copies_beside_steps_keep_none_of_them(tmp_path: Path) -> None:
    """``best_2`` stays, and the step 2 of the run goes."""
    with blocking(tmp_path, max_to_keep=2) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step, state(step))
            if step == 2:
                ckpt.save(tmp_path / "best_2", state(2))
    assert visible(tmp_path) == {"5", "6", "best_2"}


def test_a_step_of_two_names_goes_under_both(tmp_path: Path) -> None:
    for name in ("5", "6", "step_6"):
        ckpt.save(tmp_path / name, state(int(name[-1])))
    with blocking(tmp_path) as checkpointer:
        assert checkpointer.rollback_to(5) == [6]
    assert visible(tmp_path) == {"5"}
