"""Ctrl-C and SIGTERM in each phase of a call: it ends, no lock stays held, and the same program again goes on."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import forked, seams
from tests.support.children import environment

LIMIT_SECS = 120
LAST = 3


def state(step: int) -> dict[str, Any]:
    return {f"w{n}": np.arange(40_000.0) + 10 * step + n for n in range(3)} | {"n": step}


def same(tree: Any, step: int) -> bool:
    return all(np.array_equal(tree[name], value) for name, value in state(step).items())


class Counter:
    """A user's object that may be interrupted while it is asked or set."""

    def __init__(self) -> None:
        self.value = -1
        self.asked: Callable[[], None] = lambda: None
        self.given: Callable[[], None] = lambda: None

    def get_state(self) -> Any:
        self.asked()
        return {"value": self.value}

    def set_state(self, state: Any) -> None:
        self.given()
        self.value = state["value"]


class Interrupt:
    """Sends a signal once: in the main thread at once, in another one when the main thread waits in a call; ``heard`` is set when
    the exception has come out, and the other thread goes on then.
    """

    def __init__(self, number: signal.Signals) -> None:
        self.number, self.heard = number, threading.Event()
        self.call, self._sent = "", False

    def __call__(self, *_: Any, **__: Any) -> None:
        if self._sent:
            return
        self._sent, main = True, threading.main_thread().ident
        assert main is not None
        until = time.monotonic() + LIMIT_SECS
        while threading.get_ident() != main and not self._waits(main):
            assert time.monotonic() < until, f"nobody waits in {self.call}"
            time.sleep(0.001)
        signal.pthread_kill(main, self.number)
        if threading.get_ident() != main:
            assert self.heard.wait(LIMIT_SECS)

    def _waits(self, thread: int) -> bool:
        frame, names = sys._current_frames()[thread], list[str]()
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        return self.call in names


@pytest.fixture(name="interrupt", params=[signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def make_interrupt(request: pytest.FixtureRequest) -> Iterator[Interrupt]:
    """SIGTERM as a program has it that wants its ``finally`` blocks run."""

    def leaves(*_: Any) -> None:
        raise KeyboardInterrupt if request.param == signal.SIGINT else SystemExit(143)

    before = signal.signal(request.param, leaves)
    yield Interrupt(request.param)
    signal.signal(request.param, before)


def in_time(call: Callable[[], Any]) -> Any:
    """What a call gives in another thread, which would wait there for a lock that stayed held."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_SECS)
    assert found, "it waits for ever"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def train(directory: Path) -> ckpt.Checkpointer:
    """The program: goes on from the newest step to the last one."""
    counter = Counter()
    with ckpt.Checkpointer(directory) as run:
        found = run.restore_latest(state=state(9), counter=counter)
        assert found is None or (same(found["state"], found.step) and counter.value == found.step)
        for step in range(found.step + 1 if found else 0, LAST + 1):
            counter.value = step
            assert run.save(step, state=state(step), counter=counter)
    return run


def check(directory: Path, acknowledged: int) -> None:
    """The same program again, here and then in a reader: nothing that was acknowledged is lost, and no litter stays."""
    with ckpt.Checkpointer(directory, read_only=True) as reader:
        assert acknowledged in (-1, *reader.all_steps())
    run = in_time(lambda: train(directory))
    assert run.latest_step() == LAST
    for step in run.all_steps():
        assert ckpt.verify(directory / str(step)).ok
        assert same(ckpt.load(directory / str(step), item="state"), step)
    assert not [name for name in os.listdir(directory) if name.startswith(".ckpt-tmp")]


POINTS = {
    "writing": ("write", "before"),
    "written": ("write", "after"),
    "recording": ("record", "before"),
    "committing": ("commit", "before"),
    "committed": ("commit", "after"),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_save_that_blocks(point, interrupt, tmp_path, monkeypatch):
    """The same object goes on, too: it reads the run again and keeps its place."""
    counter = Counter()
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as run:
        run.save(0, state=state(0), counter=counter)
        moment, when = POINTS[point]
        seams.at(monkeypatch, moment, **{when: interrupt})
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run.save(1, state=state(1), counter=counter)
        assert in_time(run.all_steps) in ([0], [0, 1])
        counter.value = 2
        assert in_time(lambda: run.save(2, state=state(2), counter=counter))
    check(tmp_path, 2)


@pytest.mark.parametrize("point", ["writing", "committing", "committed"])
def test_an_overwrite_of_a_path(point, interrupt, tmp_path, monkeypatch):
    """The old value or the new one is there, whole, and the next save replaces it."""
    path = tmp_path / "best"
    ckpt.save(path, state(0))
    moment, when = POINTS[point]
    seams.at(monkeypatch, moment, **{when: interrupt})
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        ckpt.save(path, state(1), overwrite=True)
    found = ckpt.load(path)
    assert same(found, found["n"]) and found["n"] in (0, 1)
    in_time(lambda: ckpt.save(path, state(2), overwrite=True))
    assert same(ckpt.load(path), 2) and ckpt.verify(path).ok


def test_an_object_that_is_asked_for_its_state(interrupt, tmp_path):
    counter = Counter()
    with ckpt.Checkpointer(tmp_path) as run:
        counter.asked = interrupt
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run.save(0, state=state(0), counter=counter)
        counter.value = 0
        assert in_time(lambda: run.save(0, state=state(0), counter=counter))
    check(tmp_path, 0)


WAITS: dict[str, Callable[[ckpt.Checkpointer], None]] = {
    "wait_until_finished": lambda run: run.wait_until_finished(),
    "close": lambda run: run.close(),
    "__exit__": lambda run: run.__exit__(None, None, None),
}


@pytest.mark.parametrize("call", WAITS)
def test_a_wait_for_a_save(call, interrupt, tmp_path, monkeypatch):
    """It changes nothing: the save goes on, and can be waited for again."""
    interrupt.call, counter = call, Counter()
    counter.value = 0
    seams.at(monkeypatch, "record", before=interrupt)
    run = ckpt.Checkpointer(tmp_path)
    run.save(0, state=state(0), counter=counter)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        WAITS[call](run)
    interrupt.heard.set()
    in_time(run.wait_until_finished)
    in_time(run.close)
    check(tmp_path, 0)


def reading(patch: pytest.MonkeyPatch, act: Callable[..., None]) -> None:
    """Acts when the first bytes of data are read."""
    read = os.preadv

    def acting(*arguments: Any) -> int:
        act()
        return read(*arguments)

    patch.setattr(os, "preadv", acting)


@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_result(kind, interrupt, tmp_path, monkeypatch):
    interrupt.call = "result"
    if kind == "save":
        seams.at(monkeypatch, "record", before=interrupt)
        pending: Any = ckpt.save_async(tmp_path / "a", state(1))
    else:
        ckpt.save(tmp_path / "a", state(1))
        reading(monkeypatch, interrupt)
        pending = ckpt.load_async(tmp_path / "a")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        pending.result()
    interrupt.heard.set()
    value = in_time(pending.result)
    assert same(ckpt.load(tmp_path / "a") if kind == "save" else value, 1)


@pytest.mark.parametrize("phase", ["reading", "setting"])
def test_a_restore(phase, interrupt, tmp_path, monkeypatch):
    """No step is passed over; ``restore`` again gets all, and then training goes on."""
    train(tmp_path)
    counter, interrupt.call = Counter(), "restore_latest"
    interrupt.heard.set()  # the call waits for those that read
    with ckpt.Checkpointer(tmp_path) as run:
        with monkeypatch.context() as patch:
            counter.given = interrupt if phase == "setting" else lambda: None
            if phase == "reading":
                reading(patch, interrupt)
            with pytest.raises((KeyboardInterrupt, SystemExit)):
                run.restore_latest(state=state(9), counter=counter)
        found = in_time(lambda: run.restore_latest(state=state(9), counter=counter))
        assert found.step == counter.value == LAST and same(found["state"], LAST)
        assert in_time(lambda: run.save(LAST + 1, state=state(LAST + 1), counter=counter))
    assert ckpt.Checkpointer(tmp_path, read_only=True).latest_step() == LAST + 1


WHILE_A_THREAD_STARTS = """
import os, signal, sys, threading
import numpy as np
import ckpt_core as ckpt

path, waits, plain = sys.argv[1], [], threading.Event.wait
ckpt.save(path + "/first", {"a": np.ones(3)})

def wait(self, timeout=None):
    found = plain(self, timeout)
    if timeout is None and threading.current_thread() is threading.main_thread():
        waits.append(1)
        if len(waits) == 2:
            os.kill(os.getpid(), signal.SIGINT)
    return found

threading.Event.wait = wait
try:
    ckpt.save(path + "/second", {f"a{i}": np.zeros(70 << 20, np.uint8) for i in range(6)})
except KeyboardInterrupt:
    print(os.listdir(path))
"""


def test_an_interrupt_while_a_thread_starts(tmp_path):
    done = forked.run(WHILE_A_THREAD_STARTS, str(tmp_path), environment=environment())
    assert done.stdout == "['first']\n", done.stderr
