"""Loads of what is not there, not whole, flipped in one bit, on a disk that fails, or replaced meanwhile: one clear exception, or the old or the new one."""

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.damage import failing_reads, flip
from tests.support.replacing import KINDS, replacing
from tests.support.unchanged import assert_tree, make_steps, tree, unchanged  # noqa: F401 (fixture)


@pytest.mark.parametrize("name", ["no/where", "empty"])
def test_missing_path(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with unchanged(tmp_path), pytest.raises(ckpt.CheckpointNotFound) as caught:
        ckpt.load(tmp_path / name)
    assert isinstance(caught.value, FileNotFoundError)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("call", "name"),
    [(ckpt.load, "5"), (ckpt.inspect, "5"), (ckpt.verify, "5"), (ckpt.load, "")],
    ids=["load", "inspect", "verify", "load of all"],
)
def test_missing_step_lists_those_that_exist(steps, call, name):
    with unchanged(steps), pytest.raises(ckpt.CheckpointNotFound) as caught:
        call(steps / name)
    message = str(caught.value).replace(str(steps), "")
    assert "3" in message
    assert "4" in message


def test_missing_item_names_those_that_exist(tmp_path):
    ckpt.save(tmp_path / "c", model=tree(), optimizer={"m": np.ones(1)})
    for call in (
        lambda: ckpt.load(tmp_path / "c", item="modle"),
        lambda: ckpt.restore(tmp_path / "c", modle=tree()),
    ):
        with unchanged(tmp_path), pytest.raises(ckpt.CheckpointNotFound) as caught:
            call()
        assert "modle" in str(caught.value)
        assert "model" in str(caught.value).replace("modle", "")
        assert "optimizer" in str(caught.value)


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("part", ["manifest.ocdbt", "checksums", "ocdbt.process_0"])
def test_a_step_that_was_copied_in_part(steps, part):
    remove(steps / "4" / "state" / part)
    with unchanged(steps), pytest.raises(ckpt.CheckpointCorrupt) as caught:
        ckpt.load(steps / "4")
    assert caught.value.file or caught.value.leaf
    assert not ckpt.verify(steps / "4").ok
    assert_tree(ckpt.load(steps / "3"), 3)


@pytest.mark.parametrize("part", ["state/_METADATA", "state/_sharding", "_CHECKPOINT_METADATA"])
def test_a_step_without_what_only_orbax_reads(steps, part):
    """It loads, for our record says everything; `verify` tells that a file is gone."""
    remove(steps / "4" / part)
    assert_tree(ckpt.load(steps / "4"), 4)
    report = ckpt.verify(steps / "4")
    assert not report.ok
    assert part in {problem.file for problem in report.problems}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ckpt.save(tmp_path / "one", {"w": np.arange(20 << 20, dtype=np.float32)})
    return tmp_path / "one"


@pytest.mark.linux("/proc/self/fd")
@pytest.mark.parametrize("of", ["preadv", "pread"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
def test_a_read_names_the_file(saved, monkeypatch, number, of):
    failing_reads(monkeypatch, saved, of, number)
    with pytest.raises(OSError, match=str(saved)) as caught:
        ckpt.load(saved)
    assert caught.value.errno == number and not isinstance(caught.value, ckpt.CheckpointError)
    named = re.search(r"'(/[^']*/d/\w+)'", str(caught.value))
    assert named and os.path.isfile(named[1]), str(caught.value)


@pytest.mark.linux("/proc/self/fd")
@pytest.mark.parametrize("name", ["ckpt.json", "state/_strings.json", "state/checksums/process_0"])
def test_small_files_are_named_too(tmp_path, monkeypatch, name):
    path = tmp_path / "texts"
    ckpt.save(path, {"text": "some", "w": np.arange(9)})
    assert (path / name).is_file()
    names: dict[str, Any] = {"os": os, "end": f"/{name}", "real": os.read}
    code = """
def function(descriptor, size):
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith(end):
        raise OSError(5, os.strerror(5))
    return real(descriptor, size)
"""  # as from no file: what a file of these tests raises counts as raised by a signal handler
    exec(compile(code, "<injected>", "exec"), names)
    monkeypatch.setattr(os, "read", names["function"])
    with pytest.raises(OSError, match=f"'{path / name}'") as caught:
        ckpt.load(path)
    assert caught.value.errno == errno.EIO


def test_a_step_without_its_record(steps):
    """The marker without the record: files that were copied in part, or damage. Never loaded."""
    (steps / "4" / "ckpt.json").unlink()
    with unchanged(steps), pytest.raises(ckpt.CheckpointCorrupt, match=r"ckpt\.json"):
        ckpt.load(steps / "4")
    with ckpt.Checkpointer(steps) as checkpointer:
        with pytest.warns(RuntimeWarning, match="step 4"):
            restored = checkpointer.restore_latest(state=tree(0))
        assert restored.step == 3
        assert_tree(restored["state"], 3)


def test_reading_a_directory_that_does_not_exist(tmp_path):
    """An evaluator may start before the training: it sees no steps, and makes nothing."""
    with unchanged(tmp_path), ckpt.Checkpointer(tmp_path / "run", read_only=True) as checkpointer:
        assert list(checkpointer.all_steps()) == []
        with pytest.raises(ckpt.CheckpointNotFound):
            checkpointer.load(3)


STATE = {"small": np.full(3000, 1.5), "large": np.full(2**20, 2.5)}


@pytest.mark.parametrize("where", ["small", "large", "state/checksums/process_0"])
def test_no_load_takes_it(tmp_path, where):
    ckpt.save(tmp_path, STATE, overwrite=True)
    values = STATE[where].tobytes() if where in STATE else b""
    files = tmp_path.rglob("d/*") if values else [tmp_path / where]
    (file,) = (file for file in files if values in file.read_bytes())
    flip(file, file.read_bytes().index(values) + 77)
    with pytest.raises(ckpt.CheckpointCorrupt) as caught:
        ckpt.load(tmp_path)
    assert where in (caught.value.leaf, caught.value.file)


def test_verify_finds_it_in_what_no_load_reads(tmp_path):
    ckpt.save(tmp_path, STATE, overwrite=True)
    flip(tmp_path / "state" / "_METADATA", 77)
    assert [problem.file for problem in ckpt.verify(tmp_path).problems] == ["state/_METADATA"]


_CALLS, _REPLACED = 20, 20
"""At least so many calls of each kind, and as many more as it takes for the path to be replaced so often."""
_LIMIT_SECS = 120.0


def _whole(state: dict[str, Any]) -> None:
    numbers = {*np.unique(state["a"]), *np.unique(state["b"][0]), *np.unique(state["c"])}
    assert len(numbers) == 1, f"parts of several checkpoints: {numbers}"


def _restore(path: str) -> None:
    target = {
        "a": np.zeros(5000, np.int64),
        "b": [np.zeros(7, np.int64), ""],
        "c": np.zeros(300_000, np.int64),
    }
    _whole(ckpt.restore(path, state=target)["state"])


def _as_step(path: str) -> None:
    directory, name = os.path.split(path)
    with ckpt.Checkpointer(directory, read_only=True) as checkpointer:
        assert checkpointer.all_steps() == [int(name)]
        _whole(checkpointer.load(int(name)))


def _verify(path: str) -> None:
    report = ckpt.verify(path)
    assert report.ok, report.problems


CALLS: dict[str, Callable[[str], None]] = {
    "load": lambda path: _whole(ckpt.load(path)),
    "as_numpy": lambda path: _whole(ckpt.load(path, as_numpy=True)),
    "load_async": lambda path: _whole(ckpt.load_async(path).result()),
    "restore": _restore,
    "inspect": lambda path: _number_is_there(ckpt.inspect(path)),
    "verify": _verify,
    "checkpointer": _as_step,
}


def _number_is_there(info: ckpt.CheckpointInfo) -> None:
    assert info.metadata["number"] > 0 and len(info.items["state"].leaves) == 4


@pytest.fixture(name="replaced", params=KINDS, scope="module")
def make_replaced(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Callable[[], int]]]:
    """A path that another process replaces all the time, and how often it has."""
    directory = tmp_path_factory.mktemp("replaced")
    path = directory / "run" / "3"
    with replacing(path, directory / "told", request.param) as count:
        yield str(path), count


@pytest.mark.parametrize("call", CALLS)
def test_readers_see_the_old_or_the_new(replaced, call):
    path, count = replaced
    CALLS[call](path)
    before, calls, failed = count(), 0, list[str]()
    until = time.monotonic() + _LIMIT_SECS
    while calls < _CALLS or count() - before < _REPLACED:
        assert time.monotonic() < until, f"{calls} calls, replaced {count() - before} times"
        calls += 1
        try:
            CALLS[call](path)
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}"[:300])
    assert not failed, f"{len(failed)} of {calls} calls: {failed[:3]}"
