"""Saves in the background, from threads, at exit and around a fork."""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import forked, seams
from tests.support.children import environment

QUICK = ckpt.Options(durable=False)
LONG_SECS = 60


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[seams.Gate]:
    """Holds every commit."""
    made = seams.Gate()
    seams.at(monkeypatch, "commit", before=made)
    yield made
    made.go.set()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")


def soon(gate: seams.Gate) -> None:
    """Opens the gate while the caller waits."""
    threading.Timer(0.1, gate.go.set).start()


def test_pending_save(path, gate):
    pending = ckpt.save_async(path, {"n": 1}, options=QUICK)
    assert isinstance(pending, ckpt.PendingSave) and pending.path == path
    assert gate.entered.wait(LONG_SECS) and not pending.done()
    with pytest.raises(TimeoutError, match="it goes on") as caught:
        pending.result(timeout_secs=0.05)
    assert path in str(caught.value) and not os.path.exists(path)
    gate.go.set()
    pending.result(timeout_secs=LONG_SECS)
    assert pending.done() and ckpt.verify(path).ok
    pending.result()  # as often as one likes


def test_pending_save_fails(path, gate):
    gate.error = PermissionError(13, "not here")
    pending = ckpt.save_async(path, {"n": 1}, options=QUICK)
    gate.go.set()
    with pytest.raises(PermissionError, match="not here") as caught:
        pending.result()
    assert caught.value is gate.error and pending.done()
    assert os.listdir(os.path.dirname(path)) == []


def test_what_can_be_refused_at_once_is(path):
    with pytest.raises(ckpt.UnsupportedLeaf):
        ckpt.save_async(path, {"bad": object()})
    ckpt.save(path, {"n": 1}, options=QUICK)
    with pytest.raises(ckpt.CheckpointExists):
        ckpt.save_async(path, {"n": 2})
    assert ckpt.load(path) == {"n": 1}


def test_someone_else_commits_meanwhile(path, gate):
    pending = ckpt.save_async(path, {"n": 1}, options=QUICK)
    assert gate.entered.wait(LONG_SECS)
    os.makedirs(f"{path}/theirs")
    gate.go.set()
    with pytest.raises(ckpt.CheckpointExists):
        pending.result()
    assert os.listdir(path) == ["theirs"] and os.listdir(os.path.dirname(path)) == ["checkpoint"]


def test_load_async(path, monkeypatch):
    state = {"w": jnp.arange(5.0), "n": 3}
    ckpt.save(path, state, options=QUICK)
    monkeypatch.chdir(os.path.dirname(path))
    pending = ckpt.load_async("checkpoint", {"w": jnp.zeros(5), "n": 0})
    monkeypatch.chdir("/")
    assert isinstance(pending, ckpt.PendingLoad) and pending.path == path
    loaded = pending.result(timeout_secs=LONG_SECS)
    assert loaded["n"] == 3 and (loaded["w"] == state["w"]).all() and pending.done()
    assert pending.result() is loaded
    assert set(ckpt.load_async(path, only="n").result()) == {"n"}


def test_load_async_fails(path):
    with pytest.raises(ckpt.CheckpointNotFound):
        ckpt.load_async(path).result()
    ckpt.save(path, {"n": 3}, options=QUICK)
    with pytest.raises(ckpt.StructureMismatch):
        ckpt.load_async(path, {"m": 0}).result()
    with pytest.raises(TypeError):
        ckpt.load_async(path, nonsense=1).result()


class Refusal(OSError):
    """A type of its own, so that a test sees whether it is kept."""


ASKING: dict[str, Callable[[ckpt.Checkpointer], Any]] = {
    "save": lambda checkpointer: checkpointer.save(1, {"n": 1}),
    "a save that is not due": lambda checkpointer: checkpointer.save(3, {"n": 3}),
    "the same step": lambda checkpointer: checkpointer.save(0, {"n": 0}),
    "wait_until_finished": lambda checkpointer: checkpointer.wait_until_finished(),
    "close": lambda checkpointer: checkpointer.close(),
    "restore_latest": lambda checkpointer: checkpointer.restore_latest(state={"n": 0}),
    "rollback_to": lambda checkpointer: checkpointer.rollback_to(0),
}


@pytest.mark.parametrize("first", ASKING)
def test_a_failure_is_raised_once_by_the_first_that_asks(path, gate, first):
    policy = ckpt.when.at_steps([0, 1, 2])
    checkpointer = ckpt.Checkpointer(path, save_policy=policy, options=QUICK)
    before = threading.enumerate()
    gate.error = Refusal(28, "the disk is full")
    assert checkpointer.save(0, {"n": 0}) is True
    assert gate.entered.wait(LONG_SECS)
    begun = [one for one in threading.enumerate() if one not in before and one.name == "ckpt-save"]
    gate.go.set()
    assert begun, "save() asks only once it has ended"
    for thread in begun:
        thread.join(LONG_SECS)
    with pytest.raises(Refusal, match="the disk is full") as caught:
        ASKING[first](checkpointer)
    assert caught.value is gate.error
    assert caught.value.__notes__ == [f"while saving step 0 to {path} in the background"]
    gate.error = None
    if first != "close":
        checkpointer.wait_until_finished()
        assert checkpointer.restore_latest(state={"n": 0}) is None
        assert checkpointer.save(0, {"n": 0}) is True
    checkpointer.close()
    assert checkpointer.all_steps() == ([] if first == "close" else [0])


def test_a_failure_is_raised_when_the_next_save_waited_for_it(path, gate):
    with ckpt.Checkpointer(path, options=QUICK) as checkpointer:
        gate.error = Refusal(28, "the disk is full")
        checkpointer.save(0, {"n": 0})
        soon(gate)
        with pytest.raises(Refusal, match="the disk is full"):
            checkpointer.save(1, {"n": 1})
        gate.error = None
        assert checkpointer.save(1, {"n": 1})
    assert checkpointer.all_steps() == [1]


def test_on_pending_wait(path, gate):
    with ckpt.Checkpointer(path, options=QUICK) as checkpointer:
        checkpointer.save(0, {"n": 0})
        assert gate.entered.wait(LONG_SECS)
        assert checkpointer.save(0, {"n": 9}) is False  # it is on its way
        assert checkpointer.all_steps() == []
        soon(gate)
        assert checkpointer.save(1, {"n": 1}) is True
        assert 0 in checkpointer.all_steps()  # one at a time
    assert checkpointer.all_steps() == [0, 1] and checkpointer.load(0) == {"n": 0}


def test_delete_waits_for_the_save(path, gate):
    with ckpt.Checkpointer(path, options=QUICK) as checkpointer:
        checkpointer.save(0, {"n": 0})
        assert gate.entered.wait(LONG_SECS)
        soon(gate)
        checkpointer.delete(0)
    assert checkpointer.all_steps() == []


def test_on_pending_fail(path, gate):
    options = ckpt.Options(durable=False, on_pending="fail")
    with ckpt.Checkpointer(path, options=options) as checkpointer:
        checkpointer.save(0, {"n": 0})
        assert gate.entered.wait(LONG_SECS)
        told = r"save of step 0 is still running, and Options\(on_pending='fail'\) does not wait"
        with pytest.raises(ckpt.CheckpointError, match=told):
            checkpointer.save(1, {"n": 1})
        gate.go.set()
        checkpointer.wait_until_finished()
        assert checkpointer.save(1, {"n": 1}) is True
    assert checkpointer.all_steps() == [0, 1]


def test_continuously_saves_when_it_can(path, gate):
    policy = ckpt.when.continuously()
    with ckpt.Checkpointer(path, save_policy=policy, options=QUICK) as checkpointer:
        assert checkpointer.save(0, {"n": 0}) is True
        assert gate.entered.wait(LONG_SECS)
        assert [checkpointer.save(step, {"n": step}) for step in (1, 2, 3)] == [False] * 3
        gate.go.set()
        checkpointer.wait_until_finished()
        assert checkpointer.save(4, {"n": 4}) is True
    assert checkpointer.all_steps() == [0, 4]


CHILD = """
import json, os, sys
import numpy as np
import ckpt_core as ckpt
from tests.support import seams

path = sys.argv[1]
base = os.getpriority(os.PRIO_PROCESS, 0)
told = {}

def look(*_):
    told.setdefault(now, set()).add(os.getpriority(os.PRIO_PROCESS, 0) - base)

seams.at(None, "commit", before=look)
for priority in ("normal", "low"):
    options = ckpt.Options(background_priority=priority)
    for way in ("save", "save_async", "Checkpointer"):
        now = f"{priority} {way}"
        state = {"w": np.zeros(2**20, np.float32)}
        if way == "save":
            ckpt.save(f"{path}/{now}", state, options=options)
        elif way == "save_async":
            ckpt.save_async(f"{path}/{now}", state, options=options).result()
        else:
            with ckpt.Checkpointer(f"{path}/{now}", options=options) as run:
                run.save(0, state)
told = {name: list(found) for name, found in told.items()}
print(json.dumps([told, os.getpriority(os.PRIO_PROCESS, 0) - base, 19 - base]))
"""


@pytest.mark.linux("threads have priorities of their own")
def test_only_the_threads_of_a_background_save_give_way(tmp_path):
    done = forked.run(CHILD, str(tmp_path), environment=environment())
    assert done.returncode == 0, done.stderr
    told, caller, low = json.loads(done.stdout)
    assert caller == 0
    assert told.pop("low save_async") == told.pop("low Checkpointer") == [low]
    assert len(told) == 4 and all(found == [0] for found in told.values())


def wait_for(condition: Any, secs: float = 60.0) -> None:
    end = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_save_that_hangs_says_where(tmp_path, monkeypatch, caplog):
    gate, told = seams.Gate(), []
    seams.at(monkeypatch, "record", before=gate)

    def listen(event: ckpt.Event) -> None:
        if event.kind == "slow":
            told.append(event)
            raise SystemExit if len(told) % 2 else ValueError("a listener")  # which ends no report

    options = ckpt.Options(report_secs=0.05, on_event=listen)
    caplog.set_level(logging.WARNING, "ckpt_core")
    with ckpt.Checkpointer(tmp_path, options=options) as run:
        run.save(3, {"w": jnp.ones(1000)})
        wait_for(lambda: len(told) > 6)
        gate.go.set()
        run.wait_until_finished()
        count = len(told)
    assert told[-1].step == 3 and told[-1].phase
    assert told[-1].secs > told[0].secs > 0
    assert "save of" in caplog.text and "has taken" in caplog.text
    stacks = [line for line in caplog.messages if "its threads are at" in line]
    assert len(stacks) == 1 and "self.go.wait(" in stacks[0]
    time.sleep(0.2)
    assert len(told) == count, "it has ended"


def test_quick_work_is_not_reported(tmp_path):
    events: list[Any] = []
    options = ckpt.Options(on_event=events.append)
    ckpt.save(tmp_path / "a", {"w": np.ones(3)}, options=options)
    ckpt.load(tmp_path / "a", options=options)
    assert events and "slow" not in [event.kind for event in events]


PRELUDE = """
import os, sys, time
import numpy as np
import ckpt_core as ckpt
from tests.support import seams
failing = seams.fail(OSError, 28, "the disk is full")
path = sys.argv[1]
def begin(how):
    if "Checkpointer" in how:
        return ckpt.Checkpointer(path).save(0, {"w": np.arange(5000)})
    return ckpt.save_async(path + "/0", {"w": np.arange(5000)})
"""


def run(code: str, path: Path) -> forked.Done:
    return forked.run(PRELUDE + code, str(path), environment=environment(), timeout_secs=120)


@pytest.mark.parametrize(
    "how", ["goes well", "Checkpointer", "exception", "fails", "Checkpointer fails"]
)
def test_exit_waits_for_a_save_and_tells_of_its_failure(tmp_path, how):
    path = tmp_path / "c"
    ended = run(
        f"""
seams.at(None, "commit", before=failing if "fails" in {how!r} else lambda *_: time.sleep(0.3))
pending = begin({how!r})
assert "fails" in {how!r} or not os.path.exists(path + "/0")
if {how!r} == "exception":
    raise SystemExit(3)
print("done")
""",
        path,
    )
    if "fails" in how:
        assert ended.returncode == 1 and ended.stdout == "done\n"
        assert "was not saved" in ended.stderr and str(path) in ended.stderr
        assert "Traceback" in ended.stderr and "the disk is full" in ended.stderr
        assert not (path / "0").exists()
    else:
        assert (ended.returncode, ended.stderr) == (3 if how == "exception" else 0, "")
        assert ckpt.verify(path / "0").ok
        np.testing.assert_array_equal(ckpt.load(path / "0")["w"], np.arange(5000))


def test_what_was_asked_about_or_is_left_open_is_not_reported(tmp_path):
    ended = run(
        """
left_open = ckpt.Checkpointer(path + "/run", asynchronous=False)
left_open.save(0, {"n": 1})
seams.at(None, "commit", before=failing)
pending = begin("save_async")
try:
    pending.result()
except OSError:
    print("caught")
""",
        tmp_path / "c",
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "caught\n", "")


def test_a_forked_child_is_told(tmp_path):
    ended = run(
        """
import signal, warnings
warnings.simplefilter("ignore")  # jax warns of every fork
ckpt.save(path, {"n": 1})
def save(): ckpt.save(path + "-2", {"n": 1})
def save_async(): ckpt.save_async(path + "-2", {"n": 1}).result()
def load(): ckpt.load(path)
def load_async(): ckpt.load_async(path).result()
def restore(): ckpt.restore(path, state={"n": 0})
def inspect(): ckpt.inspect(path)
def verify(): ckpt.verify(path)
def checkpointer(): ckpt.Checkpointer(path + "-3").save(0, {"n": 1})
for call in (save, save_async, load, load_async, restore, inspect, verify, checkpointer):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            call()
        except ckpt.ForkedProcess as error:
            os._exit(7 if "spawn" in str(error) else 8)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(9)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 7, (call.__name__, code)
assert ckpt.load(path) == {"n": 1}  # the parent goes on
""",
        tmp_path / "c",
    )
    assert ended.returncode == 0, ended.stderr


def state_of(step: int) -> dict[str, Any]:
    return {f"w{n}": np.full(30_000, step * 100 + n, np.float64) for n in range(6)}


def is_state_of(step: int, loaded: Any) -> bool:
    wanted = state_of(step)
    return loaded.keys() == wanted.keys() and all((loaded[n] == wanted[n]).all() for n in wanted)


def all_at_once(*calls: Callable[[], None]) -> list[BaseException]:
    """Calls them in threads of their own that begin together; gives what they raised."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        start.wait(LONG_SECS)
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_SECS)
        assert not thread.is_alive()
    return raised


def test_saving_restoring_and_asking_at_once(tmp_path):
    with ckpt.Checkpointer(tmp_path, options=QUICK, max_to_keep=3) as checkpointer:
        checkpointer.save(0, state_of(0))

        def save() -> None:
            for step in range(1, 12):
                checkpointer.save(step, state_of(step))

        def restore() -> None:
            for _ in range(5):
                restored = checkpointer.restore_latest(state=state_of(0))
                assert restored is not None and is_state_of(restored.step, restored["state"])

        def ask() -> None:
            for _ in range(30):
                steps = checkpointer.all_steps()
                assert steps == sorted(steps)
                checkpointer.latest_step(), checkpointer.explain(), repr(checkpointer)
                checkpointer.wait_until_finished()

        checkpointer.wait_until_finished()
        assert all_at_once(save, restore, ask) == []
    assert checkpointer.all_steps() == [9, 10, 11]
    assert all(is_state_of(step, ckpt.load(tmp_path / str(step))) for step in (9, 10, 11))


def test_a_failure_is_raised_in_one_thread(tmp_path, monkeypatch):
    checkpointer = ckpt.Checkpointer(tmp_path, options=QUICK)
    for number in range(5):
        with monkeypatch.context() as now:
            seams.at(now, "record", before=seams.fail())
            checkpointer.save(number, {"n": number})
            raised = all_at_once(*[checkpointer.wait_until_finished] * 4)
        assert [type(error) for error in raised] == [OSError]
    checkpointer.close()


def test_saves_to_one_path(tmp_path):
    """One of them is there, and the others raise."""
    path, done = tmp_path / "a", []

    def save(number: int) -> None:
        ckpt.save(path, state_of(number), options=QUICK)
        done.append(number)

    raised = all_at_once(*[lambda number=number: save(number) for number in range(3)])
    assert len(done) == 1 and {type(error) for error in raised} == {ckpt.CheckpointExists}
    assert is_state_of(done[0], ckpt.load(path))
    assert os.listdir(tmp_path) == ["a"]


def test_a_call_from_within_a_call_is_refused(tmp_path):
    """A handler that saves, while a save is at work: to wait for it would be for ever. Between calls it may."""
    told: list[str] = []

    def handler(*_: Any) -> None:
        try:
            assert checkpointer.save(7, {"n": 7})
        except ckpt.CheckpointError as error:
            told.append(str(error))

    def policy(step: int, context: Any) -> bool:
        if step == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        return True

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with ckpt.Checkpointer(tmp_path, save_policy=policy, options=QUICK) as checkpointer:
            checkpointer.save(0, {"n": 0})
            checkpointer.save(1, {"n": 1})
            assert len(told) == 1 and "save()" in told[0] and "called from within" in told[0]
            os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(told) == 1 and checkpointer.all_steps() == [0, 1, 7]
