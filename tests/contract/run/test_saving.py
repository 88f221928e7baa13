"""Saves into a directory of steps: when, what is refused, how it ends."""

import os
from pathlib import Path

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


@pytest.mark.parametrize("step", [-1, True, "3", 1.5, None, 2**63], ids=repr)
def test_step_numbers_refused(place, step):
    checkpointer = open_at(place)
    for call in (
        lambda: checkpointer.save(step, state(0)),
        lambda: checkpointer.load(step),
        lambda: checkpointer.restore(step, state=state(0)),
        lambda: checkpointer.should_save(step),
        lambda: checkpointer.delete(step),
        lambda: checkpointer.inspect(step),
        lambda: checkpointer.rollback_to(step),
    ):
        with pytest.raises((TypeError, ValueError), match="step must be an integer"):
            call()
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


def test_none_is_a_state(place):
    with open_at(place) as checkpointer:
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
