"""Being asked to stop, or to save now: signals are noticed and passed on, and the last step is saved within the time that is left."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import forked
from tests.support.children import environment
from tests.support.command_line import Call, make_call  # noqa: F401 (fixture)
from tests.support.launch import launch, reports

STATE = {"w": np.ones(2)}


@contextlib.contextmanager
def handled(number: int = signal.SIGTERM) -> Iterator[list[int]]:
    """What a handler of the program hears."""
    heard: list[int] = []
    before = signal.signal(number, lambda number, _: heard.append(number))
    try:
        yield heard
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noticed_and_passed_on(tmp_path, number):
    options = ckpt.Options(stop_signals=("SIGTERM", "SIGUSR1"))
    with handled(number) as heard:
        with ckpt.Checkpointer(tmp_path, options=options) as checkpointer:
            before = signal.getsignal(number)
            assert not checkpointer.should_stop
            assert signal.getsignal(number) != before  # nothing listens before it is asked
            signal.raise_signal(number)
            assert checkpointer.should_stop and checkpointer.reached_preemption(3)
        assert heard == [number]
        assert signal.getsignal(number) == before
        signal.raise_signal(number)
        assert heard == [number] * 2


@pytest.mark.parametrize("name", ["TERM", "SIGNOTHING", "", "SIG_DFL", "SIGKILL"])
def test_signals_that_are_none(name):
    with pytest.raises(ValueError, match="stop_signals"):
        ckpt.Options(stop_signals=(name,))


def test_a_signal_right_after_a_step_was_declined(tmp_path, monkeypatch):
    """A loop that stops there would lose that step: it does one more, which is saved."""

    def comes_late(step: int, _: Any) -> bool:
        if step == 1:
            signal.raise_signal(signal.SIGTERM)
        return False

    policy = ckpt.when.preempted() | comes_late
    with ckpt.Checkpointer(tmp_path / "a", save_policy=policy) as checkpointer:
        for step in range(9):
            checkpointer.save(step, STATE)
            if checkpointer.should_stop:
                break
    assert checkpointer.all_steps() == [step] == [2]
    # a loop that does not ask the policy again is not kept from stopping
    clock = time.monotonic
    with ckpt.Checkpointer(tmp_path / "b", save_policy=policy) as checkpointer:
        assert not checkpointer.save(1, STATE)
        assert not checkpointer.should_stop and not checkpointer.should_stop
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 10_000)
        assert checkpointer.should_stop


def test_checkpointers_closed_in_any_order_leave_no_handler(tmp_path):
    with handled() as heard:
        mine = signal.getsignal(signal.SIGTERM)
        first, second = ckpt.Checkpointer(tmp_path / "a"), ckpt.Checkpointer(tmp_path / "b")
        assert not first.should_stop and not second.should_stop
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


def test_a_thread_that_cannot_listen_is_told(tmp_path, caplog):
    def train() -> None:
        with ckpt.Checkpointer(tmp_path / "a") as checkpointer:
            for _ in range(3):
                assert not checkpointer.should_stop
        assert not asked_before.should_stop

    with ckpt.Checkpointer(tmp_path / "b") as asked_before:
        assert not asked_before.should_stop
        thread = threading.Thread(target=train, name="trainer")
        thread.start()
        thread.join()
    assert caplog.text.count("SIGTERM will not be noticed") == 1
    assert "Python lets only the main thread listen, and this is 'trainer'" in caplog.text
    assert "Make the Checkpointer, or ask should_stop once, there" in caplog.text


@pytest.mark.parametrize("stopped", ["in time", "too late", "while it waits", "not at all"])
def test_the_grace_period(tmp_path, stopped):
    go = threading.Event()

    def held(event: ckpt.Event) -> None:
        if event.kind == "committed":  # in the background thread, before the step is acknowledged
            assert go.wait(60)

    secs = {"in time": 30.0, "not at all": 0.0}.get(stopped, 0.05)
    options = ckpt.Options(grace_secs=secs, on_event=held)
    checkpointer = ckpt.Checkpointer(tmp_path, options=options)
    assert not checkpointer.should_stop
    checkpointer.save(1, STATE)
    if stopped == "not at all":
        threading.Timer(0.2, go.set).start()
    elif stopped == "while it waits":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    else:
        signal.raise_signal(signal.SIGTERM)
        assert checkpointer.should_stop
    if stopped == "in time":
        go.set()
    if stopped in ("too late", "while it waits"):
        with pytest.raises(ckpt.GraceExceeded, match="step 1 did not end within the grace period"):
            checkpointer.wait_until_finished()
        go.set()
        ended = False
        while not ended:  # it goes on meanwhile
            with contextlib.suppress(ckpt.GraceExceeded):
                checkpointer.wait_until_finished()
                ended = True
    checkpointer.close()
    assert checkpointer.all_steps() == [1]


BEGINNING = """
import gc, os, signal, sys, time, warnings
gc.disable()  # collecting garbage must not be needed
warnings.simplefilter("ignore")
import numpy as np
import ckpt_core as ckpt

policy = ckpt.when.every_steps(100) | ckpt.when.preempted()

def opened(name):
    return ckpt.Checkpointer(f"{sys.argv[1]}/{name}", save_policy=policy, asynchronous=False)

def told_again(checkpointer):
    signal.raise_signal(signal.SIGTERM)
    assert checkpointer.save(2, {"w": np.ones(2)})
    print("alive", flush=True)

def forked():
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
        os._exit(5)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
# code, then what it prints, and how it ends
ENDED = {
    "closed out of turn": (
        """
first, second = opened("a"), opened("b")
first.close()
told_again(second)
signal.raise_signal(signal.SIGTERM)  # the second one ends the process as ever
""",
        *("alive\n", -signal.SIGTERM),
    ),
    "opened after others": (
        """
first, second = opened("a"), opened("b")
first.close()
second.close()
told_again(opened("c"))
signal.raise_signal(signal.SIGTERM)
""",
        *("alive\n", -signal.SIGTERM),
    ),
    **{
        # it heard an earlier signal, so that this one is its second; not so for who asks now
        f"left open, {how}": (
            f"""
left = opened("a")
signal.raise_signal(signal.SIGTERM)
assert left.should_stop
{then}
with opened("b") as second:
    told_again(second)
signal.raise_signal(signal.SIGTERM)
print("deaf", flush=True)
""",
            *("alive\n", -signal.SIGTERM),
        )
        for how, then in {
            "kept": "",
            "dropped": "del left",
            "chained": "before = signal.getsignal(signal.SIGTERM)\n"
            "signal.signal(signal.SIGTERM, lambda *of: before(*of))",
        }.items()
    },
    "dropped": (
        """
assert not opened("a").should_stop
signal.raise_signal(signal.SIGTERM)
print("deaf", flush=True)
""",
        *("", -signal.SIGTERM),
    ),
    "a loop": (
        """
with opened("a") as checkpointer:
    for step in range(1, 10_000):
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.save(step, {"step": step})
        if checkpointer.should_stop:
            break
assert ckpt.load(f"{sys.argv[1]}/a/7") == {"step": 7}
sys.exit(3)
""",
        *("", 3),
    ),
    "a forked child ends": (
        """
with opened("a") as checkpointer:
    assert not checkpointer.should_stop
    assert forked() == -signal.SIGTERM
""",
        *("", 0),
    ),
    "so does one whose handler calls the earlier one": (
        """
with opened("a") as checkpointer:
    assert not checkpointer.should_stop
    earlier = signal.signal(signal.SIGTERM, lambda *of: earlier(*of))
    assert forked() == -signal.SIGTERM
    signal.raise_signal(signal.SIGTERM)
    assert checkpointer.should_stop
""",
        *("", 0),
    ),
}


@pytest.mark.parametrize("what", ENDED)
def test_a_process_that_is_told_to_stop(tmp_path, what):
    code, printed, ends = ENDED[what]
    done = forked.run(BEGINNING + code, str(tmp_path), environment=environment(), timeout_secs=60)
    assert (done.stdout, done.returncode) == (printed, ends), done.stderr


REQUEST = ".ckpt-save-now"
NEVER = ckpt.when.at_steps([])


def steps(secs: float = 60) -> Iterator[int]:
    """The steps of a loop that somebody would stop."""
    deadline = time.monotonic() + secs
    for step in range(10**6):
        assert time.monotonic() < deadline, "nothing was saved"
        yield step
        time.sleep(0.01)


@pytest.mark.parametrize("tiers", [False, True])
def test_it_is_asked_until_a_step_is_committed(tmp_path, call: Call, tiers):
    """Also before the start of the job, as after one that was killed; and if the first save for it fails."""
    (run_path := tmp_path / "run").mkdir()
    code, out, _ = call("save-now", run_path)
    assert code == 0 and "nobody on this machine writes there now" in out
    assert call("save-now", run_path, "--wait", "0.1")[0] == 1
    options = ckpt.Options(persist_policy=NEVER, durable=False)
    where: Any = {"save_policy": NEVER, "options": ckpt.Options(durable=False)}
    if tiers:
        every = ckpt.when.every_steps(1)
        where = {"save_policy": every, "local_directory": tmp_path / "local", "options": options}
    with ckpt.Checkpointer(run_path, **where) as run:
        fails = failed = None
        for step in steps():
            try:
                run.save(step, {"w": object()} if failed is None and not tiers else STATE)
            except ckpt.UnsupportedLeaf:
                fails, failed = step, (run_path / REQUEST).exists()
            if not (run_path / REQUEST).exists():
                break
        run.wait_until_finished()
    assert tiers or (fails and failed)
    with ckpt.Checkpointer(run_path, read_only=True) as run:
        (saved,) = run.all_steps()
        assert saved > (fails or 0)
        assert run.load(saved)["w"].tolist() == STATE["w"].tolist()
    told = json.loads(call("save-now", run_path, "--json")[1])
    assert told == {"directory": str(run_path), "new": True, "saved": False, "newest_step": None}


def test_in_a_bucket(call: Call):
    url = "memory://save-now/run"
    with ckpt.Checkpointer(url, save_policy=NEVER) as run:
        assert call("save-now", url)[0] == 0
        for step in steps(90):
            if run.save(step, STATE):
                break
        run.wait_until_finished()
        assert run.all_steps() == [step]
    assert "is asked" in call("save-now", url)[1]


def test_where_nothing_runs_is_said(tmp_path, call: Call):
    assert call("save-now", tmp_path / "nowhere")[0] == 2
    ckpt.save(tmp_path / "one", STATE)
    code, _, said = call("save-now", tmp_path / "one")
    assert code == 2 and "is one checkpoint" in said
    assert not [*Path(tmp_path).rglob(REQUEST)]


PROCESSES = """
policy = {"by step": ckpt.when.at_steps([3]), "by time": ckpt.when.every_secs(1e6)}[kind]
saved = []
with ckpt.Checkpointer(directory, save_policy=policy, options=options) as run:
    run.save(0, {"w": put(np.arange(8.0))}, force=True)
    run.wait_until_finished()
    for step in range(1, 6000):
        time.sleep(0.001 if (step // 20 + index) % 2 else 0.03)  # one is ahead, then the other
        if step == 20 and index == 1:
            open(f"{directory}/.ckpt-save-now", "w").write("please")
        if asks and index == 0:
            run.should_save(step)  # one alone may ask
        if not asks or run.should_save(step):
            saved += [step] * run.save(step, {"w": put(np.arange(8.0) + step)})
        if saved and saved[-1] > 20:
            break
    run.wait_until_finished()
    found = run.all_steps()
    there = os.path.exists(f"{directory}/.ckpt-save-now")
report(saved=saved, steps=found, there=there)
"""


@pytest.mark.parametrize(
    ("kind", "asks"), [("by step", False), ("by step", True), ("by time", False)]
)
def test_two_processes_save_one_step(tmp_path, kind, asks):
    one, two = reports(launch(f"kind, asks = {kind!r}, {asks}\n{PROCESSES}", tmp_path / "run"))
    assert one["saved"] == two["saved"] and not one["there"]  # process 0 removes it
    assert one["saved"][-1] > 20 and one["steps"] == sorted({0, *one["saved"]})
