"""`ckpt.Files` where a program makes a natural mistake, or saves files that look like ckpt's own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

import ckpt_core as ckpt
from ckpt_core._directory import Scratch, gather, object_store, resolve
from ckpt_core._directory.owner import this_owner
from ckpt_core._storage import backend_of
from tests.support.units import MIB

MODEL = {"w": 1.0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with a checkpoint in it, and the files by which one is known."""
    folder = tmp_path / "source"
    ckpt.save(folder / "base" / "7", MODEL)
    (folder / "ckpt.json").write_text("{}")
    return folder


def keys_of(url: str) -> list[str]:
    found = backend_of(False, ckpt.Options()).files(resolve(url)[0])
    return [name for name in found if not name.startswith(".ckpt-")]


def test_a_checkpoint_among_the_files_is_deleted_with_its_step(checkpoint: Path):
    url = f"memory://misused-{os.getpid()}/run"
    with ckpt.Checkpointer(url, max_to_keep=1) as checkpointer:
        for step in range(3):
            checkpointer.save(step, model=MODEL, base=ckpt.Files(checkpoint))
        checkpointer.wait_until_finished()
    assert {name.partition("/")[0] for name in keys_of(url)} == {"2"}
    assert len(ckpt.load(f"{url}/2")["base"].names()) > 5
    assert ckpt.verify(f"{url}/2").ok


def test_a_deletion_that_died_is_finished(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    url = f"memory://misused-{os.getpid()}/died"
    ckpt.save(f"{url}/0", model=MODEL, base=ckpt.Files(checkpoint))
    with monkeypatch.context() as patch:
        patch.setattr(object_store, "delete_rest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backend_of(False, ckpt.Options()).delete(f"{url}/0")
    assert keys_of(url)
    backend_of(False, ckpt.Options()).clean(url)
    assert keys_of(url) == []


def test_a_source_that_holds_the_checkpoint_is_refused(tmp_path: Path):
    """Each step would hold all the earlier ones, twice as many each time."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("1")
    os.symlink(project, tmp_path / "link")
    for source in (project, tmp_path / "link"):
        with pytest.raises(ckpt.UnsupportedLeaf, match="holds the checkpoint that is being saved"):
            ckpt.save(project / "runs" / "0", model=MODEL, code=ckpt.Files(source))
    with ckpt.Checkpointer(project / "runs") as checkpointer:
        with pytest.raises(ckpt.UnsupportedLeaf, match="holds the checkpoint"):
            checkpointer.save(0, model=MODEL, code=ckpt.Files(project))
        checkpointer.save(0, model=MODEL, code=ckpt.Files(project / "train.py"))
    ckpt.save(tmp_path / "project-2", model=MODEL, code=ckpt.Files(project / "train.py"))


@pytest.mark.parametrize("path", ["", "gs://bucket/vocabulary", "memory://bucket"])
def test_what_would_be_taken_for_a_path_is_refused(path: str, tmp_path: Path):
    with pytest.raises(ValueError, match=r"is a URL|path is empty"):
        ckpt.Files(path)
    ckpt.save(tmp_path / "step", ckpt.Files(lambda folder: None))
    with pytest.raises(ValueError, match=r"is a URL|path is empty"):
        ckpt.load(tmp_path / "step").copy_to(path)


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").write_text("1")
    ckpt.save(tmp_path / "step", ckpt.Files("~/file"))
    copied = ckpt.load(tmp_path / "step").copy_to("~/out")
    assert (copied / "file").read_text() == "1"


@pytest.mark.parametrize("name", [".deleted", ".ckpt-put.1", ".attempt.a.b"])
def test_names_that_buckets_need_are_refused(name: str, tmp_path: Path):
    """The next writer would take it for a deletion or an attempt that died, and remove it or what is beside it."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / name).touch()
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"ckpt's own"):
        ckpt.save(tmp_path / "step", ckpt.Files(tmp_path / "source"))


@pytest.mark.linux("/proc")
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc")
def test_a_file_that_holds_more_than_its_size_says(tmp_path: Path):
    with pytest.raises(ckpt.CheckpointError, match="holds more than the 0 bytes"):
        ckpt.save(tmp_path / "step", ckpt.Files("/proc/self/status"))


def test_a_child_that_ends_leaves_the_files_of_its_parent(tmp_path: Path):
    """A fork without exec, as subprocesses of data loaders make it, while a save is under way."""
    scratch = Scratch()
    (Path(scratch.path) / "large").write_bytes(bytes(MIB))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that threads run
        child = os.fork()
    if child == 0:
        scratch.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (Path(scratch.path) / "large").exists()
    scratch.close()
    assert not Path(scratch.path).exists()


def test_what_a_killed_process_left_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    host, _, start = this_owner().split("-")
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE
    )
    dead = tmp_path / f"ckpt-files-{host}-{int(gone.stdout)}-{start}.a"
    living = tmp_path / f"ckpt-files-{this_owner()}.b"
    foreign = tmp_path / "ckpt-files-abc"
    for folder in (dead, living, foreign):
        folder.mkdir()
        (folder / "large").touch()
    gather._remove_of_the_dead.cache_clear()
    ckpt.save(tmp_path / "step", ckpt.Files(lambda folder: None))
    assert (dead.exists(), living.exists(), foreign.exists()) == (False, True, True)


def test_a_function_may_delete_its_directory(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        ckpt.save(tmp_path / "step", ckpt.Files(lambda folder: folder.rmdir()))


def test_numbers_that_no_float_holds_are_no_metrics(tmp_path: Path):
    best = ckpt.keep.best("loss", mode="min") | ckpt.keep.latest(1)
    with ckpt.Checkpointer(tmp_path / "run", keep_policy=best) as checkpointer:
        for step, loss in enumerate([1, 10**400, 3]):
            checkpointer.save(step, items={"metrics": ckpt.Json({"loss": loss})}, model=MODEL)
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [0, 2]
