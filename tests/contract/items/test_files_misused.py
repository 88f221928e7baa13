"""`ckpt.Files` where a program makes a natural mistake, or saves files that look like ckpt's own."""

import os
from pathlib import Path

import pytest

import ckpt_core as ckpt
from tests.support.stores import keys_at

MODEL = {"w": 1.0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with a checkpoint in it, and the files by which one is known."""
    folder = tmp_path / "source"
    ckpt.save(folder / "base" / "7", MODEL)
    (folder / "ckpt.json").write_text("{}")
    return folder


def test_a_checkpoint_among_the_files_is_deleted_with_its_step(checkpoint):
    url = f"memory://misused-{os.getpid()}/run"
    with ckpt.Checkpointer(url, max_to_keep=1) as checkpointer:
        for step in range(3):
            checkpointer.save(step, model=MODEL, base=ckpt.Files(checkpoint))
        checkpointer.wait_until_finished()
    names = {name.partition("/")[0] for name in keys_at(url).list()}
    assert {name for name in names if not name.startswith(".ckpt-")} == {"2"}
    assert len(ckpt.load(f"{url}/2")["base"].names()) > 5
    assert ckpt.verify(f"{url}/2").ok


def test_a_source_that_holds_the_checkpoint_is_refused(tmp_path):
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
def test_what_would_be_taken_for_a_path_is_refused(path, tmp_path):
    with pytest.raises(ValueError, match=r"is a URL|path is empty"):
        ckpt.Files(path)
    ckpt.save(tmp_path / "step", ckpt.Files(lambda folder: None))
    with pytest.raises(ValueError, match=r"is a URL|path is empty"):
        ckpt.load(tmp_path / "step").copy_to(path)


def test_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").write_text("1")
    ckpt.save(tmp_path / "step", ckpt.Files("~/file"))
    copied = ckpt.load(tmp_path / "step").copy_to("~/out")
    assert (copied / "file").read_text() == "1"


@pytest.mark.parametrize("name", [".ckpt-put.1", ".attempt.a.b"])
def test_names_that_buckets_need_are_refused(name, tmp_path):
    """The next writer would take it for a deletion or an attempt that died, and remove it or what is beside it."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / name).touch()
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"ckpt's own"):
        ckpt.save(tmp_path / "step", ckpt.Files(tmp_path / "source"))


def test_a_function_may_delete_its_directory(tmp_path):
    with pytest.raises(FileNotFoundError):
        ckpt.save(tmp_path / "step", ckpt.Files(lambda folder: folder.rmdir()))
