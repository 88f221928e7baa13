"""`ckpt.Files`: any files inside the atomic, checksummed step; natural mistakes, and files that look like ckpt's own."""

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

import ckpt_core as ckpt
from tests.support.command_line import make_call  # noqa: F401 (fixture)
from tests.support.launch import launch, reports
from tests.support.places import make_place  # noqa: F401 (fixture)
from tests.support.stores import keys_at
from tests.support.units import MIB

BIG = 3 * MIB
MODEL = {"w": np.arange(3.0)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Small files, a large one, a hidden one, an empty one, and names that mean something to others."""
    folder = tmp_path / "source"
    for name, data in contents().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def contents() -> dict[str, bytes]:
    names = ["ä/vocabulary.txt", ".gitattributes", "d/0123", "x/d/y", "commit_success.txt"]
    names += ["manifest.ocdbt", "checksums/process_0", "ckpt.json/part", "_METADATA", "metadata"]
    found = {name: name.encode() * 9 for name in names}
    return found | {"empty": b"", "sub/big.bin": bytes(range(256)) * (BIG // 256)}


def held(files: ckpt.SavedFiles) -> dict[str, bytes]:
    return {name: files.read(name) for name in files.names()}


def below(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def test_what_is_saved_comes_back(place, source, tmp_path):
    path = (place / "step").url
    ckpt.save(path, model=MODEL, tokenizer=ckpt.Files(source))
    found = ckpt.load(path)["tokenizer"]
    assert isinstance(found, ckpt.SavedFiles)
    assert held(found) == contents()
    assert found.names() == sorted(contents())
    assert found.size("sub/big.bin") == BIG
    assert below(found.copy_to(tmp_path / "out")) == contents()
    assert ckpt.inspect(path).items["tokenizer"].files == {n: len(d) for n, d in contents().items()}
    assert ckpt.verify(path).ok
    with pytest.raises(KeyError, match="holds no file 'no'"):
        found.read("no")
    ckpt.save((place / "again").url, tokenizer=found)
    assert held(ckpt.load((place / "again").url)["tokenizer"]) == contents()


def test_one_file_one_state_and_a_function(place, source):
    one = (place / "one").url
    ckpt.save(one, ckpt.Files(source / "sub" / "big.bin"))
    assert held(ckpt.load(one)) == {"big.bin": contents()["sub/big.bin"]}
    asked: list[Path] = []

    def write(folder: Path) -> None:
        asked.append(folder)
        (folder / "in").mkdir()
        (folder / "in" / "a").write_text("a")
        (folder / "big").write_bytes(bytes(BIG))

    two = (place / "two").url
    ckpt.save(two, items={"metrics": ckpt.Files(write)}, model=MODEL)
    assert held(ckpt.load(two)["metrics"]) == {"in/a": b"a", "big": bytes(BIG)}
    assert len(asked) == 1
    assert not asked[0].exists()


def test_an_empty_directory(place, tmp_path):
    (tmp_path / "empty" / "in").mkdir(parents=True)
    path = (place / "step").url
    ckpt.save(path, model=MODEL, files=ckpt.Files(tmp_path / "empty"))
    found = ckpt.load(path)["files"]
    assert (found.names(), len(found), bool(found)) == ([], 0, True)
    assert list(found.copy_to(tmp_path / "out").iterdir()) == []


def test_every_byte_is_verified(tmp_path, source):
    ckpt.save(tmp_path / "step", model=MODEL, tokenizer=ckpt.Files(source))
    found = ckpt.load(tmp_path / "step")["tokenizer"]
    for name, data in contents().items():
        file = tmp_path / "step" / "tokenizer" / name
        for damaged in ([data[:-1] + b"?"] if data else []) + [data + b"?"]:
            file.write_bytes(damaged)
            report = ckpt.verify(tmp_path / "step")
            assert [problem.file for problem in report.problems] == [f"tokenizer/{name}"]
            with pytest.raises(ckpt.CheckpointCorrupt, match="damaged"):
                ckpt.load(tmp_path / "step")
            with pytest.raises(ckpt.CheckpointCorrupt, match="damaged"):
                found.read(name)
            out = tmp_path / f"{len(damaged)} {name.replace('/', ' ')}"
            with pytest.raises(ckpt.CheckpointCorrupt, match="damaged"):
                found.copy_to(out)
            copied = below(out)
            assert name not in copied
            assert copied == {other: contents()[other] for other in copied}
        file.unlink()
        with pytest.raises(ckpt.CheckpointCorrupt, match="missing"):
            ckpt.load(tmp_path / "step", item="tokenizer")
        file.write_bytes(data)
    assert ckpt.verify(tmp_path / "step").ok


def test_damage_makes_a_restore_go_back(tmp_path, source):
    items: dict[str, Any] = {"model": MODEL, "tokenizer": ckpt.Files(source)}
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(0, **items)
        checkpointer.save(1, **items)
        checkpointer.wait_until_finished()
        file = tmp_path / "run" / "1" / "tokenizer" / "metadata"
        file.write_bytes(b"?" * file.stat().st_size)
        with pytest.warns(RuntimeWarning, match="tokenizer/metadata is damaged"):
            restored = checkpointer.restore_latest(**items)
        assert restored.step == 0
        assert held(restored["tokenizer"]) == contents()


def test_a_deleted_checkpoint_says_so(tmp_path, source):
    ckpt.save(tmp_path / "step", tokenizer=ckpt.Files(source))
    found = ckpt.load(tmp_path / "step")["tokenizer"]
    ckpt.save(tmp_path / "step", model=MODEL, overwrite=True)
    for read in (lambda: found.read("metadata"), lambda: found.copy_to(tmp_path / "out")):
        with pytest.raises(ckpt.CheckpointNotFound, match="deleted or replaced"):
            read()


def test_links_are_followed(tmp_path, source):
    (tmp_path / "links" / "deep").mkdir(parents=True)
    os.symlink(source / "metadata", tmp_path / "links" / "file")
    os.symlink(source / "sub", tmp_path / "links" / "deep" / "folder")
    os.symlink(tmp_path / "links", tmp_path / "the-source")
    ckpt.save(tmp_path / "step", ckpt.Files(tmp_path / "the-source"))
    found = held(ckpt.load(tmp_path / "step"))
    expected = {"file": contents()["metadata"], "deep/folder/big.bin": contents()["sub/big.bin"]}
    assert found == expected
    assert not any(file.is_symlink() for file in (tmp_path / "step").rglob("*"))


def test_what_is_no_file_is_refused(tmp_path):
    folder = tmp_path / "source"

    def refused(what: str) -> None:
        with pytest.raises(ckpt.UnsupportedLeaf, match=what) as caught:
            ckpt.save(tmp_path / "step", model=MODEL, tokenizer=ckpt.Files(folder))
        assert "item 'tokenizer'" in str(caught.value)
        assert [entry.name for entry in tmp_path.iterdir()] == ["source"]
        for entry in folder.iterdir():
            entry.unlink()

    folder.mkdir()
    os.mkfifo(folder / "pipe")
    refused("no regular file")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(folder / "socket"))
        refused("no regular file")
    os.symlink("nowhere", folder / "link")
    refused("leads nowhere")
    os.symlink("circle", folder / "circle")
    refused("in a circle")
    os.symlink(folder, folder / "itself")
    refused("a directory that it lies in")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).touch()
    refused("no UTF-8")
    (folder / ".attempt.a").touch()
    refused("as ckpt's own do")
    with pytest.raises(FileNotFoundError):
        ckpt.save(tmp_path / "step", ckpt.Files(tmp_path / "nothing"))
    with pytest.raises(TypeError, match="takes a path, or a function"):
        ckpt.Files(3)
    with pytest.raises(ZeroDivisionError):
        ckpt.save(tmp_path / "step", ckpt.Files(lambda folder: 1 / 0))
    with pytest.raises(ckpt.UnsupportedLeaf, match="Files: it is an item"):
        ckpt.save(tmp_path / "step", {"a": ckpt.Files(folder)})


@pytest.mark.parametrize("size", [5, BIG])
def test_a_change_after_the_call_is_not_saved_in_half(tmp_path, size):
    """Small files are saved as they were at the call; a large one that changes fails the save."""
    file = tmp_path / "file"
    file.write_bytes(bytes(size))

    def change(event: ckpt.Event) -> None:
        if event.kind == "snapshot_taken":
            file.write_bytes(b"1" * (size + 1))

    options = ckpt.Options(on_event=change)
    pending = ckpt.save_async(tmp_path / "step", ckpt.Files(file), options=options)
    if size < MIB:
        pending.result()
        assert held(ckpt.load(tmp_path / "step")) == {"file": bytes(size)}
        return
    with pytest.raises(ckpt.CheckpointError, match=r"file changed while it was being saved"):
        pending.result()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_unchanged_files_are_linked(tmp_path, source):
    run = tmp_path / "run"

    def inode(step: int) -> int:
        return (run / str(step) / "tokenizer" / "sub" / "big.bin").stat().st_ino

    with ckpt.Checkpointer(run) as checkpointer:
        for step in range(6):
            if step == 2:  # as long as before, other bytes
                (source / "sub" / "big.bin").write_bytes(b"2" * BIG)
            if step == 3:  # other bytes at the end only, one more
                (source / "sub" / "big.bin").write_bytes(b"2" * BIG + b"3")
            if step == 5:  # the file of the last step is no longer what was written
                os.utime(run / "4" / "tokenizer" / "sub" / "big.bin", (1, 1))
            checkpointer.save(step, model=MODEL, tokenizer=ckpt.Files(source))
            checkpointer.wait_until_finished()
    inodes = [inode(step) for step in range(6)]
    assert inodes[0] == inodes[1]
    assert inodes[3] == inodes[4]
    assert len(set(inodes)) == 4
    for step in range(6):
        assert ckpt.verify(run / str(step)).ok
    off = ckpt.Options(link_unchanged=False)
    with ckpt.Checkpointer(tmp_path / "off", options=off) as checkpointer:
        for step in range(2):
            checkpointer.save(step, tokenizer=ckpt.Files(source / "sub"))
    assert (tmp_path / "off" / "1" / "tokenizer" / "big.bin").stat().st_nlink == 1


def test_an_item_may_change_its_form(tmp_path, source):
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        for step, value in enumerate([MODEL, ckpt.Files(source), ckpt.Json(1), MODEL, MODEL]):
            checkpointer.save(step, thing=value)
            checkpointer.wait_until_finished()
        assert [type(checkpointer.load(step)["thing"]) for step in range(4)] == [
            dict,
            ckpt.SavedFiles,
            int,
            dict,
        ]


def test_restoring_it(tmp_path, source):

    def written(folder: Path) -> None:
        (folder / "state").write_text("1")

    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(0, model=MODEL, tokenizer=ckpt.Files(source), own=ckpt.Files(written))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore_latest(model=MODEL, own=ckpt.Files)
        restored["model"]
        checkpointer.save(1, model=MODEL, tokenizer=ckpt.Files(source))
        assert restored["own"].read("state") == b"1"
        checkpointer.save(2, model=MODEL, own=ckpt.Files(written))
        with pytest.raises(ckpt.StructureMismatch, match="a tree of arrays"):
            checkpointer.restore(1, model=ckpt.Files(source), tokenizer=None)
        with pytest.raises(ckpt.StructureMismatch, match="files"):
            checkpointer.restore(1, model=MODEL, tokenizer=ckpt.Json)


def test_the_local_tier(tmp_path, source):
    run, local = tmp_path / "run", tmp_path / "local"
    with ckpt.Checkpointer(run, local_directory=local) as checkpointer:
        checkpointer.save(0, model=MODEL, tokenizer=ckpt.Files(source))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore_latest(model=MODEL, tokenizer=None)
        assert restored.path.startswith(str(local))
        assert held(restored["tokenizer"]) == contents()


def test_show_and_copies(call, place, source, tmp_path):
    path = str(tmp_path / "step")
    ckpt.save(path, model=MODEL, tokenizer=ckpt.Files(source))
    code, out, _ = call("show", path, "--leaf")
    assert (code, "tokenizer: 12 files" in out, "sub/big.bin" in out) == (0, True, True)
    for name in ("there", "back"):
        path, before = (place / name).url, path
        assert call("cp", before, path)[0] == 0
        assert held(ckpt.load(path)["tokenizer"]) == contents()
        assert ckpt.verify(path).ok


def test_two_processes(tmp_path, source):
    code = f"""
def function(folder):
    (folder / "who").write_text(str(index))
    (folder / "big").write_bytes(bytes(3 << 20))
path = f"{{directory}}/step"
ckpt.save(path, state=dict(w=np.arange(4)), tokenizer=ckpt.Files({str(source)!r}), own=ckpt.Files(function), j=ckpt.Json(7), options=options)
found = ckpt.load(path, dict(state=dict(w=np.zeros(4, int)), tokenizer=None, own=None, j=None))
report(
    names=found["tokenizer"].names(),
    who=found["own"].read("who").decode(),
    big=len(found["own"].read("big")),
    j=found["j"],
    verified=ckpt.verify(path).ok,
)
"""
    told = reports(launch(code, tmp_path / "run"))
    expected = {"who": "0", "big": 3 * MIB, "j": 7, "verified": True}
    assert told == [expected | {"names": sorted(contents())}] * 2


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1)
PARTS = NAMES.filter(lambda name: name not in (".", "..") and len(name.encode()) < 200)


@settings(max_examples=30)
@example({"\U0001f600" * 40: b""})
@given(st.dictionaries(PARTS, st.binary(max_size=99), max_size=5))
def test_any_names(tmp_path_factory, files):
    top = tmp_path_factory.mktemp("any")

    def write(folder: Path) -> None:
        for name, data in files.items():
            (folder / name).write_bytes(data)

    if any(name.startswith(".attempt.") for name in files):
        return
    for path in (str(top / "step"), f"memory://any-names-{os.getpid()}/{top.name}"):
        ckpt.save(path, ckpt.Files(write), options=ckpt.Options(durable=False))
        assert held(ckpt.load(path)) == files
        assert ckpt.verify(path).ok


ONE = {"w": 1.0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with a checkpoint in it, and the files by which one is known."""
    folder = tmp_path / "source"
    ckpt.save(folder / "base" / "7", ONE)
    (folder / "ckpt.json").write_text("{}")
    return folder


def test_a_checkpoint_among_the_files_is_deleted_with_its_step(checkpoint):
    url = f"memory://misused-{os.getpid()}/run"
    with ckpt.Checkpointer(url, max_to_keep=1) as checkpointer:
        for step in range(3):
            checkpointer.save(step, model=ONE, base=ckpt.Files(checkpoint))
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
            ckpt.save(project / "runs" / "0", model=ONE, code=ckpt.Files(source))
    with ckpt.Checkpointer(project / "runs") as checkpointer:
        with pytest.raises(ckpt.UnsupportedLeaf, match="holds the checkpoint"):
            checkpointer.save(0, model=ONE, code=ckpt.Files(project))
        checkpointer.save(0, model=ONE, code=ckpt.Files(project / "train.py"))
    ckpt.save(tmp_path / "project-2", model=ONE, code=ckpt.Files(project / "train.py"))


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
