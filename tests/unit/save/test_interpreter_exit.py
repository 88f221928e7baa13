"""The end of the interpreter with something pending: what was begun is saved, or said, with exit code 1."""

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import forked
from tests.support.children import environment

LONG_SECS = 120

# `slowly` makes each save wait before its record until the file `go` is there, or for a while.
PRELUDE = """
import atexit, os, signal, sys, threading, time
early = []
atexit.register(lambda: [call() for call in early])  # before ckpt is imported: runs after its own handler
import numpy as np
import ckpt_core as ckpt
path = sys.argv[1]

def interrupted(*arguments):
    open(path + "-interrupted", "w").close()
    signal.default_int_handler(*arguments)
signal.signal(signal.SIGINT, interrupted)
wait = ckpt.PendingSave.wait
def wait_and_say(pending, *arguments):
    if threading.current_thread() is threading.main_thread():
        open(path + "-waiting", "w").close()
    return wait(pending, *arguments)
ckpt.PendingSave.wait = wait_and_say
def late(*_):
    open(path + "-writing", "w").close()
    until = time.monotonic() + 20
    while not os.path.exists(path + "-go") and time.monotonic() < until:
        time.sleep(0.01)
def slowly():
    from tests.support import seams  # a program that has not saved yet has not imported what saves
    seams.at(None, "record", before=late)
def state(step):
    return {"w": np.full(5000, step), "n": step}
"""


class Child:
    """A program that runs; signals are sent when it says, by a file, that it is there. A ``new`` one has an interpreter of its own,
    that has imported nothing, in place of a fork of one that has jax.
    """

    def __init__(self, code: str, path: Path, *, new: bool = False) -> None:
        self.path = path
        self.output, self.errors = (path.with_name(name) for name in ("output", "errors"))
        files = {"output": self.output, "errors": self.errors, "environment": environment()}
        self.process = forked.start(PRELUDE + code, str(path), **files, fresh=new)

    def wait_for(self, suffix: str) -> None:
        until = time.monotonic() + LONG_SECS
        while not os.path.exists(f"{self.path}-{suffix}"):
            assert not self.has_ended(0.005), self.errors.read_text()
            assert time.monotonic() < until, suffix

    def has_ended(self, timeout_secs: float) -> bool:
        with contextlib.suppress(TimeoutError):
            self.process.wait(timeout_secs)
            return True
        return False

    def say(self, suffix: str) -> None:
        Path(f"{self.path}-{suffix}").touch()

    def end(self) -> tuple[int, str, str]:
        try:
            code = self.process.wait(LONG_SECS)
        finally:
            self.process.end()
        return code, self.output.read_text(), self.errors.read_text()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


def _steps_are_right(path: Path, steps: list[int]) -> None:
    assert ckpt.Checkpointer(path, read_only=True).all_steps() == steps
    for step in steps:
        loaded = ckpt.load(path / str(step))
        assert loaded["n"] == step and (loaded["w"] == step).all()
        assert ckpt.verify(path / str(step)).ok


SAVES = "slowly()\nc = ckpt.Checkpointer(path)\nc.save(0, state(0))\n"
LEAVES = """
def handler(*_):
    open(path + "-interrupted", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, handler)
"""
WAITS = {
    "with": f"{SAVES}with c: pass",
    "close": f"{SAVES}c.close()",
    "result": "slowly()\nckpt.save_async(path + '/0', state(0)).result()",
    "exit": SAVES,
    "next save, by a handler that exits": f"{LEAVES}{SAVES}c.save(1, state(1))",
}


@pytest.mark.parametrize("where", WAITS)
def test_one_signal_in_a_wait_loses_no_step(path, where):
    child = Child(WAITS[where], path)
    child.wait_for("writing")
    child.wait_for("waiting")
    child.process.send_signal(signal.SIGTERM if "handler" in where else signal.SIGINT)
    child.wait_for("interrupted")
    child.say("go")
    code, _, error = child.end()
    if "handler" in where:
        assert (code, error) == (0, "")
    elif where == "exit":
        assert code in (0, -signal.SIGINT)
    else:
        assert code == -signal.SIGINT and "KeyboardInterrupt" in error, error
    assert "was not saved" not in error
    _steps_are_right(path, [0])


def test_who_insists_ends_without_it_and_a_message_says_so(path):
    child = Child(SAVES, path)
    child.wait_for("writing")
    child.wait_for("waiting")
    child.process.send_signal(signal.SIGINT)
    while "interrupt again to end without it" not in child.errors.read_text():
        assert not child.has_ended(0.01)
    child.process.send_signal(signal.SIGINT)
    code, _, error = child.end()
    assert code == 1 and "was not saved: interrupted at exit" in error, error
    _steps_are_right(path, [])


LATE = {
    "atexit": "atexit.register(lambda: {call})",
    "an atexit handler that is older than ckpt": "early.append(lambda: {call})",
    "a thread that outlives main": (
        "def later():\n"
        "    threading.main_thread().join()\n"
        "    {call}\n"
        "threading.Thread(target=later).start()"
    ),
}
CALLS = {
    "save": "ckpt.save(path + '/0', state(0))",
    "save_async": "ckpt.save_async(path + '/0', state(0))",
    "Checkpointer": "ckpt.Checkpointer(path).save(0, state(0))",
    "load": "ckpt.load(path + '/7') and ckpt.save(path + '/0', state(0))",
}
FORKED = [(late, call, False) for late in LATE for call in CALLS]
# With a new interpreter, jax is imported when the program is over; these have all that differs.
NEW = [(late, call, True) for late, call in zip(LATE, ("save", "save_async", "load"), strict=True)]


@pytest.mark.parametrize(("late", "call", "new"), FORKED + NEW)
def test_a_save_that_begins_at_the_end(path, late, call, new):
    before = "ckpt.save(path + '/7', state(7))\n" if call == "load" else ""
    code, _, error = Child(before + LATE[late].format(call=CALLS[call]), path, new=new).end()
    assert (code, error) == (0, "")
    _steps_are_right(path, [0, 7] if call == "load" else [0])


def test_a_large_step_compared_with_the_one_before_at_the_end(path):
    """Comparing takes several threads, which start no more when the interpreter ends."""
    code, _, error = Child(
        """
slowly()
big = {f"w{i}": np.full(400_000, i) for i in range(4)}
c = ckpt.Checkpointer(path)
open(path + "-go", "w").close()
c.save(0, big); c.wait_until_finished()
os.remove(path + "-go"); os.remove(path + "-writing")
threading.Thread(target=lambda: (threading.main_thread().join(), open(path + "-go", "w").close())).start()
c.save(1, big)
""",
        path,
    ).end()
    assert (code, error) == (0, "")
    assert ckpt.Checkpointer(path, read_only=True).all_steps() == [0, 1]
    assert ckpt.verify(path / "1").ok


@pytest.mark.parametrize("what", ["there", "missing", "damaged"])
def test_a_load_that_nobody_waits_for(path, what):
    """Nobody can ask for it any more: it ends, and there is nothing to say."""
    ckpt.save(path / "0", {f"w{n}": np.ones(300_000) for n in range(20)})
    if what == "damaged":
        (path / "0" / "ckpt.json").write_bytes(b"{}")
    name = "1" if what == "missing" else "0"
    code, _, error = Child(f"pending = ckpt.load_async(path + '/{name}')", path).end()
    assert (code, error) == (0, "")


@pytest.mark.parametrize("how", ["with", "close", "wait", "save"])
def test_a_child_that_is_forked_during_a_save_ends(path, how):
    """What is being saved is the parent's: the child neither waits for it nor ends it."""
    code, out, error = Child(
        f"""
import warnings
warnings.simplefilter("ignore")  # jax warns of every fork
slowly()
how = {how!r}
with ckpt.Checkpointer(path) as c:
    c.save(0, state(0))
    while not os.path.exists(path + "-writing"):
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        if how != "with":
            try:
                {{"close": c.close, "wait": c.wait_until_finished, "save": lambda: c.save(1, state(1))}}[how]()
            except ckpt.ForkedProcess:
                os._exit(7)
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        open(path + "-go", "w").close()
os._exit(0 if child else 7)
""",
        path,
    ).end()
    assert (code, out, error) == (0, "7\n", "")
    _steps_are_right(path, [0])
