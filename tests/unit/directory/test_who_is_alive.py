"""Who lives: one function decides, and what is not known to be dead is never deleted before an age.

Locks are hints only: some do not reach another host, and a forked child would hold its parent's.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend, owner
from tests.support.children import environment

HOST, PID, START = owner.this_owner().split("-")
LONG_AGO_SECS = time.time() - 2 * owner.FOREIGN_AGE_SECS


def state(value: float) -> dict[str, Any]:
    return {"w": np.full(3, value)}


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait(30)
    return process.pid


def start_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


@pytest.mark.linux("/proc says when a process started")
def test_a_process_that_ended_and_was_not_waited_for():
    process = subprocess.Popen(["true"])
    start = start_of(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert owner.lives(f"{HOST}-{process.pid}-{start}") is False
    process.wait(30)


@pytest.mark.parametrize(
    "text",
    ["", "someone", "{host}-0-1", "{host}-999999999999999999999999999999-1", "{host}--1", "{host}-²-1",
     "{host}-1", "00000000-{pid}-{start}", "{host}-{pid}-{start}-1", "{host}-{pid}-{start}\n"],
)  # fmt: skip
def test_of_whom_nothing_is_known(text):
    assert owner.lives(text.format(host=HOST, pid=PID, start=START)) is None


@pytest.mark.parametrize("names", ["unnamed", "named", "none"])
@pytest.mark.parametrize("ahead_secs", [-7200.0, 0.0, 7200.0, 1e8])
@pytest.mark.parametrize("old", [False, True])
def test_the_file_system_tells_the_time(tmp_path, monkeypatch, names, ahead_secs, old):
    """A host with a wrong clock deleted what another one was saving, or kept what was left for ever."""
    folder = tmp_path / "run" / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").touch()
    for path in (folder / "deep" / "file", folder / "deep", folder):
        os.utime(path, (LONG_AGO_SECS, LONG_AGO_SECS))
    if not old:
        os.utime(folder / "deep" / "file")  # the deepest one tells
    real_open, real_time = os.open, time.time

    def opened(path: str, flags: int, *arguments: int) -> int:
        no_name = getattr(os, "O_TMPFILE", -1)
        without_a_name = flags & no_name == no_name
        if names == "none" or (
            names == "named" and without_a_name
        ):  # as on NFS, or without permission
            raise OSError(95, "EOPNOTSUPP")
        return real_open(path, flags, *arguments)

    before = [os.stat(one).st_mtime_ns for one in (folder, folder / "deep")]
    with monkeypatch.context() as wrong:
        wrong.setattr(time, "time", lambda: real_time() + ahead_secs)
        wrong.setattr(os, "open", opened)
        found = [owner.is_dead("elsewhere-1-1", str(folder)) for _ in range(2)]
    assert found == [old and names != "none"] * 2
    assert [os.stat(one).st_mtime_ns for one in (folder, folder / "deep")] == before
    assert os.listdir(tmp_path / "run") == ["folder"]


def test_a_save_of_another_host_outlives_a_wrong_clock(tmp_path, monkeypatch):
    running = tmp_path / f".ckpt-tmp.7.0123abcd-4242-1.{'0' * 24}"
    (running / "state").mkdir(parents=True)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 2 * owner.FOREIGN_AGE_SECS)
    with ckpt.Checkpointer(tmp_path, options=ckpt.Options(durable=False)) as run:
        run.save(8, {"w": 1})
    assert (running / "state").is_dir()


HIDDEN = """
import json, os, sys
from ckpt_core._directory import PosixBackend, files, object_store, owner, posix
writing, written = os.pipe()
ending, end = os.pipe()
writer = os.fork()
if writer == 0:
    os.close(end)
    os.setgroups([]), os.setgid(12345), os.setuid(12345)
    PosixBackend().begin("./model", overwrite=False, durable=False, token="token")
    os.write(written, b"x")
    os.read(ending, 1)
    os._exit(0)
os.close(ending), os.close(written)
assert os.read(writing, 1), "the writer failed"

def cleaned():
    answer, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([]), os.setgid(54321), os.setuid(54321)
        seen = os.path.exists(f"/proc/{writer}")
        os.write(told, json.dumps([seen, PosixBackend().clean(".")]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(told)
    return json.loads(os.read(answer, 65536))

living = cleaned()
os.write(end, b"x")
os.waitpid(writer, 0)
print(json.dumps({"living": living, "dead": cleaned()}))
"""


@pytest.fixture
def hidden_proc() -> list[str]:
    """What begins a command that sees a /proc of its own, with hidepid=2."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a /proc with hidepid=2")
    release = [int(part) for part in re.findall(r"\d+", platform.release())[:2]]
    if release < [5, 8]:
        pytest.skip("before Linux 5.8 hidepid is an option of the whole machine, not of a mount")
    mount = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    begin = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*begin, "true"], timeout=30).returncode:
        pytest.skip("no mount namespaces here")
    return begin


def test_a_live_writer_that_proc_hides(hidden_proc, tmp_path):
    """Other users reach the directory as their current one: those above it may be private."""
    tmp_path.chmod(0o777)
    done = subprocess.run(
        [*hidden_proc, sys.executable, "-c", HIDDEN],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
    )
    said = json.loads(done.stdout)
    assert said["living"] == [False, []]
    assert len(said["dead"][1]) == 1


class Neighbour:
    """What another process has left beside ours in a local directory."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "process_1-of-2"
        shutil.copytree(folder / "process_0-of-1", self.path)

    def owned_by(self, text: str | None) -> None:
        file = self.path / ".ckpt-owner"
        token = "0123456789abcdef0123456789abcdef"
        file.write_text(f"{token} process 1 on it\n" + ("" if text is None else f"{text}\n"))

    def age(self) -> None:
        for path in [*self.path.rglob("*"), self.path]:
            os.utime(path, (LONG_AGO_SECS, LONG_AGO_SECS))


@pytest.fixture
def neighbour(tmp_path: Path) -> Neighbour:
    with ckpt.Checkpointer(tmp_path / "run", local_directory=tmp_path / "local") as checkpointer:
        checkpointer.save(0, state(0))
    (folder,) = (tmp_path / "local").iterdir()
    return Neighbour(folder)


OTHERS: dict[str, tuple[Callable[[int, int], str | None], bool, bool]] = {
    # owner, by the ids of a process that lives and one that does not; old?; is it to go?
    "another host, lately": (lambda living, dead: f"abcdef01-{living}-1", False, False),
    "another host, long ago": (lambda living, dead: f"abcdef01-{living}-1", True, True),
    "an earlier version, lately": (lambda living, dead: None, False, False),
    "an earlier version, long ago": (lambda living, dead: None, True, True),
    "alive": (lambda living, dead: f"{HOST}-{living}-{start_of(living)}", True, False),
    "dead": (lambda living, dead: f"{HOST}-{dead}-1", False, True),
    # without /proc it counts as the same one
    "another one of its number": (
        lambda living, dead: f"{HOST}-{living}-1",
        False,
        owner._start_time(os.getpid()) is not None,
    ),
}


@pytest.mark.parametrize("locks_work", [True, False], ids=["", "no locks"])
@pytest.mark.parametrize("other", OTHERS)
def test_steps_of_others_in_a_local_directory(
    tmp_path, neighbour, sleeper, monkeypatch, other, locks_work
):
    """Nobody holds a lock on them, which says nothing: it may be another host's, and local to it."""
    if not locks_work:
        monkeypatch.setattr(owner.LockFile, "lock", lambda file, kind: True)
    owned_by, old, goes = OTHERS[other]
    neighbour.owned_by(owned_by(sleeper.pid, dead_pid()))
    if old:
        neighbour.age()
    with ckpt.Checkpointer(tmp_path / "run", local_directory=tmp_path / "local") as checkpointer:
        checkpointer.save(1, state(1))
    assert neighbour.path.exists() != goes


def test_a_locked_one_stays_whatever_it_says(tmp_path, neighbour):
    claim = PosixBackend().claim(str(neighbour.path), ".ckpt-owner", b"token\n00000000-1-1\n")
    neighbour.age()
    with ckpt.Checkpointer(tmp_path / "run", local_directory=tmp_path / "local") as checkpointer:
        checkpointer.save(1, state(1))
    assert neighbour.path.exists()
    claim.close()


FORKED = """
import json, os, select, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
import ckpt_core as ckpt
from ckpt_core._directory import owner

ending, end = os.pipe()
workers = []

def fork():
    told, tell = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(end)
        held = [file for file in owner.open_files]
        os.write(tell, json.dumps([len(held), owner.this_owner().split("-")[1] == str(os.getpid())]).encode())
        select.select([ending], [], [], 100)
        os._exit(0)
    workers.append(worker)
    answer = json.loads(os.read(told, 100))
    os.close(told), os.close(tell)
    return answer

run = sys.argv[1]
said = {}

class Pipeline:
    # starts its workers where a restore sets it, as data pipelines do
    def get_state(self): return {"at": 1}
    def set_state(self, state): said["during the restore"] = fork()

c = ckpt.Checkpointer(run)
for step in range(3):
    c.save(step, items={"model": {"w": np.full(3, float(step))}, "data": Pipeline()})
    c.wait_until_finished()
c.restore(0, items={"model": {"w": np.zeros(3)}, "data": Pipeline()})
with owner.reading(run + "/1/ckpt.json", b""):
    said["while reading"] = fork()
with owner.deleting(run + "/1/ckpt.json"):
    said["while deleting"] = fork()
for step in (0, 1):
    c.delete(step)
said["left"] = c.all_steps()
c.close()
said["claimed"] = owner.is_locked(run + "/.ckpt-owner")
alive = [os.waitpid(worker, os.WNOHANG)[0] == 0 for worker in workers]
os.close(end)
for worker in workers:
    os.waitpid(worker, 0)
print(json.dumps(said | {"alive": alive}))
"""


def test_workers_that_are_forked_hold_no_locks(tmp_path, run_python):
    """Forked during a restore, while a step is read or removed, with the claim held: all let go."""
    said = run_python(FORKED, str(tmp_path / "run"))
    forks = [said["during the restore"], said["while reading"], said["while deleting"]]
    assert forks == [[0, True]] * 3
    assert said["left"] == [2]
    assert said["claimed"] is False
    assert said["alive"] == [True] * 3
