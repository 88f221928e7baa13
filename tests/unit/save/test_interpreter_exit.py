"""The end of the interpreter with something pending: what was begun is saved, or said, with exit code 1."""

import contextlib
import os
import signal
import time
from pathlib import Path

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
from ckpt_core._background.threads import Flag
path = sys.argv[1]

def interrupted(*arguments):
    open(path + "-interrupted", "w").close()
    signal.default_int_handler(*arguments)
signal.signal(signal.SIGINT, interrupted)
wait = Flag.wait
def wait_and_say(flag, *arguments):
    if threading.current_thread() is threading.main_thread():
        open(path + "-waiting", "w").close()
    return wait(flag, *arguments)
Flag.wait = wait_and_say
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
    """A program that runs; signals are sent when it says, by a file, that it is there.

    Args:
        new: an interpreter of its own, that has imported nothing, in place of a fork of one that has jax.
    """

    def __init__(self, code: str, path: Path, *, new: bool = False) -> None:
        self.path = path
        self.output, self.errors = (path.with_name(name) for name in ("output", "errors"))
        program = PRELUDE + code
        if new:
            for file in (self.output, self.errors):
                file.write_bytes(b"")
            self.process: forked.Forked | forked.Spawned = forked.Spawned(
                program, (str(path),), self.output, self.errors, environment(), Path.cwd()
            )
        else:
            self.process = forked.start(
                program,
                str(path),
                output=self.output,
                errors=self.errors,
                environment=environment(),
            )

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


@pytest.fixture(params=[False, pytest.param(True, id="new", marks=pytest.mark.slow)])
def new(request: pytest.FixtureRequest) -> bool:
    """Whether a program has an interpreter of its own."""
    return request.param


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


def _steps_are_right(path: Path, steps: list[int]) -> None:
    assert ckpt.Checkpointer(path, read_only=True).all_steps() == steps
    for step in steps:
        loaded = ckpt.load(path / str(step))
        assert loaded["n"] == step and (loaded["w"] == step).all()
        assert ckpt.verify(path / str(step)).ok


# ---- asked to stop while something waits ---------------------------------------------------------


def test_the_usual_handler_of_sigterm_loses_no_step(path: Path, new: bool) -> None:
    """``sys.exit`` in a handler, while the next save waits for the one before."""
    child = Child(
        """
def handler(*_):
    open(path + "-interrupted", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, handler)
slowly()
c = ckpt.Checkpointer(path)
c.save(0, state(0))
c.save(1, state(1))
""",
        path,
        new=new,
    )
    child.wait_for("writing")
    child.wait_for("waiting")
    child.process.send_signal(signal.SIGTERM)
    child.wait_for("interrupted")
    child.say("go")
    code, _, error = child.end()
    assert (code, error) == (0, "")
    _steps_are_right(path, [0])


@pytest.mark.parametrize("where", ["with", "result", "close"])
def test_ctrl_c_in_a_wait(path: Path, where: str, new: bool) -> None:
    calls = {
        "with": "with ckpt.Checkpointer(path) as c:\n    c.save(0, state(0))",
        "close": "c = ckpt.Checkpointer(path)\nc.save(0, state(0))\nc.close()",
        "result": "ckpt.save_async(path + '/0', state(0)).result()",
    }
    child = Child(f"slowly()\n{calls[where]}", path, new=new)
    child.wait_for("writing")
    child.wait_for("waiting")
    child.process.send_signal(signal.SIGINT)
    child.wait_for("interrupted")
    child.say("go")
    code, _, error = child.end()
    assert code == -signal.SIGINT, error
    assert "KeyboardInterrupt" in error and "was not saved" not in error
    _steps_are_right(path, [0])


def test_one_ctrl_c_at_exit_is_not_enough(path: Path, new: bool) -> None:
    child = Child("slowly()\nckpt.Checkpointer(path).save(0, state(0))", path, new=new)
    child.wait_for("writing")
    child.wait_for("waiting")
    child.process.send_signal(signal.SIGINT)
    child.wait_for("interrupted")
    child.say("go")
    code, _, error = child.end()
    assert code in (0, -signal.SIGINT) and "was not saved" not in error, error
    _steps_are_right(path, [0])


def test_who_insists_ends_without_it_and_a_message_says_so(path: Path, new: bool) -> None:
    child = Child("slowly()\nckpt.Checkpointer(path).save(0, state(0))", path, new=new)
    child.wait_for("writing")
    child.wait_for("waiting")
    for _ in range(LONG_SECS):
        child.process.send_signal(signal.SIGINT)
        if child.has_ended(0.2):
            break
    code, _, error = child.end()
    assert code == 1 and "was not saved: interrupted at exit" in error, error
    _steps_are_right(path, [])


# ---- saves that begin when the program is over --------------------------------------------------

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


# With a new interpreter, jax is imported when the program is over; three of those pairs have all that differs.
_NEW = {(late, call) for late, call in zip(LATE, ("save", "save_async", "load"), strict=True)}


@pytest.mark.parametrize(
    ("late", "call", "new"),
    [
        pytest.param(
            late,
            call,
            new,
            id=f"{late}-{call}" + "-new" * new,
            marks=[pytest.mark.slow] if new and (late, call) not in _NEW else [],
        )
        for new in (False, True)
        for late in LATE
        for call in CALLS
    ],
)
def test_a_save_that_begins_at_the_end(path: Path, late: str, call: str, new: bool) -> None:
    before = "ckpt.save(path + '/7', state(7))\n" if call == "load" else ""
    code, _, error = Child(before + LATE[late].format(call=CALLS[call]), path, new=new).end()
    assert (code, error) == (0, "")
    _steps_are_right(path, [0, 7] if call == "load" else [0])


@pytest.mark.parametrize("late", LATE)
def test_a_failure_in_the_background_at_the_end_is_reported(
    path: Path, late: str, new: bool
) -> None:
    code = "slowly()\n" + LATE[late].format(call="ckpt.save_async(path + '/0', state(0))")
    code += "\nopen(path + '-go', 'w').close()\nfrom tests.support import seams\n"
    code += "seams.at(None, 'record', before=seams.fail(OSError, 28, 'the disk is full'))"
    returned, _, error = Child(code, path, new=new).end()
    assert returned == 1 and "was not saved" in error and "the disk is full" in error
    assert not (path / "0").exists()


def test_a_large_step_compared_with_the_one_before_at_the_end(path: Path, new: bool) -> None:
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
        new=new,
    ).end()
    assert (code, error) == (0, "")
    assert ckpt.Checkpointer(path, read_only=True).all_steps() == [0, 1]
    assert ckpt.verify(path / "1").ok


@pytest.mark.parametrize("how", ["exit", "with", "close", "wait", "save"])
def test_a_child_that_is_forked_during_a_save_ends(path: Path, how: str, new: bool) -> None:
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
        if how == "exit":  # all but taking the interpreter apart, which the libraries' threads do not survive
            ckpt._background.pending._finish_last()
            os._exit(7)
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
        new=new,
    ).end()
    assert (code, out, error) == (0, "7\n", "")
    _steps_are_right(path, [0])


# ---- loads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["there", "missing", "damaged"])
def test_a_load_that_nobody_waits_for(path: Path, what: str, new: bool) -> None:
    """Nobody can ask for it any more: it ends, and there is nothing to say."""
    ckpt.save(path / "0", {f"w{n}": __import__("numpy").ones(300_000) for n in range(20)})
    if what == "damaged":
        (path / "0" / "ckpt.json").write_bytes(b"{}")
    name = "1" if what == "missing" else "0"
    code, _, error = Child(f"pending = ckpt.load_async(path + '/{name}')", path, new=new).end()
    assert (code, error) == (0, "")


def test_a_load_that_a_thread_waits_for_goes_on(path: Path, new: bool) -> None:
    ckpt.save(path / "0", {"n": 3})
    code, out, error = Child(
        """
def later():
    threading.main_thread().join()
    print(ckpt.load_async(path + "/0").result())
threading.Thread(target=later).start()
""",
        path,
        new=new,
    ).end()
    assert (code, out, error) == (0, "{'n': 3}\n", "")
