"""Saves into a directory of steps: when, what is refused, how it ends; what it says is there, and what comes back, past damage too."""

import gc
import itertools
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import seams
from tests.support.places import (  # noqa: F401 (fixtures)
    Place,
    make_asynchronous,
    make_local,
    make_place,
    open_at,
    same,
    state,
    write,
)


def test_interval(place, asynchronous):
    with open_at(place, save_interval_steps=3, asynchronous=asynchronous) as checkpointer:
        started = [checkpointer.save(step, state(step)) for step in range(8)]
        assert started == [step % 3 == 0 for step in range(8)]
        assert [checkpointer.should_save(step) for step in (8, 9)] == [False, True]
        assert checkpointer.save(7, state(7), force=True) is True
    assert open_at(place).all_steps() == [0, 3, 6, 7]


def test_step_numbers_refused(place):
    checkpointer = open_at(place)
    calls = {"save": [state(0)], "restore": [state(0)]}
    calls |= {name: [] for name in ("load", "should_save", "delete", "inspect", "rollback_to")}
    for step, (name, more) in itertools.product((-1, True, "3", 1.5, None, 2**63), calls.items()):
        with pytest.raises((TypeError, ValueError), match="step must be an integer"):
            getattr(checkpointer, name)(step, *more)
    assert checkpointer.all_steps() == []


def test_numpy_integers_are_steps(place):
    with open_at(place) as checkpointer:
        assert checkpointer.save(np.int32(3), state(3))
        assert checkpointer.save(jnp.int32(4), state(4))
    assert same(checkpointer.load(np.int64(3)), 3)
    assert type(checkpointer.restore(np.int64(3), state=state(0)).step) is int


def test_read_only(place):
    write(place, 1, 2)
    before = {name: place.read(name) for name in place.names()}
    with open_at(place, read_only=True, max_to_keep=1) as checkpointer:
        assert checkpointer.should_save(3) is False
        for call in (
            lambda: checkpointer.save(3, state(3)),
            lambda: checkpointer.save(3, state(3), force=True),
            lambda: checkpointer.delete(1),
            lambda: checkpointer.rollback_to(1),
        ):
            with pytest.raises(ckpt.CheckpointError, match="read_only"):
                call()
        assert checkpointer.restore_latest(state=state(0)).step == 2
    assert {name: place.read(name) for name in place.names()} == before


def test_a_file_is_no_directory_of_steps(local):
    Path(local.url).write_text("a file")
    with pytest.raises(NotADirectoryError):
        open_at(local, read_only=True).restore_latest(state=state(0))


def test_close(place):
    checkpointer = open_at(place)
    checkpointer.save(0, state(0))
    checkpointer.close()
    assert checkpointer.all_steps() == [0]  # the save was waited for
    checkpointer.close()
    with pytest.raises(ckpt.CheckpointError, match="closed"):
        checkpointer.save(1, state(1))


def _fail_after_a_save(place: Place) -> None:
    with open_at(place) as checkpointer:
        checkpointer.save(0, state(0))
        raise KeyError("of the loop")


def test_an_error_in_the_body_is_not_masked(place):
    with pytest.raises(KeyError) as caught:
        _fail_after_a_save(place)
    assert not hasattr(caught.value, "__notes__")
    assert open_at(place).all_steps() == [0]


_fail = seams.fail(OSError, 5, "no luck")


def test_a_failed_save_ends_the_with_block(local, monkeypatch):
    seams.at(monkeypatch, "commit", before=_fail)
    with pytest.raises(OSError, match="no luck") as caught, open_at(local) as checkpointer:
        checkpointer.save(0, state(0))
    assert "step 0" in caught.value.__notes__[0]


def test_a_failure_masks_no_other_one(local, monkeypatch):
    seams.at(monkeypatch, "commit", before=seams.fail(), nth=1)
    with pytest.raises(KeyError) as caught:
        _fail_after_a_save(local)
    (note,) = caught.value.__notes__
    assert "No space left" in note and local.url in note
    assert local.entries() == []


def test_a_failed_step_can_be_saved_again(local, monkeypatch, asynchronous):
    with open_at(local, asynchronous=asynchronous) as checkpointer:
        seams.at(monkeypatch, "commit", before=_fail)
        if asynchronous:
            checkpointer.save(0, state(0))
        ask = checkpointer.wait_until_finished
        with pytest.raises(OSError, match="no luck"):
            ask() if asynchronous else checkpointer.save(0, state(0))
        monkeypatch.undo()
        assert checkpointer.save(0, state(0)) is True
    assert checkpointer.all_steps() == [0] and local.entries() == ["0"]


def test_metrics_of_every_kind_of_number(place):
    numbers = {"a": 1, "b": jnp.float32(0.5), "c": np.int8(3), "d": True, "e": float("inf")}
    expected = {"a": 1.0, "b": 0.5, "c": 3.0, "d": 1.0, "e": float("inf")}
    for dtype in ("bfloat16", "float16", "float8_e4m3fn", "int4", "bool"):
        numbers |= {
            dtype: jnp.asarray(1, dtype),
            f"host {dtype}": np.asarray(jnp.asarray(1, dtype)),
        }
        expected |= {dtype: 1.0, f"host {dtype}": 1.0}
    with open_at(place) as checkpointer:
        checkpointer.save(0, state(0), metrics=numbers)
    assert checkpointer.metrics(0) == expected


def test_metrics_of_a_step_that_is_not_saved_are_not_read(place):
    loss = jnp.float32(0.5)
    loss.delete()
    with open_at(place, save_interval_steps=2) as checkpointer:
        checkpointer.save(0, state(0))
        assert not checkpointer.save(1, state(1), metrics={"loss": loss})  # no device is waited for
        with pytest.raises(RuntimeError, match="deleted"):
            checkpointer.save(2, state(2), metrics={"loss": loss})


def test_none_is_a_state(place):
    with open_at(place) as checkpointer:
        with pytest.raises(TypeError, match="at least one target"):
            checkpointer.restore_latest()
        assert checkpointer.save(0, None)
        with pytest.raises(TypeError, match="at least one target"):
            checkpointer.restore_latest()
    assert checkpointer.load(0) is None


def test_a_refused_save_leaves_nothing(place):
    with open_at(place) as checkpointer:
        with pytest.raises(ckpt.UnsupportedLeaf):
            checkpointer.save(0, {"w": np.ones(3), "bad": {1, 2}})
        with pytest.raises(TypeError, match="metadata"):
            checkpointer.save(0, state(0), metadata={"a": object()})
        assert place.names() == []
        assert checkpointer.save(0, state(0))


def test_a_file_called_as_a_record_in_a_parent(tmp_path):
    (tmp_path / "ckpt.json").write_text('{"mine": 1}')
    ckpt.save(tmp_path / "below" / "one", state(1))
    assert ckpt.verify(tmp_path / "below" / "one").ok
    with pytest.raises(ckpt.CheckpointExists, match="lies inside the checkpoint"):
        ckpt.save(tmp_path / "below" / "one" / "two", state(1))


TELLING = ("commit_success.txt", "_CHECKPOINT_METADATA", "state/_METADATA", "ckpt.json")


def test_on_object_stores_nothing_tells_of_a_step_before_its_arrays(monkeypatch):
    """There is no rename: Orbax takes a directory with a commit file for a whole checkpoint."""
    place = Place(f"memory://test-order-{os.getpid()}/run")
    seen = []

    def look(*_):
        seen.append([name for name in TELLING if place.read(name)])

    seams.at(monkeypatch, "write", after=look)
    ckpt.save(place.url, {"w": np.ones(3)})
    assert seen == [[]]
    assert all(place.read(name) for name in TELLING)


def test_an_empty_directory(place):
    checkpointer = open_at(place, best_metric="loss", best_mode="min")
    assert checkpointer.restore_latest(state=state(0)) is None
    assert checkpointer.latest_step() is None and checkpointer.best_step() is None
    assert checkpointer.all_steps() == [] and checkpointer.explain() == {}
    with pytest.raises(ckpt.CheckpointNotFound, match="no step 3; it has: none"):
        checkpointer.load(3)


def test_queries(place):
    with open_at(place) as checkpointer:
        checkpointer.save(1, params=state(1), metrics={"loss": 2}, metadata={"run": "a"})
        checkpointer.save(12, params=state(12), metadata=[1])
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [1, 12] and checkpointer.latest_step() == 12
        assert checkpointer.metrics(1) == {"loss": 2.0} and checkpointer.metrics(12) == {}
        assert checkpointer.metadata(1) == {"run": "a"} and checkpointer.metadata(12) == [1]
        info = checkpointer.inspect(1)
    assert [leaf.path for leaf in info.items["params"].leaves] == ["w", "n"]
    assert info.items["params"].leaves[0].shape == (64,)
    assert info.metrics == {"loss": 2.0} and info.format_version is not None
    with pytest.raises(ckpt.CheckpointNotFound, match="no step 2; it has: 1, 12"):
        checkpointer.inspect(2)
    assert checkpointer.directory == place.url


def test_restore_load_and_restore_latest(place, asynchronous):
    with open_at(place, asynchronous=asynchronous) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state(step), metadata=step)
        # of a save that may be running still
        restored = checkpointer.restore_latest(state=state(0))
        assert restored is not None and restored.step == 2 and same(restored["state"], 2)
        assert same(checkpointer.load(1), 1)
        assert same(checkpointer.load(1, state(0)), 1)
        assert same(checkpointer.load(1, item="state"), 1)
        older = checkpointer.restore(0, state=state(2))
    assert older.step == 0 and older.metadata == 0 and same(older.state, 0)


def test_only_rename_cast_missing_and_unexpected(place):
    write(place, 0)
    checkpointer = open_at(place)
    target = {"v": jnp.zeros(64, jnp.bfloat16), "n": 0, "more": 5}
    arguments: dict[str, Any] = {"rename": {"w": "v"}, "cast": True, "missing": "keep"}
    restored = checkpointer.restore_latest(state=target, **arguments)
    assert restored["state"]["more"] == 5 and restored["state"]["v"].dtype == jnp.bfloat16
    assert restored.report.cast and restored.report.missing
    restored = checkpointer.restore(0, state={"n": 7}, unexpected="ignore")
    assert restored["state"] == {"n": 0} and restored.report.unexpected
    assert set(checkpointer.load(0, only="w")) == {"w"}


def test_restored(place):
    write(place, 4)
    with open_at(place) as checkpointer:
        restored = checkpointer.restore_latest(items={"state": state(0)})
    assert restored and len(restored) == 1 and list(restored) == ["state"]
    assert dict(restored)["state"] is restored["state"] is restored.state
    assert restored.path == f"{place.url}/4" and restored.step == 4
    assert "n" in str(restored.report.loaded)
    with pytest.raises(KeyError, match="was restored, but state"):
        restored["model"]
    with pytest.raises(AttributeError):
        _ = restored.model
    assert "step=4" in repr(restored)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "7"),
        ({"step_prefix": "step"}, "step_7"),
        ({"step_prefix": "step_"}, "step__7"),
        ({"step_format_fixed_length": 4}, "0007"),
        ({"step_prefix": "run", "step_format_fixed_length": 4}, "run_0007"),
    ],
)
def test_names_of_steps(place, arguments, name):
    write(place, 7, **arguments)
    assert {found.partition("/")[0] for found in place.names()} == {name}
    # every other way of naming reads, refuses to write it again, and deletes it
    for reading in ({}, {"step_prefix": "s"}, {"step_format_fixed_length": 6}):
        checkpointer = open_at(place, **reading)
        assert checkpointer.all_steps() == [7] and same(checkpointer.load(7), 7)
        with pytest.raises(ckpt.CheckpointExists):
            checkpointer.save(7, state(8))
        restored = checkpointer.restore_latest(state=state(0))
        assert restored.step == 7 and same(restored["state"], 7)
        assert not checkpointer.save(7, state(8))  # it stands there
    checkpointer.delete(7)
    assert checkpointer.all_steps() == [] and place.names() == []


def test_overwrite_of_a_step_with_another_name(local):
    write(local, 1, step_prefix="step")
    with open_at(local) as checkpointer:
        assert checkpointer.save(1, state(2), overwrite=True)
    assert same(open_at(local, step_prefix="step").load(1), 2)


def test_what_is_no_step_is_left_alone(local):
    write(local, 1)
    for name in ("logs", "12abc", "5"):  # a number with nothing in it is no step either
        os.makedirs(f"{local.url}/{name}")
    Path(local.url, "9").write_text("a file")
    write(local, 2, 3, max_to_keep=1)
    assert open_at(local).all_steps() == [3]
    assert local.entries() == ["12abc", "3", "5", "9", "logs"]


def test_wait_for_new_step(place):
    follower = open_at(place, read_only=True)
    assert follower.wait_for_new_step(timeout_secs=0) is None
    write(place, 3)
    assert follower.wait_for_new_step(timeout_secs=0) == 3
    assert follower.wait_for_new_step(2) == 3
    started = time.monotonic()
    assert follower.wait_for_new_step(3, timeout_secs=0.2) is None
    assert time.monotonic() - started < 5

    writer = threading.Timer(0.1, lambda: write(place, 8))
    writer.start()
    assert follower.wait_for_new_step(3, timeout_secs=30) == 8
    writer.join()


def test_a_step_without_its_record_is_not_there(place):
    write(place, 1, 2)
    place.remove("2/ckpt.json")
    checkpointer = open_at(place)
    if not place.local:
        assert checkpointer.all_steps() == [1]
        assert checkpointer.restore_latest(state=state(0)).step == 1
        return
    # a rename brings the record with everything else, so in a file system this is damage
    with pytest.warns(RuntimeWarning, match=r"step 2 is damaged.*ckpt\.json"):
        assert checkpointer.restore_latest(state=state(0)).step == 1
    os.rename(f"{place.url}/2", f"{place.url}/.ckpt-tmp.2.someone.012301230123012301230123")
    assert checkpointer.all_steps() == [1]


@pytest.mark.parametrize("kind", ["record", "values"])
def test_a_damaged_newest_step_is_skipped(place, kind):
    write(place, 1, 2, 3)
    if kind == "values":
        place.damage(3)
    else:
        place.write("3/ckpt.json", place.read("3/ckpt.json").replace(b"3", b"4", 1))
    before = {name: place.read(name) for name in place.names()}
    with open_at(place) as checkpointer:
        with pytest.warns(RuntimeWarning, match="step 3 is damaged and skipped") as caught:
            restored = checkpointer.restore_latest(state=state(0))
        assert len(caught) == 1 and caught[0].filename == __file__
        assert ("w" if kind == "values" else "ckpt.json") in str(caught[0].message)
        assert restored.step == 2 and same(restored["state"], 2)
        with pytest.raises(ckpt.CheckpointCorrupt) as error:
            checkpointer.restore_latest(state=state(0), strict_latest=True)
        if kind == "values":
            assert error.value.leaf == "w"
        with pytest.raises(ckpt.CheckpointCorrupt):
            checkpointer.load(3)
    assert {name: place.read(name) for name in place.names()} == before


class Reader:
    per_process = True

    def get_state(self):
        return {"at": 1}

    def set_state(self, state):
        pass


def test_all_steps_damaged(place):
    reader = Reader()
    with open_at(place) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state=state(step), reader=reader)
    place.damage(1)
    place.damage(2)
    before = {name: place.read(name) for name in place.names()}
    last = open_at(place)
    with (
        pytest.warns(RuntimeWarning, match="damaged and skipped"),
        pytest.raises(ckpt.CheckpointCorrupt, match="none of the steps 2, 1") as caught,
    ):
        last.restore_latest(state=state(0), reader=reader)
    assert {name: place.read(name) for name in place.names()} == before
    assert caught.value.leaf == "w"
    assert "reader was set before" in "".join(caught.value.__notes__)
    with pytest.raises(ckpt.RestoredValueIgnored, match="restore again before you save"):
        last.save(3, state=state(3), reader=reader)


def test_mismatch_is_raised_even_with_older_steps(place):
    write(place, 1)
    with open_at(place) as checkpointer:
        checkpointer.save(2, {"other": np.zeros(3)})
    with pytest.raises(ckpt.StructureMismatch) as caught:
        open_at(place).restore_latest(state=state(0))
    assert {mismatch.kind for mismatch in caught.value.mismatches} == {"missing", "unexpected"}


def test_restored_values_are_not_kept_alive(local):
    """What is noticed of them (test_restored_but_not_taken.py) holds none of them."""
    fresh = {"w": jnp.zeros(64)}
    with open_at(local) as checkpointer:
        checkpointer.save(0, params=fresh)
        restored = checkpointer.restore_latest(params=fresh)
        values = weakref.ref(restored["params"]["w"])
        del restored, fresh
        checkpointer.save(1, params={"w": jnp.ones(64)})
        checkpointer.wait_until_finished()
        gc.collect()
        assert values() is None
