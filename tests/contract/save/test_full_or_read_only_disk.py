"""Disks that are full or read-only: one clear exception each, what was there is unchanged."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.unchanged import (
    assert_tree,
    assert_usable,
    make_steps,  # noqa: F401 (fixtures)
    snapshot,
    tree,
    unchanged,
)

# ---------------------------------------------------------------------------------------- full disk


def mount(directory: Path, size: str):
    """A small file system in memory on `directory`; skips where this user cannot make one."""
    directory.mkdir(exist_ok=True)
    command = shutil.which("mount")
    if os.geteuid() != 0 or command is None:
        pytest.skip("needs root for a small file system")
    done = subprocess.run(
        [command, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    directory = tmp_path / "disk"
    mount(directory, "4m")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True, timeout=30)


def used_bytes(directory):
    status = os.statvfs(directory)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def too_large():
    """Far more than fits, in many leaves of both sizes."""
    random = np.random.default_rng(0)
    small = {f"s{i}": random.integers(0, 255, 1000, dtype=np.uint8) for i in range(200)}
    return small | {f"l{i}": random.standard_normal(2**17) for i in range(12)}


@pytest.mark.parametrize("kind", ["large", "small"])
def test_full_disk(small_disk, kind):
    root = small_disk / "run"
    with ckpt.Checkpointer(root, asynchronous=False) as checkpointer:
        checkpointer.save(1, tree(1))
    state = too_large()
    if kind == "small":  # below the size of a chunk that is written by itself
        state = {f"s{i}": np.full(4096, i % 251, np.uint8) for i in range(1500)}
    before = used_bytes(small_disk)
    with (
        ckpt.Checkpointer(root, asynchronous=False) as checkpointer,
        unchanged(small_disk),
        pytest.raises(OSError) as caught,
    ):
        checkpointer.save(2, state)
    assert caught.value.errno == errno.ENOSPC
    assert used_bytes(small_disk) <= before + 64 * 1024, "a failed save gives its room back"
    with unchanged(small_disk), pytest.raises(OSError) as caught:
        ckpt.save(small_disk / "free", state)
    assert caught.value.errno == errno.ENOSPC
    assert_usable(root, (1,))


def test_full_disk_in_the_background(small_disk):
    root = small_disk / "run"
    checkpointer = ckpt.Checkpointer(root)
    checkpointer.save(1, tree(1))
    checkpointer.wait_until_finished()
    with unchanged(small_disk):
        checkpointer.save(2, too_large())
        with pytest.raises(OSError) as caught:
            checkpointer.wait_until_finished()
        assert caught.value.errno == errno.ENOSPC
        assert list(checkpointer.all_steps()) == [1]
        checkpointer.wait_until_finished()  # raised once
    checkpointer.save(3, tree(3))
    checkpointer.close()
    assert_tree(ckpt.load(root / "3"), 3)


@pytest.mark.parametrize("free", [0, 4, 12, 24])
def test_disk_full_to_the_last_page(small_disk, free):
    """The room ends anywhere: at the data, the metadata or the record."""
    root = small_disk / "run"
    with ckpt.Checkpointer(root, asynchronous=False) as checkpointer:
        checkpointer.save(1, tree(1))
    filler = small_disk / "filler"
    status = os.statvfs(small_disk)
    filler.write_bytes(bytes((status.f_bfree - free) * status.f_frsize))
    before = snapshot(root)
    saved = True
    try:
        ckpt.save(root / "2", tree(2))
    except OSError as error:
        assert error.errno == errno.ENOSPC  # noqa: PT017 - it may also fit
        saved = False
    filler.unlink()
    if saved:
        assert_tree(ckpt.load(root / "2"), 2)
    else:
        assert snapshot(root) == before
        assert_usable(root, (1,))


def test_overwriting_on_a_full_disk_keeps_the_old(small_disk):
    ckpt.save(small_disk / "c", tree(1))
    with unchanged(small_disk), pytest.raises(OSError):
        ckpt.save(small_disk / "c", too_large(), overwrite=True)
    assert_tree(ckpt.load(small_disk / "c"), 1)


# ------------------------------------------------------------------------------ read-only directory


@pytest.fixture
def read_only_directory(tmp_path):
    """A directory with step 1 that nobody can write, root included."""
    directory = tmp_path / "disk"
    if os.geteuid() == 0:
        mount(directory, "4m")
        ckpt.save(directory / "run" / "1", tree(1))
        subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True, timeout=30)
        yield directory / "run"
        subprocess.run(["umount", "-l", str(directory)], check=True, timeout=30)
    else:
        ckpt.save(directory / "run" / "1", tree(1))
        (directory / "run").chmod(0o555)
        yield directory / "run"
        (directory / "run").chmod(0o755)


def save_there(root, asynchronous):
    """Opening, saving or closing may find out first."""
    with ckpt.Checkpointer(root, asynchronous=asynchronous) as checkpointer:
        checkpointer.save(2, tree(2))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_read_only_directory(read_only_directory, asynchronous):
    root = read_only_directory
    with unchanged(root):
        with pytest.raises(OSError) as caught:
            ckpt.save(root / "2", tree(2))
        assert caught.value.errno in (errno.EROFS, errno.EACCES)
        with pytest.raises(OSError) as caught:
            save_there(root, asynchronous)
        assert caught.value.errno in (errno.EROFS, errno.EACCES)
        # Reading needs no writing.
        assert_tree(ckpt.load(root / "1"), 1)
        assert ckpt.verify(root / "1").ok
        with ckpt.Checkpointer(root, read_only=True) as checkpointer:
            assert checkpointer.restore_latest(state=tree(0)).step == 1


def test_saving_with_a_read_only_checkpointer(steps):
    with unchanged(steps), ckpt.Checkpointer(steps, read_only=True) as checkpointer:
        for call in (
            lambda: checkpointer.save(5, tree(5)),
            lambda: checkpointer.delete(3),
            lambda: checkpointer.rollback_to(3),
        ):
            with pytest.raises(
                (ckpt.CheckpointError, ValueError, RuntimeError, OSError), match="read"
            ):
                call()
