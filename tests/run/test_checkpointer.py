"""A directory of steps: what is saved, what is kept, what comes back, and what is refused."""

import gc
import itertools
import os
import shutil
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory.posix import LocalAttempt
from ckpt_core._format import orbax_write
from ckpt_core._storage import ArrayWriter, KeyValues, Location, backend_of

QUICK = ckpt.Options(durable=False)
OWNER = ".ckpt-owner"
_numbers = itertools.count()


class Place:
    """Where steps lie, with a way to look at and change the files there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.local = "://" not in url

    def __truediv__(self, name: str) -> "Place":
        return Place(f"{self.url}/{name}")

    def names(self) -> list[str]:
        """Every file, but for the note that says which run the directory belongs to."""
        if self.local:
            files = [path for path in Path(self.url).rglob("*") if path.is_file()]
            names = sorted(str(path.relative_to(self.url)) for path in files)
        else:
            names = self._keys().list()
        return [name for name in names if name != OWNER]

    def entries(self) -> list[str]:
        """What lies in a local directory, but for the same note."""
        return sorted(name for name in os.listdir(self.url) if name != OWNER)

    def read(self, name: str) -> bytes:
        return Path(self.url, name).read_bytes() if self.local else self._keys().get(name) or b""

    def write(self, name: str, data: bytes) -> None:
        if self.local:
            Path(self.url, name).write_bytes(data)
        else:
            self._keys().put(name, data)

    def remove(self, name: str) -> None:
        if self.local:
            os.remove(f"{self.url}/{name}")
        else:
            self._keys().delete_all(name)

    def damage(self, step: int) -> None:
        """Flips one bit of the values of the array `w` that `state` made."""
        values = state(step)["w"].tobytes()
        for name in self.names():
            data = bytearray(self.read(name))
            where = data.find(values)
            if name.startswith(f"{step}/") and where >= 0:
                data[where + 5] ^= 1
                self.write(name, bytes(data))
                return
        raise AssertionError("the array was not found")

    def _keys(self) -> KeyValues:
        return KeyValues(Location(self.url, False))


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    # the store in memory belongs to the process: a name of its own for every test
    memory = f"memory://test-checkpointer-{os.getpid()}-{next(_numbers)}/run"
    return Place(str(tmp_path / "run") if request.param == "local" else memory)


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"))


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return request.param


def state(step: int) -> dict[str, Any]:
    """A state that differs for every step, in arrays too large to stand in the index."""
    return {"w": np.arange(64, dtype=np.float32) + 1000 * step, "n": step}


def open_at(place: Place, **arguments: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(place.url, options=arguments.pop("options", QUICK), **arguments)


def write(place: Place, *steps: int, **arguments: Any) -> None:
    with open_at(place, **arguments) as checkpointer:
        for step in steps:
            assert checkpointer.save(step, state(step), force=True)


def same(tree: Any, step: int) -> bool:
    return tree["n"] == step and np.array_equal(np.asarray(tree["w"]), state(step)["w"])


# ---- saving and keeping ------------------------------------------------------------------------


def test_interval(place, asynchronous):
    with open_at(place, save_interval_steps=3, asynchronous=asynchronous) as checkpointer:
        started = [checkpointer.save(step, state(step)) for step in range(8)]
        assert started == [step % 3 == 0 for step in range(8)]
        assert [checkpointer.should_save(step) for step in (8, 9)] == [False, True]
        assert checkpointer.save(7, state(7), force=True) is True
    assert open_at(place).all_steps() == [0, 3, 6, 7]


def test_max_to_keep(place, asynchronous):
    with open_at(place, max_to_keep=2, asynchronous=asynchronous) as checkpointer:
        for step in range(5):
            checkpointer.save(step, state(step))
    assert checkpointer.all_steps() == [3, 4]
    # nothing of a deleted step is left
    assert {name.partition("/")[0] for name in place.names()} == {"3", "4"}
    if place.local:
        assert place.entries() == ["3", "4"]


def test_keep_period(place):
    write(place, *range(8), max_to_keep=2, keep_period=3)
    assert open_at(place).all_steps() == [0, 3, 6, 7]


def test_best_and_latest_are_kept(place, asynchronous):
    losses = [0.5, 0.1, 0.3, 0.2, 0.9, 0.8]
    arguments: dict[str, Any] = {"max_to_keep": 2, "best_metric": "loss", "best_mode": "min"}
    with open_at(place, asynchronous=asynchronous, **arguments) as checkpointer:
        for step, loss in enumerate(losses):
            checkpointer.save(step, state(step), metrics={"loss": loss})
    assert checkpointer.all_steps() == [1, 3, 5]
    assert checkpointer.best_step() == 1
    assert checkpointer.metrics(3) == {"loss": 0.2}
    explained = checkpointer.explain()
    assert list(explained) == [1, 3, 5]
    assert "best 2 by loss" in explained[1] and "latest 1" in explained[5]


def test_best_mode_max_and_nan(place):
    arguments: dict[str, Any] = {"max_to_keep": 1, "best_metric": "score", "best_mode": "max"}
    with open_at(place, **arguments) as checkpointer:
        for step, score in enumerate([1.0, 7.0, float("nan"), 7.0, 2.0]):
            checkpointer.save(step, state(step), metrics={"score": score})
        checkpointer.save(5, state(5))  # has no score
    assert checkpointer.all_steps() == [3, 5]  # of equal ones the newer, never NaN
    assert checkpointer.best_step() == 3


def test_keep_policy_cannot_delete_the_newest(place):
    write(place, 0, 1, 2, keep_policy=ckpt.keep.steps([0]))
    checkpointer = open_at(place, keep_policy=ckpt.keep.steps([0]))
    assert checkpointer.all_steps() == [0, 2]
    assert checkpointer.explain()[2] == "kept: the newest step"


def test_retention_keeps_the_newest_whole_step_and_what_it_cannot_read(place):
    write(place, 0, 1, 2)
    place.write("2/ckpt.json", b"{}")
    checkpointer = open_at(place, max_to_keep=1)
    explained = checkpointer.explain()
    assert explained[0].startswith("deleted")
    assert explained[1].startswith("kept")
    assert "cannot be read" in explained[2]


def test_arguments_that_do_not_go_together(place):
    with pytest.raises(TypeError, match="best_mode"):
        open_at(place, best_metric="loss")
    with pytest.raises(ValueError, match="'min' or 'max'"):
        open_at(place, best_metric="loss", best_mode="least")
    with pytest.raises(TypeError, match="not both"):
        open_at(place, save_interval_steps=2, save_policy=ckpt.when.every_steps(2))
    with pytest.raises(TypeError, match="not both"):
        open_at(place, max_to_keep=2, keep_policy=ckpt.keep.latest(2))
    with pytest.raises(TypeError, match="keep_period"):
        open_at(place, keep_period=2)
    with pytest.raises(ckpt.CheckpointError, match="best_metric"):
        open_at(place).best_step()


def test_policies(place):
    policy = ckpt.when.at_steps([4]) | ckpt.when.every_steps(3)
    write_steps = [step for step in range(8) if policy(step, ckpt.when.SaveContext())]
    with open_at(place, save_policy=policy, keep_policy=ckpt.keep.all()) as checkpointer:
        for step in range(8):
            checkpointer.save(step, state(step))
    assert checkpointer.all_steps() == write_steps == [0, 3, 4, 6]


# ---- what is there -----------------------------------------------------------------------------


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
    with pytest.raises(KeyError, match="restored were state"):
        restored["model"]
    with pytest.raises(AttributeError):
        _ = restored.model
    assert "step=4" in repr(restored)


class Counter:
    """A user's own object."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.history = np.zeros(3)

    def get_state(self) -> Any:
        return {"count": self.count, "history": self.history}

    def set_state(self, state: Any) -> None:
        self.count, self.history = state["count"], state["history"]


def test_stateful_objects_are_set_in_place(place):
    mine = Counter(5)
    mine.history[:] = [1, 2, 3]
    with open_at(place) as checkpointer:
        checkpointer.save(0, counter=mine, params=state(0))
        mine.count = 6
        mine.history[:] = 0
    other = Counter(0)
    restored = open_at(place).restore_latest(counter=other, params=state(1))
    assert restored["counter"] is other and other.count == 5
    assert other.history.tolist() == [1, 2, 3]


def test_stateful_needs_no_reading(place):
    mine = Counter(1)
    with open_at(place) as checkpointer:
        checkpointer.save(0, counter=mine)
        checkpointer.restore_latest(counter=mine)
        assert checkpointer.save(1, counter=mine)


# ---- steps that are refused --------------------------------------------------------------------


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
    ):
        with pytest.raises((TypeError, ValueError), match="step must be an integer"):
            call()
    assert checkpointer.all_steps() == []


@pytest.mark.parametrize("step", [-1, True, "3"], ids=repr)
def test_rollback_to_refuses_what_is_no_step(place, step):
    with pytest.raises((TypeError, ValueError), match="step must be an integer"):
        open_at(place).rollback_to(step)


def test_numpy_integers_are_steps(place):
    with open_at(place) as checkpointer:
        assert checkpointer.save(np.int32(3), state(3))
    assert same(checkpointer.load(np.int64(3)), 3)
    assert type(checkpointer.restore(np.int64(3), state=state(0)).step) is int


def test_the_same_step_twice(place, asynchronous):
    with open_at(place, asynchronous=asynchronous) as checkpointer:
        assert checkpointer.save(1, state(1)) is True
        assert checkpointer.save(1, state(2)) is False
        assert checkpointer.save(1, state(2), force=True) is False
        checkpointer.wait_until_finished()
        assert checkpointer.save(1, state(2)) is False
    assert same(open_at(place).load(1), 1)


def test_a_step_of_another_writer(place):
    write(place, 1)
    with open_at(place) as checkpointer:
        with pytest.raises(ckpt.CheckpointExists, match="step 1 is there already") as caught:
            checkpointer.save(1, state(2))
        assert isinstance(caught.value, FileExistsError)
        assert checkpointer.save(2, state(2))
    assert same(checkpointer.load(1), 1)


def test_overwrite(local, asynchronous):
    write(local, 1)
    with open_at(local, asynchronous=asynchronous) as checkpointer:
        assert checkpointer.save(1, state(2), overwrite=True)
        assert checkpointer.save(1, state(3), overwrite=True)
    assert same(open_at(local).load(1), 3)
    assert local.entries() == ["1"]


def test_overwrite_in_a_store_is_refused_and_harmless():
    place = Place(f"memory://test-overwrite-{os.getpid()}/run")
    write(place, 1)
    with open_at(place) as checkpointer, pytest.raises(ckpt.CheckpointError, match="delete it"):
        checkpointer.save(1, state(2), overwrite=True)
    assert same(open_at(place).load(1), 1)


def test_a_step_older_than_the_newest(place):
    write(place, 3, 7)
    with open_at(place) as checkpointer:
        with pytest.raises(ckpt.CheckpointExists, match=r"step 5 is older than 7.*rollback_to\(4"):
            checkpointer.save(5, state(5))
        assert checkpointer.rollback_to(4) == [7]
        assert checkpointer.save(5, state(5))
    assert checkpointer.all_steps() == [3, 5]


def test_rollback_to_and_save_again(place):
    with open_at(place) as checkpointer:
        for step in range(5):
            checkpointer.save(step, state(step))
        assert checkpointer.rollback_to(1) == [2, 3, 4]
        assert checkpointer.rollback_to(1) == []
        assert checkpointer.save(2, state(20))  # its own, and gone
    assert checkpointer.all_steps() == [0, 1, 2]
    assert same(open_at(place).load(2), 20)


def test_delete(place):
    with open_at(place) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state(step))
        checkpointer.wait_until_finished()
        checkpointer.delete(1)
        assert checkpointer.all_steps() == [0, 2]
        with pytest.raises(ckpt.CheckpointNotFound, match="no step 1; it has: 0, 2"):
            checkpointer.delete(1)
        checkpointer.delete(2)
        assert checkpointer.save(2, state(9))
    assert same(open_at(place).load(2), 9)


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


def test_read_only_makes_no_directory(local):
    assert open_at(local, read_only=True).all_steps() == []
    assert not os.path.exists(local.url)


def test_a_file_is_no_directory_of_steps(local):
    Path(local.url).write_text("a file")
    with pytest.raises(NotADirectoryError):
        open_at(local, read_only=True).restore_latest(state=state(0))


# ---- names -------------------------------------------------------------------------------------


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
        restored = checkpointer.restore_latest(state=state(0))
        assert restored.step == 7 and same(restored["state"], 7)
        with pytest.raises(ckpt.CheckpointExists):
            checkpointer.save(7, state(8))
    checkpointer.delete(7)
    assert checkpointer.all_steps() == [] and place.names() == []


def test_retention_across_names(place):
    write(place, 1, 2, step_prefix="step")
    write(place, 3, max_to_keep=2)
    assert open_at(place).all_steps() == [2, 3]


def test_overwrite_of_a_step_with_another_name(local):
    write(local, 1, step_prefix="step")
    with open_at(local) as checkpointer:
        assert checkpointer.save(1, state(2), overwrite=True)
    assert same(open_at(local, step_prefix="step").load(1), 2)


def test_names_refused(local):
    for bad in ({"step_prefix": "a/b"}, {"step_prefix": ".a"}, {"step_format_fixed_length": 0}):
        with pytest.raises(ValueError, match="step_"):
            open_at(local, **bad)


def test_what_is_no_step_is_left_alone(local):
    write(local, 1)
    for name in ("logs", "12abc", "5"):  # a number with nothing in it is no step either
        os.makedirs(f"{local.url}/{name}")
    Path(local.url, "9").write_text("a file")
    write(local, 2, 3, max_to_keep=1)
    assert open_at(local).all_steps() == [3]
    assert local.entries() == ["12abc", "3", "5", "9", "logs"]


# ---- waiting -----------------------------------------------------------------------------------


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


# ---- the end -----------------------------------------------------------------------------------


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
        raise ZeroDivisionError


def test_an_error_in_the_body_is_not_masked(place):
    with pytest.raises(ZeroDivisionError) as caught:
        _fail_after_a_save(place)
    assert not hasattr(caught.value, "__notes__")
    assert open_at(place).all_steps() == [0]


def _fail(*_: Any) -> None:
    raise OSError(5, "no luck")


def test_a_failed_save_and_an_error_in_the_body(local, monkeypatch):
    monkeypatch.setattr(LocalAttempt, "commit", _fail)
    with pytest.raises(ZeroDivisionError) as caught:
        _fail_after_a_save(local)
    (note,) = caught.value.__notes__
    assert "no luck" in note and local.url in note
    assert local.names() == []


def test_a_failed_save_ends_the_with_block(local, monkeypatch):
    monkeypatch.setattr(LocalAttempt, "commit", _fail)
    with pytest.raises(OSError, match="no luck") as caught, open_at(local) as checkpointer:
        checkpointer.save(0, state(0))
    assert "step 0" in caught.value.__notes__[0]


def test_a_failed_step_can_be_saved_again(local, monkeypatch, asynchronous):
    with open_at(local, asynchronous=asynchronous) as checkpointer:
        monkeypatch.setattr(LocalAttempt, "commit", _fail)
        if asynchronous:
            checkpointer.save(0, state(0))
        ask = checkpointer.wait_until_finished
        with pytest.raises(OSError, match="no luck"):
            ask() if asynchronous else checkpointer.save(0, state(0))
        monkeypatch.undo()
        assert checkpointer.save(0, state(0)) is True
    assert checkpointer.all_steps() == [0] and local.entries() == ["0"]


# ---- damage ------------------------------------------------------------------------------------


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
    os.rename(f"{place.url}/2", f"{place.url}/.ckpt-tmp.2.someone.0123")
    assert checkpointer.all_steps() == [1]


def test_an_unfinished_step_of_a_store_is_written_anew():
    place = Place(f"memory://test-unfinished-{os.getpid()}/run")
    write(place, 1)
    place.remove("1/ckpt.json")
    write(place, 1)
    assert same(open_at(place).load(1), 1)


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


def test_all_steps_damaged(place):
    write(place, 1, 2)
    place.damage(1)
    place.damage(2)
    with (
        pytest.warns(RuntimeWarning, match="damaged and skipped"),
        pytest.raises(ckpt.CheckpointCorrupt, match="none of the steps 2, 1") as caught,
    ):
        open_at(place).restore_latest(state=state(0))
    assert caught.value.leaf == "w"


def test_mismatch_is_raised_even_with_older_steps(place):
    write(place, 1)
    with open_at(place) as checkpointer:
        checkpointer.save(2, {"other": np.zeros(3)})
    with pytest.raises(ckpt.StructureMismatch) as caught:
        open_at(place).restore_latest(state=state(0))
    assert {mismatch.kind for mismatch in caught.value.mismatches} == {"missing", "unexpected"}


def test_an_item_that_was_not_saved(place):
    write(place, 1)
    with pytest.raises(ckpt.CheckpointNotFound, match="state"):
        open_at(place).restore_latest(model=state(0))


def test_a_damaged_step_leaves_targets_as_they_were(place):
    with open_at(place) as checkpointer:
        checkpointer.save(3, counter=Counter(5), params=state(3))
        checkpointer.wait_until_finished()
        place.damage(3)
        mine = Counter(1)
        with (
            pytest.warns(RuntimeWarning, match="damaged"),
            pytest.raises(ckpt.CheckpointCorrupt),
        ):
            checkpointer.restore_latest(counter=mine, params=state(0))
    assert mine.count == 1


# ---- restored values that nobody read ----------------------------------------------------------


def test_restored_values_are_not_kept_alive(local):
    """What is noticed of them (tests/test_unread.py) holds none of them."""
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


# ---- arguments of save -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["overwrit", "metric", "metadat", "forced", "item", "option"])
def test_names_that_look_like_arguments(place, name):
    with open_at(place) as checkpointer:
        with pytest.raises(TypeError, match="looks like the argument") as caught:
            checkpointer.save(0, params=state(0), **{name: True})
        assert f"{name!r}" in str(caught.value) and "items=" in str(caught.value)
        assert checkpointer.save(0, items={name: state(0)})
    assert same(checkpointer.load(0)[name], 0)


@pytest.mark.parametrize(
    "metrics", [{"loss": "low"}, {"loss": np.ones(2)}, {3: 1.0}, {"loss": None}, [1.0]], ids=repr
)
def test_metrics_that_are_no_numbers(place, metrics):
    with open_at(place) as checkpointer, pytest.raises(TypeError, match="metrics"):
        checkpointer.save(0, state(0), metrics=metrics)
    assert checkpointer.all_steps() == []


def test_metrics_of_every_kind_of_number(place):
    numbers = {"a": 1, "b": jnp.float32(0.5), "c": np.int8(3), "d": True, "e": float("inf")}
    with open_at(place) as checkpointer:
        checkpointer.save(0, state(0), metrics=numbers)
    assert checkpointer.metrics(0) == {"a": 1.0, "b": 0.5, "c": 3.0, "d": 1.0, "e": float("inf")}


def test_state_together_with_items(place):
    with open_at(place) as checkpointer:
        with pytest.raises(TypeError, match="not both"):
            checkpointer.save(0, state(0), params=state(0))
        with pytest.raises(TypeError, match="not both"):
            checkpointer.save(0, state(0), items={"params": state(0)})
        with pytest.raises(TypeError, match="nothing to save"):
            checkpointer.save(0)
        checkpointer.save(0, state(0))
        with pytest.raises(TypeError, match="at least one target"):
            checkpointer.restore_latest()


def test_none_is_a_state(place):
    with open_at(place) as checkpointer:
        assert checkpointer.save(0, None)
    assert checkpointer.load(0) is None


def test_a_refused_save_leaves_nothing(place):
    with open_at(place) as checkpointer:
        with pytest.raises(ckpt.UnsupportedLeaf):
            checkpointer.save(0, {"w": np.ones(3), "bad": {1, 2}})
        with pytest.raises(TypeError, match="metadata"):
            checkpointer.save(0, state(0), metadata={"a": object()})
        assert place.names() == []
        assert checkpointer.save(0, state(0))


def test_a_directory_that_moved(local):
    write(local, 1)
    shutil.move(local.url, f"{local.url}-elsewhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = open_at(Place(f"{local.url}-elsewhere")).restore_latest(state=state(0))
    assert same(restored["state"], 1)


TELLING = [
    orbax_write.COMMIT_FILE,
    orbax_write.STEP_METADATA,
    f"state/{orbax_write.ITEM_METADATA}",
    "ckpt.json",
]


def test_on_object_stores_nothing_tells_of_a_step_before_its_arrays(monkeypatch):
    """There is no rename: Orbax takes a directory with a commit file for a whole checkpoint."""
    url = f"memory://test-order-{os.getpid()}/run"
    form = backend_of(False)
    plain = ArrayWriter.finish
    seen = []

    def finish(writer, *arguments):
        plain(writer, *arguments)
        seen.append([name for name in TELLING if form.read(url, name) is not None])

    monkeypatch.setattr(ArrayWriter, "finish", finish)
    ckpt.save(url, {"w": np.ones(3)})
    assert seen == [[]]
    assert all(form.read(url, name) is not None for name in TELLING)
