"""The priority of the threads that save: low in the background if asked for, and raised where somebody waits."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._background import priority
from ckpt_core._background.pending import PendingSave
from tests.support import forked
from tests.support.children import environment

LONG_SECS = 60


@pytest.fixture(autouse=True)
def _no_save_of_an_earlier_test() -> None:
    """Its thread raises the priority of TensorStore's after the result was taken."""
    for thread in threading.enumerate():
        if thread.name.startswith("ckpt-") and not thread.daemon:
            thread.join(LONG_SECS)


# In a process of its own: the threads of TensorStore that other tests started would be lowered, too.
CHILD = """
import os, sys, threading
import numpy as np
import ckpt_core as ckpt
from tests.support import seams

path, way, priority, tier = sys.argv[1:]
nices = []

def of_pool():
    for name in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{name}/comm") as file:
            if file.read().startswith("ts_pool"):
                yield os.getpriority(os.PRIO_PROCESS, int(name))

def look(*_):
    nices.append((os.getpriority(os.PRIO_PROCESS, 0), max(of_pool(), default=None)))
    gate.wait(60)

seams.at(None, "commit", before=look)
gate = threading.Event()
state = {"w": np.zeros(2**20, np.float32)}
gate.set()
ckpt.save(path + "-first", state)  # starts TensorStore's threads
gate.clear()
nices.clear()
options = ckpt.Options(background_priority=priority)
base = os.getpriority(os.PRIO_PROCESS, 0)
if way == "foreground":
    gate.set()
    ckpt.save(path, state, options=options)
elif way == "save_async":
    pending = ckpt.save_async(path, state, options=options)
    while not nices:
        gate.wait(0.01)
    gate.set()
    pending.result()
else:
    local = {"local_directory": path + "-local"} if tier == "two" else {}
    checkpointer = ckpt.Checkpointer(path, options=options, asynchronous=way == "Checkpointer", **local)
    if way != "Checkpointer":
        gate.set()
    checkpointer.save(0, state)
    while not nices:
        gate.wait(0.01)
    gate.set()
    checkpointer.close()
print([(own - base, pool - base) for own, pool in nices])
print(os.getpriority(os.PRIO_PROCESS, 0) - base)
"""


def nices(tmp_path: Path, way: str, background_priority: str, tiers: str = "one") -> list[str]:
    arguments = str(tmp_path / "ckpt"), way, background_priority, tiers
    done = forked.run(CHILD, *arguments, environment=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


LOW = priority.LOWEST_NICE - os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.linux("threads have priorities of their own")
@pytest.mark.parametrize("way", ["save_async", "Checkpointer"])
def test_the_threads_of_a_background_save_have_the_lowest_priority(
    tmp_path: Path, way: str
) -> None:
    assert nices(tmp_path, way, "low") == [str([(LOW, LOW)]), "0"]


@pytest.mark.linux("threads have priorities of their own")
@pytest.mark.parametrize("way", ["save_async", "Checkpointer"])
def test_by_default_they_have_that_of_the_caller(tmp_path: Path, way: str) -> None:
    assert ckpt.Options().background_priority == "normal"
    assert nices(tmp_path, way, "normal") == [str([(0, 0)]), "0"]


@pytest.mark.linux("threads have priorities of their own")
@pytest.mark.parametrize("way", ["foreground", "synchronous"])
@pytest.mark.parametrize("tiers", ["one", "two"])
def test_a_save_for_which_the_caller_waits_keeps_its_priority(
    tmp_path: Path, way: str, tiers: str
) -> None:
    found, caller = nices(tmp_path, way, "low", tiers)
    assert set(found[1:-1].replace("), (", ");(").split(";")) == {"(0, 0)"}
    assert caller == "0"


class Held:
    """Background work that reports its priority when asked."""

    def __init__(self) -> None:
        self.asked, self.began, self.may_end = (threading.Event() for _ in range(3))
        self.found: list[int] = []

    def work(self) -> None:
        self.found.append(priority.nice_of_this_thread())
        self.began.set()
        assert self.may_end.wait(LONG_SECS)
        self.found.append(priority.nice_of_this_thread())


def held(monkeypatch: pytest.MonkeyPatch, *, permitted: bool) -> tuple[Held, list[tuple[Any, int]]]:
    """A low save, a wait for which has begun; and the nice values that were set, after the first."""
    calls: list[tuple[Any, int]] = []
    original = os.setpriority

    def setpriority(which: int, who: int, nice: int) -> None:
        calls.append((who, nice))
        if nice < priority.LOWEST_NICE and not permitted:
            raise PermissionError
        if permitted:
            try:
                original(which, who, nice)
            except PermissionError:
                pytest.skip("this process may not raise priorities")
        else:
            original(which, who, nice)

    monkeypatch.setattr(os, "setpriority", setpriority)
    work = Held()
    pending = PendingSave("somewhere", work.work, "ckpt-save", low=True)
    pending.start()
    assert work.began.wait(LONG_SECS)
    assert not pending.wait(0.01)
    work.may_end.set()
    pending.result()
    pending._thread.join(LONG_SECS)  # after the work it raises TensorStore's threads, one by one
    return work, calls


@pytest.mark.linux("threads have priorities of their own")
def test_a_wait_raises_the_priority_again_where_that_is_permitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, _ = held(monkeypatch, permitted=True)
    assert work.found == [priority.LOWEST_NICE, priority.nice_of_this_thread()]


@pytest.mark.linux("threads have priorities of their own")
def test_a_wait_goes_on_at_the_low_one_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    work, calls = held(monkeypatch, permitted=False)
    assert work.found == [priority.LOWEST_NICE, priority.LOWEST_NICE]
    assert any(nice < priority.LOWEST_NICE for _, nice in calls)  # it was tried


@pytest.mark.linux("threads have priorities of their own")
def test_other_threads_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: set[int] = set()
    monkeypatch.setattr(os, "setpriority", lambda _, who, nice: changed.add(who))
    priority.set_nice(threading.get_native_id(), 5)
    names = {
        Path(f"/proc/self/task/{who}/comm").read_text().strip()
        for who in changed - {threading.get_native_id()}
    }
    assert threading.get_native_id() in changed
    assert names <= {"ts_pool_worker"}


def test_where_threads_have_no_priority_nothing_is_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changed: list[Any] = []
    priority._say_that_it_has_no_effect.cache_clear()
    monkeypatch.setattr(priority, "LINUX", False)
    monkeypatch.setattr(os, "setpriority", lambda *given: changed.append(given))
    options = ckpt.Options(background_priority="low")
    for name in ("one", "two"):
        ckpt.save_async(tmp_path / name, {"w": np.zeros(3)}, options=options).result()
    assert not changed
    said = [one for one in caplog.messages if "background_priority='low' has no effect" in one]
    assert len(said) == 1


def test_an_unknown_priority_is_refused() -> None:
    with pytest.raises(
        ValueError, match="background_priority must be 'low' or 'normal', got 'high'"
    ):
        ckpt.Options(background_priority="high")  # pyright: ignore[reportArgumentType]
