"""Checkpoints whose files are symbolic links: what counts is the content, which is verified.

Caches of weights (the hub of Hugging Face), git-annex and `cp -rs` make such directories. Links are
followed for reading, wherever they lead; what deletes or replaces never follows one.
"""

import hashlib
import os
import socket
import subprocess
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.testing import assert_same
from tests.support.command_line import make_call  # noqa: F401 (fixture)
from tests.support.damage import flip

TREE = {
    "w": np.arange(300 * 300, dtype=np.float32).reshape(300, 300),
    "small": jnp.arange(3.0),
    "text": "of a leaf",
    "key": jax.random.key(3),
}


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() or path.is_symlink())


def hub(step: Path, elsewhere: Path) -> None:
    """As in the cache of the hub: `blobs/<hash>`, and relative links to them."""
    blobs = elsewhere / "blobs"
    blobs.mkdir(parents=True)
    for file in files_of(step):
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        file.replace(blob)
        file.symlink_to(os.path.relpath(blob, file.parent))


def annex(step: Path, elsewhere: Path) -> None:
    """As git-annex does it: content that may not be written to, each file in a directory of its own."""
    for number, file in enumerate(files_of(step)):
        kept = elsewhere / f"{number:03}" / "object"
        kept.parent.mkdir(parents=True)
        file.replace(kept)
        kept.chmod(0o444)
        file.symlink_to(kept)


def copied(step: Path, elsewhere: Path) -> None:
    """`cp -rs`: directories, and absolute links to the files of the original."""
    original = elsewhere / "original"
    elsewhere.mkdir()
    step.rename(original)
    subprocess.run(["cp", "-rs", str(original), str(step)], check=True, timeout=60)


def whole_step(step: Path, elsewhere: Path) -> None:
    elsewhere.mkdir()
    step.rename(elsewhere / "step")
    step.symlink_to(elsewhere / "step")


def item(step: Path, elsewhere: Path) -> None:
    elsewhere.mkdir()
    (step / "state").rename(elsewhere / "state")
    (step / "state").symlink_to(elsewhere / "state")


def chain(step: Path, elsewhere: Path) -> None:
    """Links to links, of directories below the item too."""
    item(step, elsewhere)
    annex(elsewhere / "state", elsewhere / "kept")
    for folder in [path for path in (elsewhere / "state").iterdir() if path.is_dir()]:
        kept = elsewhere / f"kept-{folder.name}"
        folder.rename(kept)
        (elsewhere / f"by-{folder.name}").symlink_to(kept)
        folder.symlink_to(elsewhere / f"by-{folder.name}")


@pytest.fixture(params=[hub, annex, copied, whole_step, item, chain])
def linked(request, tmp_path):
    """A directory whose one step is made of links."""
    with ckpt.Checkpointer(tmp_path / "steps", asynchronous=False) as checkpointer:
        checkpointer.save(0, state=TREE, metrics={"loss": 1.0})
    request.param(tmp_path / "steps" / "0", tmp_path / "elsewhere")
    return tmp_path / "steps"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_link_that_leads_nowhere_is_no_fresh_start(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    with pytest.raises(ckpt.CheckpointNotFound, match=r"link to .*scratch, which is not there"):
        ckpt.Checkpointer(tmp_path / "link" / "run")
    (tmp_path / "scratch").mkdir()
    assert ckpt.Checkpointer(tmp_path / "link" / "run").restore_latest(TREE) is None


def test_files_of_desktops_and_nfs_are_no_damage(linked):
    for name in (".DS_Store", "._w", ".nfs0001"):
        (linked / "0" / "state" / name).touch()
    report = ckpt.verify(linked / "0")
    assert report.ok and len(report.others) == 3, report


def test_content_counts(linked):
    step = linked / "0"
    assert ckpt.verify(step).ok, ckpt.verify(step).problems
    assert ckpt.inspect(step).items["state"].leaves
    assert_same(ckpt.load(step)["state"], TREE)
    loaded = ckpt.load(step, as_numpy=True)["state"]
    np.testing.assert_array_equal(loaded["w"], TREE["w"])
    with ckpt.Checkpointer(linked) as checkpointer:
        assert checkpointer.all_steps() == [0]
        assert checkpointer.metrics(0) == {"loss": 1.0}
        restored = checkpointer.restore_latest(state=TREE)
        assert_same(restored["state"], TREE)


def test_damaged_content_is_found(linked, tmp_path):
    data = max((path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()), key=_size)
    data.chmod(0o644)
    flip(data, 1000)
    assert not ckpt.verify(linked / "0").ok
    with pytest.raises(ckpt.CheckpointCorrupt, match="checksum differs"):
        ckpt.load(linked / "0")


def _size(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.parametrize("retired", [False, True])
def test_deleting_takes_the_links(linked, tmp_path, retired):
    before = contents(tmp_path / "elsewhere")
    assert before
    with ckpt.Checkpointer(linked, asynchronous=False, max_to_keep=1) as checkpointer:
        if retired:
            checkpointer.restore_latest(state=TREE)["state"]
            checkpointer.save(1, state=TREE)
        else:
            checkpointer.delete(0)
        assert checkpointer.all_steps() == [1] * retired
    assert contents(tmp_path / "elsewhere") == before
    assert not any(name.startswith((".ckpt-tmp", "0")) for name in os.listdir(linked))


def test_overwriting_through_a_link_is_refused(linked, tmp_path):
    before = contents(tmp_path / "elsewhere")
    (tmp_path / "best").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ckpt.CheckpointExists, match="is a link to"):
        ckpt.save(tmp_path / "best", TREE, overwrite=True)
    assert contents(tmp_path / "elsewhere") == before and (tmp_path / "best").is_symlink()


def test_the_trash_gets_the_links(linked, tmp_path):
    before = contents(tmp_path / "elsewhere")
    options = ckpt.Options(trash_directory="trash")
    with ckpt.Checkpointer(linked, asynchronous=False, options=options) as checkpointer:
        checkpointer.delete(0)
    assert os.path.lexists(linked / "trash" / "0")
    assert contents(tmp_path / "elsewhere") == before


def test_what_dead_writers_left_as_links_is_removed_as_links(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    steps = tmp_path / "steps"
    steps.mkdir()
    left = steps / ".ckpt-tmp.0.00000000-1-1.abcdef01abcdef01abcdef01"
    left.mkdir()
    (left / "state").symlink_to(outside)
    old = 1_000_000_000
    os.utime(left / "state", (old, old), follow_symlinks=False)
    for path in (left, outside, outside / "kept"):
        os.utime(path, (old, old))
    with ckpt.Checkpointer(steps, asynchronous=False) as checkpointer:
        checkpointer.save(0, state=TREE)
    assert not os.path.lexists(left)
    assert (outside / "kept").read_text() == "kept"


def dangling(file: Path) -> None:
    file.symlink_to(file.parent / "gone")


def circle(file: Path) -> None:
    file.symlink_to(file.name)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def pipe(file: Path) -> None:
    os.mkfifo(file.parent / "pipe")
    file.symlink_to("pipe")


def directory(file: Path) -> None:
    (file.parent / "directory").mkdir()
    file.symlink_to("directory")


def unix_socket(file: Path) -> None:
    made = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    try:
        os.chdir(file.parent)  # the path of a socket may not be long
        made.bind("socket")
    finally:
        os.chdir(here)
        made.close()
    file.symlink_to("socket")


BROKEN = [dangling, circle, device, pipe, directory, unix_socket]
NEEDED = ["ckpt.json", "state/manifest.ocdbt", "state/_strings.json"]


@pytest.fixture
def two_steps(tmp_path: Path) -> Path:
    path = tmp_path / "steps"
    with ckpt.Checkpointer(path, asynchronous=False) as checkpointer:
        for step in range(2):
            checkpointer.save(step, state=TREE)
    return path


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("name", [*NEEDED, "data"])
def test_what_cannot_be_read_is_named_and_never_waited_for(two_steps, broken, name):
    step = two_steps / "1"
    if name == "data":
        found = max(step.glob("state/*/d/*"), key=_size)
        name = str(found.relative_to(step))
    (step / name).unlink()
    broken(step / name)
    base = name.rpartition("/")[2]
    for reader in (ckpt.load, lambda path: ckpt.load(path, as_numpy=True)):
        with pytest.raises(ckpt.CheckpointCorrupt) as caught:
            reader(step)
        assert base in str(caught.value)
        assert caught.value.file is not None and caught.value.file.endswith(base)
    report = ckpt.verify(step)
    assert not report.ok
    assert any(base in str(problem) for problem in report.problems)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with ckpt.Checkpointer(two_steps, read_only=True) as checkpointer:
            assert checkpointer.all_steps() == [0, 1]
            restored = checkpointer.restore_latest(state=TREE)
            assert restored is not None and restored.step == 0
            assert_same(restored["state"], TREE)


def test_a_disk_that_is_not_mounted_is_named(tmp_path, call):
    (tmp_path / "scratch").symlink_to(tmp_path / "nvme")
    below = tmp_path / "scratch" / "a"
    for work in (
        lambda: ckpt.save(below, TREE),
        lambda: ckpt.load(below),
        lambda: ckpt.Checkpointer(tmp_path / "run", local_directory=below),
    ):
        with pytest.raises(ckpt.CheckpointNotFound, match=r"is a link to .*, which is not there"):
            work()
    assert call("doctor", below, "--mib", "1")[0] == 1 and call("ls", below)[0] == 2


def test_a_step_behind_a_link_that_leads_nowhere_is_not_absent(tmp_path):
    with ckpt.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        for step in (7, 8):
            checkpointer.save(step, state=TREE)
    (tmp_path / "run/8").rename(tmp_path / "away")
    (tmp_path / "run/8").symlink_to(tmp_path / "other disk")
    with (
        ckpt.Checkpointer(tmp_path / "run") as checkpointer,
        pytest.raises(ckpt.CheckpointNotFound, match="run/8 is a link to"),
    ):
        checkpointer.restore_latest(state=TREE)
