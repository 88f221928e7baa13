"""Real file systems without room, without permission, and without power.

Most of these mount something, which takes root; elsewhere they are skipped and say so.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.faults.child import cut_power
from tests.contract.faults.harness import RUN, Outcome, environment, request_of

pytestmark = pytest.mark.faults
_IMAGE_BYTES = 96 * 2**20


def _command(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(arg) for arg in args], capture_output=True, text=True, timeout=60, check=False
    )


@contextlib.contextmanager
def _mounted(target: Path, *args: object) -> Iterator[Path]:
    """`mount args target`, undone at the end; skips where that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    target.mkdir(exist_ok=True)
    done = _command("mount", *args, target)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield target
    finally:
        # Lazily when something still holds it, so that no mount outlives the test.
        if _command("umount", target).returncode:
            _command("umount", "-l", target)


def _failed_save(outcome: Outcome, errnos: set[str]) -> None:
    """The save failed with an error of the system, the earlier state stood, a retry worked."""
    assert outcome.exit_code == 0, str(outcome)
    (error,) = outcome.reported("error")
    assert "OSError" in error["bases"], str(outcome)
    assert error["errno"] in errnos, str(outcome)
    assert outcome.reported("before") == outcome.reported("after"), f"junk: {outcome}"
    assert outcome.reported("intact") == [True], str(outcome)


@pytest.mark.parametrize("how", ["save", "overwrite", "step", "async_step"])
def test_full_disk(plain_pool, tmp_path, how):
    with _mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=6m", "tmpfs") as disk:
        outcome = plain_pool.run("probes:save_too_much", [str(disk), how, 16 * 2**20])
        _failed_save(outcome, {"ENOSPC"})
        before, after = outcome.reported("room_bytes")
        assert before - after < 64 * 1024, f"room was not given back: {outcome}"
        assert outcome.reported("retried") == [True], str(outcome)


def test_no_inodes_left(plain_pool, tmp_path):
    with _mounted(
        tmp_path / "disk", "-t", "tmpfs", "-o", "size=50m,nr_inodes=200", "tmpfs"
    ) as disk:
        outcome = plain_pool.run("probes:save_too_many_files", [str(disk)])
        _failed_save(outcome, {"ENOSPC"})


def test_file_size_limit(plain_pool, tmp_path):
    outcome = plain_pool.run("probes:save_beyond_limit", [str(tmp_path), 2**20])
    _failed_save(outcome, {"EFBIG"})
    assert outcome.reported("retried") == [True], str(outcome)


def test_read_only_file_system(plain_pool, tmp_path):
    with _mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=50m", "tmpfs") as disk:
        assert plain_pool.run("probes:save_both", [str(disk)]).exit_code == 0
        assert _command("mount", "-o", "remount,ro", disk).returncode == 0
        outcome = plain_pool.run("probes:save_where_forbidden", [str(disk)])
    _failed_save(outcome, {"EROFS"})
    assert outcome.reported("step_error") == [["OSError", "EROFS"]], str(outcome)


def test_directory_without_permission(plain_pool, tmp_path):
    assert plain_pool.run("probes:save_both", [str(tmp_path)]).exit_code == 0
    for directory in (tmp_path, tmp_path / "steps"):
        directory.chmod(0o555)
    try:
        outcome = plain_pool.run("probes:save_where_forbidden", [str(tmp_path)])
    finally:
        for directory in (tmp_path, tmp_path / "steps"):
            directory.chmod(0o755)
    _failed_save(outcome, {"EACCES"})
    assert outcome.reported("step_error") == [["PermissionError", "EACCES"]], str(outcome)


def test_an_older_step_that_cannot_be_read(plain_pool, tmp_path):
    assert plain_pool.run("probes:save_both", [str(tmp_path)]).exit_code == 0
    steps = tmp_path / "steps"
    shutil.copytree(steps / "0", steps / "1")
    (steps / "0").chmod(0)
    try:
        outcome = plain_pool.run("probes:go_on_beside_unreadable", [str(steps)])
    finally:
        (steps / "0").chmod(0o755)
    assert outcome.exit_code == 0, str(outcome)
    assert outcome.reported("restored") == [1]
    assert outcome.reported("steps") == [[0, 1, 2]]


@contextlib.contextmanager
def _ext4(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """An ext4 file system in a file: (the image, where it is mounted)."""
    if shutil.which("mkfs.ext4") is None or shutil.which("losetup") is None:
        pytest.skip("needs mkfs.ext4 and loop devices")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(_IMAGE_BYTES)
    done = _command("mkfs.ext4", "-q", "-F", image)
    if done.returncode:
        pytest.skip(f"cannot make a file system: {done.stderr.strip()}")
    # commit=300: the journal is not written behind our back, only fsync makes anything durable.
    with _mounted(tmp_path / "disk", "-o", "loop,commit=300", image) as disk:
        yield image, disk


@pytest.mark.parametrize("scenario", ["overwrite", "async_step", "new", "step"])
def test_power_cut_after_a_save_was_acknowledged(plain_pool, tmp_path, scenario):
    with _ext4(tmp_path) as (image, disk):
        root = disk / "new" / "directories"  # whose names must be durable too
        root.mkdir(parents=True)
        os.sync()
        outcome = plain_pool.run(
            "probes:save_and_cut", [scenario, str(root), str(image), str(tmp_path / "cut")]
        )
        assert outcome.exit_code == 0, str(outcome)
    acknowledged = dict(outcome.reported("acknowledged"))
    with _mounted(tmp_path / "after", "-o", "loop", tmp_path / "cut") as after:
        reader = plain_pool.run("scenarios:later", [scenario, str(after / "new" / "directories")])
    assert reader.exit_code == 0, f"{outcome}\n{reader}"
    found = reader.reported("found")[0]
    if scenario in ("step", "async_step"):
        acknowledged.pop("0")  # retention
        found.pop("0", None)  # deleting need not be durable
    assert found == acknowledged, f"{outcome}\n{reader}"


@pytest.mark.parametrize("name", ["a", "a/b/c"])
def test_power_cut_after_saving_into_new_directories(plain_pool, tmp_path, name):
    """The names of all directories that the save itself makes are durable."""
    with _ext4(tmp_path) as (image, disk):
        os.sync()
        outcome = plain_pool.run(
            "probes:save_in_new_directory", [str(disk), name, str(image), str(tmp_path / "cut")]
        )
        assert outcome.exit_code == 0, str(outcome)
    with _mounted(tmp_path / "after", "-o", "loop", tmp_path / "cut") as after:
        reader = plain_pool.run("probes:read_both", [str(after / name)])
    assert reader.reported("versions") == [[1, 2]], f"{outcome}\n{reader}"


def test_power_cut_loses_what_was_not_synced(plain_pool, tmp_path):
    """The method itself works: a save that may be lost is lost."""
    with _ext4(tmp_path) as (image, disk):
        os.sync()
        outcome = plain_pool.run(
            "probes:save_carelessly", [str(disk / "first"), str(image), str(tmp_path / "cut")]
        )
        assert outcome.exit_code == 0, str(outcome)
    with _mounted(tmp_path / "after", "-o", "loop", tmp_path / "cut") as after:
        reader = plain_pool.run("probes:read_one", [str(after / "first")])
    assert reader.reported("error")[0]["type"] in ("CheckpointNotFound", "CheckpointCorrupt")


def test_power_cut_at_any_moment(plain_pool, tmp_path):
    """While steps are saved one after another, power fails now and then; resuming always works."""
    cuts_with_steps = number = 0
    with _ext4(tmp_path) as (image, disk), _Trainer(tmp_path, disk / "steps") as trainer:
        while cuts_with_steps <= 30:
            number += 1
            cut = tmp_path / f"cut{number}"  # others may have copied the mount of the last one
            assert number < 400, "the trainer saved too little to show anything"
            time.sleep(0.05 + number * 0.013 % 0.2)
            with trainer.stopped():
                acknowledged = trainer.acknowledged()
                cut_power(str(image), str(cut))
            with _mounted(tmp_path / "after", "-o", "loop", cut) as after:
                reader = plain_pool.run("probes:read_steps", [str(after / "steps")])
            cut.unlink()
            assert reader.exit_code == 0, str(reader)
            (steps,) = reader.reported("steps")
            cuts_with_steps += bool(steps)
            assert max(steps, default=-1) >= acknowledged, f"{acknowledged} is lost: {reader}"


class _Trainer:
    """A process that saves step after step, and can be stopped for a moment."""

    def __init__(self, scratch: Path, directory: Path) -> None:
        self._events = scratch / "events"
        self._request = request_of("probes:train", [str(directory)], scratch)

    def __enter__(self) -> "_Trainer":
        command = [sys.executable, "-c", RUN, self._request]
        self._process = subprocess.Popen(command, env=environment(None))
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait(10)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def acknowledged(self) -> int:
        """The newest step that was acknowledged, or -1."""
        lines = self._events.read_text().splitlines() if self._events.exists() else []
        return max((json.loads(line)["step"] for line in lines), default=-1)


NO_LOCKS = r"""
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>
static int refuse(void) { errno = ENOLCK; return -1; }
int flock(int file, int how) { return refuse(); }
int fcntl64(int file, int what, void *argument) {
  if (what == F_SETLK || what == F_SETLKW || what == 37 || what == 38) return refuse();
  return syscall(SYS_fcntl, file, what, argument);
}
int fcntl(int file, int what, ...) {
  va_list more;
  va_start(more, what);
  return fcntl64(file, what, va_arg(more, void *));
}
"""
TRAINS = """
import json, sys
import numpy as np, ckpt_core as ckpt
def state(step): return {"w": np.full(300_000, step, np.float32), "n": step}
with ckpt.Checkpointer(sys.argv[1], max_to_keep=2) as run:
    found = run.restore_latest(state=state(0))
    first = 0 if found is None else found["state"]["n"] + 1
    for step in range(first, first + 3):
        run.save(step, state=state(step))
    run.wait_until_finished()
    run.save(first + 2, state=state(first + 2), overwrite=True)
print(json.dumps([first, run.all_steps(), ckpt.verify(f"{sys.argv[1]}/{first + 2}").ok]))
"""


UNSYNCED = r"""
#include <errno.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
int fsync(int file) {
  struct stat found; if (fstat(file, &found) == 0 && S_ISDIR(found.st_mode)) { errno = EINVAL; return -1; }
  return syscall(SYS_fsync, file);
}
"""
ASKS_THE_DOCTOR = """
import contextlib, io, json, os, sys
import ckpt_core as ckpt
from ckpt_core.cli import main
code, said, directory = 0, io.StringIO(), sys.argv[1]
sys.argv = ["ckpt", "doctor", directory, "--mib", "1"]
with contextlib.redirect_stdout(said):
    try:
        main()
    except SystemExit as end:
        code = end.code
ckpt.save(f"{directory}/quick", {"n": 1}, options=ckpt.Options(durable=False))
print(json.dumps([code, "durable=False" in said.getvalue(), sorted(os.listdir(directory))]))
"""


def _preloaded(tmp_path: Path, source: str) -> str:
    """A library that refuses some calls of the system."""
    if (compiler := shutil.which("gcc") or shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "refuses.c").write_text(source)
    library = tmp_path / "refuses.so"
    _command(compiler, "-shared", "-fPIC", "-o", library, tmp_path / "refuses.c").check_returncode()
    return str(library)


def test_directories_that_cannot_be_synced(tmp_path, run_python):
    library = _preloaded(tmp_path, UNSYNCED)
    (tmp_path / "run").mkdir()
    found = run_python(ASKS_THE_DOCTOR, str(tmp_path / "run"), LD_PRELOAD=library)
    assert found == [1, True, ["quick"]]


def test_a_file_system_without_locks(tmp_path, run_python):
    """Lustre without `flock` and NFS without lockd refuse each lock."""
    library = _preloaded(tmp_path, NO_LOCKS)
    for found in ([0, [1, 2], True], [3, [4, 5], True]):
        assert run_python(TRAINS, str(tmp_path / "run"), LD_PRELOAD=library) == found
