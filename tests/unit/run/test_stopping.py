"""Being asked to stop, and being replaced: SIGTERM, and the fence against an older writer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._run import preemption
from tests.support import forked
from tests.support.children import environment
from tests.support.paths import ROOT
from tests.support.takeovers import make_directory  # noqa: F401 (fixtures)


def in_new_process(code: str, *arguments: str) -> forked.Done:
    """Runs code that signals may end."""
    return forked.run(code, *arguments, environment=environment(), timeout_secs=60)


def test_the_older_writer_is_fenced(directory: str) -> None:
    old = ckpt.Checkpointer(directory, asynchronous=False)
    old.save(1, {"w": np.ones(2)})
    new = ckpt.Checkpointer(directory, asynchronous=False)
    new.save(2, {"w": np.full(2, 2.0)})
    with pytest.raises(ckpt.CheckpointError, match="another Checkpointer"):
        old.save(3, {"w": np.full(2, 3.0)})
    assert new.all_steps() == [1, 2]
    assert new.save(3, {"w": np.full(2, 4.0)})
    assert new.load(3)["w"][0] == 4.0


def test_a_closed_checkpointer_takes_the_directory_from_nobody(directory: str) -> None:
    with ckpt.Checkpointer(directory) as tool:
        tool.save(0, {"n": 0})
    with ckpt.Checkpointer(directory) as trainer:
        assert trainer.restore_latest({"n": 9}).state["n"] == 0
        closed = ckpt.Checkpointer(directory)
        closed.close()
        assert closed.restore(0, {"n": 9}).state["n"] == 0
        assert trainer.save(1, {"n": 1})


def test_the_fence_reaches_a_save_that_is_under_way(directory: str) -> None:
    old = ckpt.Checkpointer(directory)
    old.save(1, {"w": np.ones(2)})
    old.wait_until_finished()
    ckpt.Checkpointer(directory, asynchronous=False).save(2, {"w": np.ones(2)})

    # a newcomer's steps are seen at once; a store refuses too, where it would begin by deleting
    def save() -> None:
        old.save(3, {"w": np.ones(2)})
        old.wait_until_finished()

    with pytest.raises(ckpt.CheckpointError, match="another Checkpointer"):
        save()
    assert old.all_steps() == [1, 2]


def test_sigterm_is_noticed_and_passed_on(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with ckpt.Checkpointer(tmp_path) as checkpointer:
            assert not checkpointer.should_stop
            signal.raise_signal(signal.SIGTERM)
            assert checkpointer.should_stop
            assert checkpointer.reached_preemption(3)
        assert heard == [signal.SIGTERM]
        signal.raise_signal(signal.SIGTERM)  # closed: the earlier handler is back
        assert heard == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_nothing_listens_before_it_is_asked(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ckpt.Checkpointer(tmp_path):
        assert signal.getsignal(signal.SIGTERM) == before


def test_the_policy_saves_the_last_step(tmp_path: Path) -> None:
    policy = ckpt.when.every_steps(100) | ckpt.when.preempted()
    before = signal.getsignal(signal.SIGTERM)
    with ckpt.Checkpointer(tmp_path, save_policy=policy, asynchronous=False) as checkpointer:
        assert not checkpointer.save(1, {"w": np.ones(2)})
        signal.raise_signal(signal.SIGTERM)
        assert checkpointer.save(2, {"w": np.ones(2)})
    assert signal.getsignal(signal.SIGTERM) == before
    assert ckpt.Checkpointer(tmp_path).all_steps() == [2]


def test_a_signal_right_after_a_step_was_declined(tmp_path: Path, monkeypatch: Any) -> None:
    """A loop that stops there would lose that step: it does one more, which is saved."""

    def comes_late(step: int, _: Any) -> bool:
        if step == 1:
            signal.raise_signal(signal.SIGTERM)
        return False

    policy = ckpt.when.preempted() | comes_late
    with ckpt.Checkpointer(tmp_path / "a", save_policy=policy) as checkpointer:
        for step in range(9):
            checkpointer.save(step, {"w": np.ones(2)})
            if checkpointer.should_stop:
                break
    assert ckpt.Checkpointer(tmp_path / "a").all_steps() == [step] == [2]
    # a loop that does not ask the policy again is not kept from stopping
    with ckpt.Checkpointer(tmp_path / "b", save_policy=policy) as checkpointer:
        assert not checkpointer.save(1, {"w": np.ones(2)})
        assert not checkpointer.should_stop and not checkpointer.should_stop
        monkeypatch.setattr(preemption, "_NEXT_SAVE_SECS", 0.0)
        assert checkpointer.should_stop


OUT_OF_TURN = """
import signal, sys
import numpy as np
import ckpt_core as ckpt

policy = ckpt.when.every_steps(100) | ckpt.when.preempted()
first, second = (
    ckpt.Checkpointer(f"{sys.argv[1]}/{name}", save_policy=policy, asynchronous=False)
    for name in "ab"
)
first.close()
if sys.argv[2] == "after":
    second.close()
    second = ckpt.Checkpointer(f"{sys.argv[1]}/c", save_policy=policy, asynchronous=False)
signal.raise_signal(signal.SIGTERM)
assert second.save(2, {"w": np.ones(2)})
print("alive", flush=True)
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_that_was_closed_out_of_turn_does_not_end_the_run(tmp_path: Path, when: str) -> None:
    done = in_new_process(OUT_OF_TURN, str(tmp_path), when)
    assert done.stdout == "alive\n", done.stderr
    assert done.returncode == -signal.SIGTERM  # the second one ends the process as ever


LEFT_OPEN = """
import gc, signal, sys
gc.disable()
import numpy as np
import ckpt_core as ckpt

policy = ckpt.when.every_steps(100) | ckpt.when.preempted()
def opened(name):
    return ckpt.Checkpointer(f"{sys.argv[1]}/{name}", save_policy=policy, asynchronous=False)
left = opened("a")
signal.raise_signal(signal.SIGTERM)
assert left.should_stop
if sys.argv[2] == "dropped":
    del left
if sys.argv[2] == "chained":
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: before(number, frame))
with opened("b") as second:
    signal.raise_signal(signal.SIGTERM)
    assert second.save(2, {"w": np.ones(2)})
    print("alive", flush=True)
signal.raise_signal(signal.SIGTERM)
print("deaf", flush=True)
"""


@pytest.mark.parametrize("how", ["kept", "dropped", "chained"])
def test_one_that_was_left_open_does_not_end_the_run(tmp_path: Path, how: str) -> None:
    """It heard an earlier signal, so that this one is its second; not so for who asks now."""
    done = in_new_process(LEFT_OPEN, str(tmp_path), how)
    assert done.stdout == "alive\n", done.stderr
    assert done.returncode == -signal.SIGTERM


def test_one_that_was_dropped_swallows_no_signal(tmp_path: Path) -> None:
    code = """
import gc, signal, sys, time
gc.disable()
import ckpt_core as ckpt
assert not ckpt.Checkpointer(sys.argv[1]).should_stop  # collecting garbage must not be needed
signal.raise_signal(signal.SIGTERM)
print("deaf", flush=True)
"""
    done = in_new_process(code, str(tmp_path / "run"))
    assert (done.stdout, done.returncode) == ("", -signal.SIGTERM)


LOOP = """
import sys, time
import numpy as np
import ckpt_core as ckpt
with ckpt.Checkpointer(sys.argv[1], save_policy=ckpt.when.preempted()) as checkpointer:
    print("ready", flush=True)
    for step in range(10_000):
        time.sleep(0.01)
        checkpointer.save(step, {"step": step})
        if checkpointer.should_stop:
            break
sys.exit(3)
"""


def test_a_run_that_is_told_to_stop_saves_and_ends(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 3
    finally:
        process.kill()
        process.communicate()
    (step,) = ckpt.Checkpointer(tmp_path / "run").all_steps()
    assert ckpt.load(tmp_path / "run" / str(step)) == {"step": step}


def test_sigusr1_on_request(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        options = ckpt.Options(stop_signals=("SIGTERM", "SIGUSR1"))
        with ckpt.Checkpointer(tmp_path, options=options) as checkpointer:
            assert not checkpointer.should_stop
            signal.raise_signal(signal.SIGUSR1)
            assert checkpointer.should_stop
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("name", ["TERM", "SIGNOTHING", "", "SIG_DFL", "SIGKILL"])
def test_signals_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="stop_signals"):
        ckpt.Options(stop_signals=(name,))


class Slow:
    """A listener that holds the save back until it is told to go on."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, event: ckpt.Event) -> None:
        # in the background thread, before the step is acknowledged
        if event.kind == "committed":
            assert self.go.wait(60)


@pytest.mark.parametrize("enough", [True, False])
def test_the_grace_period(tmp_path: Path, enough: bool) -> None:
    slow = Slow()
    options = ckpt.Options(grace_secs=30 if enough else 0.05, on_event=slow)
    checkpointer = ckpt.Checkpointer(tmp_path, options=options)
    assert not checkpointer.should_stop
    checkpointer.save(1, {"w": np.ones(2)})
    signal.raise_signal(signal.SIGTERM)
    assert checkpointer.should_stop
    if enough:
        slow.go.set()
        checkpointer.close()
        return
    with pytest.raises(ckpt.GraceExceeded, match="step 1 did not end within the grace period"):
        checkpointer.close()
    slow.go.set()
    assert checkpointer._run._persistent._now is not None
    assert checkpointer._run._persistent._now[0].wait(60)  # it went on meanwhile
    checkpointer.wait_until_finished()
    assert checkpointer.all_steps() == [1]


def test_the_grace_period_begins_while_it_waits(tmp_path: Path) -> None:
    slow = Slow()
    options = ckpt.Options(grace_secs=0.05, on_event=slow)
    checkpointer = ckpt.Checkpointer(tmp_path, options=options)
    assert not checkpointer.should_stop
    checkpointer.save(1, {"w": np.ones(2)})
    told = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    otherwise = threading.Timer(20, slow.go.set)
    told.start()
    otherwise.start()
    try:
        with pytest.raises(ckpt.GraceExceeded, match="step 1 did not end within"):
            checkpointer.wait_until_finished()
    finally:
        otherwise.cancel()
        slow.go.set()
    checkpointer._run.preemption._signal.noticed_at = None
    checkpointer.close()
    assert checkpointer.all_steps() == [1]


def test_without_a_signal_there_is_no_limit(tmp_path: Path) -> None:
    slow = Slow()
    options = ckpt.Options(grace_secs=0.0, on_event=slow)
    with ckpt.Checkpointer(tmp_path, options=options) as checkpointer:
        checkpointer.save(1, {"w": np.ones(2)})
        threading.Timer(0.2, slow.go.set).start()
    assert checkpointer.all_steps() == [1]


def test_taking_over_from_a_living_writer_warns(tmp_path: Path, caplog: Any) -> None:
    old = ckpt.Checkpointer(tmp_path, asynchronous=False)
    old.save(1, {"w": np.ones(2)})
    assert caplog.text == ""
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as new:
        new.save(2, {"w": np.ones(2)})
        assert f"taken over from process {os.getpid()} on" in caplog.text
        assert "an earlier Checkpointer of this process, not closed" in caplog.text
        told = rf"another Checkpointer \(process {os.getpid()}"
        with pytest.raises(ckpt.CheckpointError, match=told):
            old.save(3, {"w": np.ones(2)})
    with pytest.raises(ckpt.CheckpointError, match="one that was closed since"):
        old.save(3, {"w": np.ones(2)})
    caplog.clear()
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as third:  # the last one was closed
        third.save(3, {"w": np.ones(2)})
    assert caplog.text == ""


def test_taking_over_from_a_killed_writer_needs_no_warning(tmp_path: Path, caplog: Any) -> None:
    code = (
        "import sys, os, signal, numpy as np, ckpt_core as ckpt\n"
        "c = ckpt.Checkpointer(sys.argv[1], asynchronous=False)\n"
        "c.save(1, {'w': np.ones(2)})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = in_new_process(code, str(tmp_path))
    assert done.returncode == -signal.SIGKILL
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(2, {"w": np.ones(2)})
    assert checkpointer.all_steps() == [1, 2]
    assert caplog.text == ""


def test_checkpointers_closed_in_any_order_leave_no_handler(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        first, second = ckpt.Checkpointer(tmp_path / "a"), ckpt.Checkpointer(tmp_path / "b")
        assert not first.should_stop
        assert not second.should_stop
        first.close()
        signal.raise_signal(signal.SIGTERM)
        assert second.should_stop
        assert heard == [signal.SIGTERM]
        second.close()
        signal.raise_signal(signal.SIGTERM)  # through the first's, which has long been closed
        assert heard == [signal.SIGTERM] * 2
        assert not first.should_stop
        signal.signal(signal.SIGTERM, mine)
        assert second.should_stop  # asked again after its end: nothing is installed any more
        assert signal.getsignal(signal.SIGTERM) == mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forked_child_ends_when_it_is_told_to(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time, warnings
warnings.simplefilter("ignore")
import ckpt_core as ckpt
with ckpt.Checkpointer(sys.argv[1]) as checkpointer:
    assert not checkpointer.should_stop
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
        os._exit(5)
    sys.exit(0 if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM else 1)
"""
    done = in_new_process(code, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr


def test_a_forked_child_loses_no_signal(tmp_path: Path) -> None:
    """Python forgot one that came before the child had begun, or as it began to wait: who ends a `Pool` waited for ever."""
    code = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")

def blocked():
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])

seen = []
os.register_at_fork(after_in_child=lambda: seen.append(blocked()))  # before anything else does
import ckpt_core as ckpt

def fork():
    child = os.fork()
    if child == 0:
        found = signal.SIGTERM in seen[-1], signal.getsignal(signal.SIGTERM), blocked()
        os._exit(0 if found == (True, first, {signal.SIGUSR1}) else 3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
for first in (signal.SIG_DFL, lambda *_: None):
    signal.signal(signal.SIGTERM, first)
    with ckpt.Checkpointer(sys.argv[1]) as one, ckpt.Checkpointer(sys.argv[1] + "-2") as other:
        assert not one.should_stop and not other.should_stop
        assert fork() == 0
        assert blocked() == {signal.SIGUSR1}
        signal.raise_signal(signal.SIGTERM)
        assert one.should_stop and other.should_stop
"""
    arguments = [
        sys.executable,
        "-c",
        code,
        str(tmp_path / "run"),
    ]  # which has not imported ckpt_core yet
    done = subprocess.run(arguments, env=environment(), text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_forked_child_whose_handler_calls_the_earlier_one_ends(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time, warnings
warnings.simplefilter("ignore")
import ckpt_core as ckpt
with ckpt.Checkpointer(sys.argv[1]) as checkpointer:
    assert not checkpointer.should_stop
    earlier = signal.signal(signal.SIGTERM, lambda *of: earlier(*of))
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    signal.raise_signal(signal.SIGTERM)
    assert checkpointer.should_stop
"""
    done = in_new_process(code, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("at", [signal.SIG_BLOCK, signal.SIG_SETMASK])
def test_a_handler_that_raises_while_a_process_forks_leaves_no_signal_blocked(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """It is called in the call that changes the mask; nobody knew any more what to restore, and SIGTERM stayed blocked for good."""
    plain, before = signal.pthread_sigmask, signal.getsignal(signal.SIGTERM)
    listener = preemption.StopSignal()
    listener.listen()

    def interrupted(how: int, numbers: Any) -> Any:
        found = plain(how, numbers)
        if how == at and numbers != ():
            raise KeyboardInterrupt
        return found

    try:
        monkeypatch.setattr(preemption.signal, "pthread_sigmask", interrupted)
        for hook in (preemption._before_fork, preemption._after_fork):
            with contextlib.suppress(KeyboardInterrupt):  # Python ignores what a hook raises
                hook()
        monkeypatch.undo()
        assert plain(signal.SIG_BLOCK, ()) == set()
        plain(signal.SIG_BLOCK, [signal.SIGUSR1])
        preemption._after_fork()
        assert plain(signal.SIG_BLOCK, ()) == {signal.SIGUSR1}, "an old mask was kept"
    finally:
        plain(signal.SIG_SETMASK, ())
        listener.close()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_pools_of_workers_end_beside_a_run_that_listens(tmp_path: Path) -> None:
    """One of 70 to 400 did not."""
    code = """
import multiprocessing, os, sys, threading
import ckpt_core as ckpt

def work(number):
    return number

def use_pool():
    pool = multiprocessing.get_context("fork").Pool(2)
    for ended in [pool.apply_async(work, (number,)) for number in range(6)][:4]:
        ended.get()
    pool.terminate()

with ckpt.Checkpointer(sys.argv[1]) as checkpointer:
    assert not checkpointer.should_stop
    for _ in range(600):
        thread = threading.Thread(target=use_pool)
        thread.start()
        thread.join(20)
        if thread.is_alive():
            os._exit(3)
"""
    done = in_new_process(code, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr


def test_a_handler_that_python_does_not_know_still_hears_it() -> None:
    """jax's preemption service has one of these: without it processes could not agree."""
    code = """
import ctypes, signal
from ckpt_core._run.preemption import StopSignal
heard = []
native = ctypes.CFUNCTYPE(None, ctypes.c_int)(heard.append)
ctypes.CDLL(None).signal(int(signal.SIGTERM), native)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
listener = StopSignal()
listener.listen()
signal.raise_signal(signal.SIGTERM)
assert heard == [signal.SIGTERM] and listener.noticed_at is not None
signal.raise_signal(signal.SIGTERM)
assert len(heard) == 2
listener.close()
signal.raise_signal(signal.SIGTERM)
assert len(heard) == 3
"""
    done = in_new_process(code)
    assert done.returncode == 0, done.stderr


def test_a_thread_that_cannot_listen_is_told(tmp_path: Path, caplog: Any) -> None:
    def train() -> None:
        with ckpt.Checkpointer(tmp_path) as checkpointer:
            for _ in range(3):
                assert not checkpointer.should_stop

    thread = threading.Thread(target=train, name="trainer")
    thread.start()
    thread.join()
    assert caplog.text.count("SIGTERM will not be noticed") == 1
    assert "'trainer'" in caplog.text
