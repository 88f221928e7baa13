"""An exception from a signal handler at any moment: it comes out as it is, and nothing that was said is untrue.

Two ways to get one. ``AtMoment`` raises at the n-th place where CPython would run a handler: at the
entry of a Python function and after the call of a C one. ``by_signal`` has a real timer, for the waits
that lie inside of one C call.
"""

import contextlib
import functools
import gc
import logging
import os
import shutil
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
from ckpt_core._background import pending as pending_module
from ckpt_core._background.threads import Flag, Workers
from ckpt_core._platform import LINUX

# between open() and `with`, an exception leaves a file to be closed by the collector, which Python tells
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
QUICK = ckpt.Options(durable=False)
LONG_SECS = 60
ARRAYS, ELEMENTS = 6, 40_000


class Stop(Exception):
    """What a user's handler raises: a class that nobody here knows."""


def state_of(step: int) -> dict[str, Any]:
    return {f"w{n}": np.full(ELEMENTS, step * 100 + n, np.float64) for n in range(ARRAYS)}


def is_state_of(step: int, loaded: Any) -> bool:
    wanted = state_of(step)
    return loaded.keys() == wanted.keys() and all((loaded[n] == wanted[n]).all() for n in wanted)


class AtMoment:
    """Raises Stop at the n-th moment inside of the block, and counts how many there are.

    Not inside of ``logging``: that is the standard library's, and loses its locks itself.
    """

    def __init__(self, moment: int = -1, kind: type[Exception] = Stop) -> None:
        self.moment = moment
        self.kind = kind
        self.seen = 0
        self.raised_in = ""

    def _look(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename != logging.__file__:
            self.seen += 1
            if self.seen == self.moment:
                sys.setprofile(None)
                self.raised_in = f"{event} {frame.f_code.co_qualname}"
                raise self.kind

    def __enter__(self) -> "AtMoment":
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


@contextlib.contextmanager
def by_signal(delay_secs: float) -> Iterator[None]:
    """Raises Stop from a handler after a while, if the block is not over by then."""

    def handler(*_: Any) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, delay_secs)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- what is interrupted ------------------------------------------------------------------------


class Run:
    """A Checkpointer with the steps that it said are saved, and those it said to have begun."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.checkpointer = ckpt.Checkpointer(directory, options=QUICK)
        self.started: set[int] = set()

    def save(self, step: int) -> None:
        if self.checkpointer.save(step, state_of(step)):
            self.started.add(step)

    def check(self) -> None:
        """What was said to have started is there, all that is there is right, and it goes on."""
        self.checkpointer.wait_until_finished()
        for step in self.started:
            assert step in self.checkpointer.all_steps(), f"step {step} was acknowledged"
        newest = max([-1, *self.checkpointer.all_steps()])
        self.save(newest + 1)
        self.checkpointer.close()
        assert newest + 1 in self.checkpointer.all_steps()
        for step in self.checkpointer.all_steps():
            assert is_state_of(step, ckpt.load(self.directory / str(step))), f"step {step}"
        assert not [name for name in os.listdir(self.directory) if name.startswith(".ckpt-tmp")]


def while_waiting(run: Run, interrupt: Any) -> None:
    run.save(0)
    with interrupt:
        run.checkpointer.wait_until_finished()


def while_saving(run: Run, interrupt: Any) -> None:
    run.save(0)
    with interrupt:
        run.save(1)


def while_closing(run: Run, interrupt: Any) -> None:
    run.save(0)
    with interrupt:
        run.checkpointer.close()
    run.checkpointer.close()
    run.checkpointer = ckpt.Checkpointer(run.directory, options=QUICK)


def while_leaving(run: Run, interrupt: Any) -> None:
    with interrupt, run.checkpointer:
        run.save(0)
    run.checkpointer.close()
    run.checkpointer = ckpt.Checkpointer(run.directory, options=QUICK)


def while_restoring(run: Run, interrupt: Any) -> None:
    run.save(0)
    try:
        with interrupt:
            _restore(run)
    except Stop:
        # from the last moments on it counts as restored, and a save would say that nobody read it
        _restore(run)
        raise


def _restore(run: Run) -> None:
    restored = run.checkpointer.restore_latest(state=state_of(9))
    assert restored is not None and is_state_of(0, restored["state"])


def while_deleting(run: Run, interrupt: Any) -> None:
    run.save(0)
    run.save(1)
    with interrupt:
        run.started.discard(1)
        run.checkpointer.delete(1)


CALLS = [while_waiting, while_saving, while_closing, while_leaving, while_restoring, while_deleting]


def _interrupted(call: Callable[..., None], run: Run, interrupt: Any) -> bool:
    """Whether it was; any other exception than the handler's own is a failure of the test."""
    try:
        call(run, interrupt)
    except Stop:
        if run.checkpointer._run.closed:
            run.checkpointer.close()
            run.checkpointer = ckpt.Checkpointer(run.directory, options=QUICK)
        return True
    return False


def _moments_of(call: Callable[..., None], directory: Path) -> int:
    run, counting = Run(directory / "count"), AtMoment()
    call(run, counting)
    run.check()
    return counting.seen


def _sample(total: int, count: int) -> list[int]:
    """Moments from the first to the last, closer together near the beginning."""
    return sorted({1 + round((total - 1) * (n / (count - 1)) ** 2) for n in range(count)})


@pytest.mark.parametrize("call", CALLS)
def test_an_exception_at_many_moments(call: Callable[..., None], tmp_path: Path) -> None:
    _sweep(call, tmp_path, 25)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_an_exception_at_every_moment(call: Callable[..., None], tmp_path: Path) -> None:
    _sweep(call, tmp_path, 100_000)


def _sweep(call: Callable[..., None], directory: Path, count: int) -> None:
    total, interruptions = _moments_of(call, directory), 0
    moments = range(1, total + 1) if total <= count else _sample(total, count)
    for moment in moments:
        run = Run(directory / str(moment))
        interruptions += _interrupted(call, run, AtMoment(moment))
        run.check()
        shutil.rmtree(run.directory)  # thousands of them would fill the disk
    # a wait makes more calls or fewer, as the other thread is slow or fast
    assert interruptions >= 3
    assert not [one for one in pending_module._unfinished if str(directory) in one.path]


@pytest.mark.parametrize("call", CALLS)
def test_a_signal_at_many_moments(call: Callable[..., None], tmp_path: Path) -> None:
    for number in range(16):
        run = Run(tmp_path / str(number))
        _interrupted(call, run, by_signal(0.0005 + 0.0015 * number))
        run.check()
    assert not pending_module._unfinished


# ---- functions ----------------------------------------------------------------------------------


def test_a_save_that_blocks_is_there_or_not(tmp_path: Path) -> None:
    """Also where TensorStore waits: it makes errors of its own of whatever is raised meanwhile."""
    classes = set()
    for number in range(30):
        path = tmp_path / str(number)
        try:
            with by_signal(0.0004 * (number + 1)):
                ckpt.save(path, state_of(3))
        except BaseException as error:
            classes.add(type(error))
        if path.exists():
            assert is_state_of(3, ckpt.load(path))
        else:
            ckpt.save(path, state_of(3), options=QUICK)
    assert classes <= {Stop}
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".ckpt-tmp")]


def _save_blocking(path: Path) -> None:
    ckpt.save(path, state_of(3))


def _write_in_parts(path: Path) -> None:
    with ckpt.writer(path) as writer:
        for name, values in state_of(3).items():
            writer.add("state", {name: values})


def _remove_hidden(directory: Path) -> bool:
    """Whether there was any."""
    hidden = [name for name in os.listdir(directory) if name.startswith(".ckpt-")]
    for name in hidden:
        shutil.rmtree(directory / name)
    return bool(hidden)


def _replace(path: Path) -> None:
    ckpt.save(path, state_of(3), overwrite=True)


@pytest.mark.parametrize("call", [_save_blocking, _write_in_parts])
@pytest.mark.parametrize(
    "every", [12, pytest.param(1, marks=[pytest.mark.faults, pytest.mark.slow])]
)
def test_nothing_remains_of_a_call_that_did_not_save(
    every: int, call: Callable[[Path], None], tmp_path: Path
) -> None:
    """At every ``every``-th moment: a gap in which an attempt is left behind is longer than that."""
    call(tmp_path / "imports")
    with AtMoment() as counted:
        call(tmp_path / "count")
    assert counted.seen > 1000
    for moment in range(1, counted.seen + 1, every):
        path = tmp_path / str(moment)
        at = AtMoment(moment)
        with contextlib.suppress(Stop), at:
            call(path)
        if at.raised_in == "call CheckpointWriter.__exit__":  # Python has not run a line of it
            _remove_hidden(tmp_path)
            continue
        hidden = [name for name in os.listdir(tmp_path) if name.startswith(".ckpt-")]
        assert hidden == [], f"moment {moment}, {at.raised_in}"
        if path.exists():
            loaded = ckpt.load(path)
            assert is_state_of(3, loaded.get("state", loaded))
            shutil.rmtree(path)


@pytest.mark.parametrize("every", [36, pytest.param(18, marks=pytest.mark.slow)])
def test_a_replacement_at_many_moments(every: int, tmp_path: Path) -> None:
    path = tmp_path / "replaced"
    _replace(path)
    with AtMoment() as counted:
        _replace(path)
    left_behind = 0
    for moment in range(1, counted.seen + 1, every):
        ckpt.save(path, state_of(2), overwrite=True, options=QUICK)
        with contextlib.suppress(Stop), AtMoment(moment):
            _replace(path)
        loaded = ckpt.load(path)
        assert is_state_of(2, loaded) or is_state_of(3, loaded)
        left_behind += _remove_hidden(tmp_path)
    # about 20 moments lie between the commit and the first deletion, and more between two renames where the system
    # swaps no directories; `gc` finds what is left then
    assert left_behind <= (72 if LINUX else 144) // every


def test_a_user_class_is_not_made_ours_while_arrays_are_written(
    tmp_path: Path, monkeypatch
) -> None:
    """A wait for TensorStore that is certain to be interrupted."""
    from ckpt_core._storage import writer

    waited = []

    class Slow:
        def __init__(self, future: Any) -> None:
            self.future = future

        def exception(self, timeout: float | None = None) -> Any:
            waited.append(1)
            raise Stop

        result = exception

    monkeypatch.setattr(
        writer.ArrayWriter, "start", lambda self: self._committing.append((Slow(None), 0))
    )
    with pytest.raises(Stop):
        ckpt.save(tmp_path / "a", state_of(0))
    assert waited and os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["save", "load"])
def test_results_are_waited_for_again(kind: str, tmp_path: Path) -> None:
    ckpt.save(tmp_path / "saved", state_of(4), options=QUICK)
    for number in range(20):
        if kind == "save":
            pending = ckpt.save_async(tmp_path / str(number), state_of(4), options=QUICK)
        else:
            pending = ckpt.load_async(tmp_path / "saved")
        with contextlib.suppress(Stop), by_signal(0.0003 * (number + 1)):
            pending.result()
        value = pending.result(LONG_SECS)
        path = tmp_path / ("saved" if kind == "load" else str(number))
        assert is_state_of(4, ckpt.load(path) if kind == "save" else value)


def test_beginning_in_the_background_at_every_moment(tmp_path: Path) -> None:
    """The call raises, and then the save goes on or never was; its room is given back."""
    with AtMoment() as counted:
        ckpt.save_async(tmp_path / "count", state_of(0), options=QUICK).result()
    for moment in _sample(counted.seen, 60):
        path, pending = tmp_path / str(moment), None
        with contextlib.suppress(Stop), AtMoment(moment):
            pending = ckpt.save_async(path, state_of(5), options=QUICK)
        if pending is not None:
            pending.result()
        for running in list(pending_module._unfinished):
            assert running.wait(LONG_SECS)
        assert pending is None or path.exists()
        assert not path.exists() or is_state_of(5, ckpt.load(path))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".ckpt-tmp")]


class _Handler:
    def __call__(self, *_: Any) -> None:
        raise Stop

    def method(self, *_: Any) -> None:
        raise Stop


def _handler(*_: Any) -> None:
    raise Stop


@pytest.mark.parametrize(
    "handler",
    [_handler, _Handler(), _Handler().method, functools.partial(_handler, 1)],
    ids=["function", "object", "method", "partial"],
)
def test_what_a_handler_raises_within_a_listener_is_not_the_listeners(
    handler: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Stop):
            ckpt.save(
                tmp_path / "a",
                {"n": 1},
                options=ckpt.Options(on_event=lambda _: os.kill(os.getpid(), signal.SIGUSR1)),
            )
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not caplog.records
    ckpt.save(tmp_path / "b", {"n": 1}, options=ckpt.Options(on_event=_handler))
    assert "raised at save_started" in caplog.text and ckpt.load(tmp_path / "b") == {"n": 1}


# ---- the flag -----------------------------------------------------------------------------------


def test_a_wait_that_lost_the_lock_still_ends() -> None:
    """An exception between taking the lock and giving it back leaves it taken: the flag counts."""
    flag = Flag()
    waiting = threading.Thread(target=flag.wait)
    waiting.start()
    flag.set()
    assert flag._lock.acquire(timeout=LONG_SECS)  # and never given back
    waiting.join(LONG_SECS)
    assert not waiting.is_alive() and flag.wait(0) and flag.wait()


def test_a_wait_that_was_interrupted_says_nothing_untrue() -> None:
    flag = Flag()
    for number in range(5):
        with pytest.raises(Stop), by_signal(0.001 * (number + 1)):
            flag.wait(LONG_SECS)
        assert not flag.is_set and not flag.wait(0.001)
    flag.set()
    assert flag.wait(0)


def test_a_save_does_not_wait_for_itself(tmp_path: Path) -> None:
    """A listener runs in the thread of the save: what it calls is refused, and not waited for."""
    refused: list[BaseException] = []

    def listen(event: Any) -> None:
        if event.kind != "committed":
            return
        for call in (
            checkpointer.wait_until_finished,
            lambda: checkpointer.save(1, {"n": 1}),
            lambda: checkpointer.delete(0),
            checkpointer.close,
        ):
            try:
                call()
            except ckpt.CheckpointError as error:
                refused.append(error)

    options = ckpt.Options(durable=False, on_event=listen)
    with ckpt.Checkpointer(tmp_path, options=options) as checkpointer:
        checkpointer.save(0, {"n": 0})
    told = list(map(str, refused))
    assert len(told) == 4 and all("wait for itself" in text or "deadlock" in text for text in told)
    assert checkpointer.all_steps() == [0]


# ---- worker threads -----------------------------------------------------------------------------


@pytest.mark.parametrize("moment", range(1, 40))
def test_workers_that_are_interrupted_end(moment: int) -> None:
    """Nobody waits for threads that never began, and those that did begin end."""
    done: list[int] = []

    def ours() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name.startswith("ckpt-test")]

    def work() -> None:
        with AtMoment(moment), Workers(3, "ckpt-test") as workers:
            jobs = [workers.submit(lambda n=n: done.append(n)) for n in range(4)]
            for job in jobs:
                job.result()

    gc.collect()  # what other tests have left is not to be collected, and interrupted, in here
    gc.disable()
    try:
        with contextlib.suppress(Stop):
            work()
    finally:
        gc.enable()
    until = time.monotonic() + LONG_SECS
    while ours() and time.monotonic() < until:
        time.sleep(0.01)
    assert not ours()


# ---- what looks like damage ---------------------------------------------------------------------


class StopValue(ValueError):
    """Handlers raise what they like: this one looks as if a file could not be parsed."""


class StopRuntime(RuntimeError):
    """As ``StopValue``."""


LIKE_DAMAGE: list[type[Exception]] = [StopValue, StopRuntime, TimeoutError, KeyError]


@pytest.mark.parametrize("kind", LIKE_DAMAGE)
@pytest.mark.parametrize("written_by", ["ckpt", "orbax", "compressed", "local"])
def test_what_a_handler_raises_is_no_damage(
    kind: type[Exception], written_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is passed over, and the exception comes out as it is, wherever in a restore it was raised."""
    if written_by == "orbax":
        ocp = pytest.importorskip("orbax.checkpoint")
        with ocp.CheckpointManager(tmp_path / "run") as manager:
            for step in (0, 1):
                manager.save(step, args=ocp.args.StandardSave(state_of(step)))
        name = "default"
    else:
        options = ckpt.Options(compression="zstd" if written_by == "compressed" else None)
        local = tmp_path / "local" if written_by == "local" else None
        with ckpt.Checkpointer(
            tmp_path / "run", local_directory=local, options=options
        ) as checkpointer:
            for step in (0, 1):
                checkpointer.save(step, state_of(step))
        name = "state"
    moment, ended = 1, 0
    local = tmp_path / "local" if written_by == "local" else None
    checkpointer = ckpt.Checkpointer(tmp_path / "run", read_only=True, local_directory=local)
    while ended < 2:
        interrupt = AtMoment(moment, kind)
        restored = None
        with contextlib.suppress(kind), interrupt:
            restored = checkpointer.restore_latest(items={name: state_of(9)})
        assert restored is None or restored.step == 1
        ended += interrupt.seen < moment
        moment = int(moment * 1.25) + 1
