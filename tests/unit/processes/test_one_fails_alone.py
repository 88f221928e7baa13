"""What fails on one process alone, outside of any agreement: the others hear of it at once, and all go on from the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import launch, reports
from tests.support.same_program import comes_back

COMMON = """
import contextlib, threading
from types import SimpleNamespace
mesh = Mesh(np.array(jax.devices()), ("data",))
options = ckpt.Options(timeout_secs=25, persist_policy=ckpt.when.every_steps(2))
local = f"{directory}.local.{index}"

def state(step):
    whole = np.arange(8, dtype=np.float32) + step
    return jax.make_array_from_callback((8,), NamedSharding(mesh, P("data")), lambda where: whole[where])

def same(found):
    shards = found["state"].addressable_shards
    return all(np.array_equal(a.data, b.data) for a, b in zip(shards, state(found.step).addressable_shards))

told = {}
"""
RESTORES = """
with ckpt.Checkpointer(directory, local_directory=local, options=options) as run:
    found = run.restore_latest(state=state(0))
    told["back"] = [run.all_steps(), found.step, same(found)]
report(**told)
"""

# The n-th thread that this process asks the system for is refused.
NO_THREAD = """
from ckpt_core._background import pending
real = pending._thread.start_new_thread
exec(compile('''
def refuses(nth):
    asked = iter(range(1, 100))
    def start(*arguments):
        if next(asked) == nth:
            raise RuntimeError("can't start new thread")
        return real(*arguments)
    return start
''', "<injected>", "exec"))

def save(step, nth=0):
    # what the save and the wait for it say, and after how long
    if index == 1 and nth:
        pending._thread = SimpleNamespace(start_new_thread=refuses(nth))
    try:
        def call():
            run.save(step, state(step))
            run.wait_until_finished()
        found = raised(call)
    finally:
        pending._thread = SimpleNamespace(start_new_thread=real)
    return found and [found["type"], found["text"], found["secs"]]

with ckpt.Checkpointer(directory, local_directory=local, options=options) as run:
    save(0)
    told["local only"] = save(1, nth=1)
    told["then"] = save(1)
    told["both, the first"] = save(2, nth=1)
    told["then "] = save(2)
    told["both, the second"] = save(4, nth=2)
    told["trails"] = sorted(run._run._caught_up().doubtful), sorted(run._run._trail.own)
    told["then  "] = save(4)
    told["steps"] = run.all_steps()
report(**told)
"""


def test_a_thread_that_cannot_start_on_one_process(tmp_path: Path) -> None:
    """The others waited ``timeout_secs`` for it, and no later save worked where they took the step for doubtful alone."""
    both = reports(launch(COMMON + NO_THREAD, tmp_path / "run"))
    for index, told in enumerate(both):
        for moment in ("local only", "both, the first", "both, the second"):
            kind, text, secs = told[moment]
            assert kind == ("RuntimeError" if index else "NotTogether"), (moment, told)
            assert index or ("process 1" in text and secs < 15), (moment, told)
        assert [told[f"then{' ' * n}"] for n in range(3)] == [None] * 3, told
        assert told["steps"] == [0, 2, 4], told
    assert both[0]["trails"] == both[1]["trails"]
    for told in reports(launch(COMMON + RESTORES, tmp_path / "run")):
        assert told["back"] == [[0, 2, 4], 4, True], told


# A directory that one process cannot list, and removals that fail on process 0.
FAILING = """
exec(compile('''
def fails(*_, **__):
    raise OSError(5, "Input/output error")
''', "<injected>", "exec"))

def failing(name, where):
    # a call of the persistent directory's backend fails in one process; gives what ends that
    backend = run._run.directory.backend
    if index == where:
        setattr(backend, name, fails)
    return lambda: backend.__dict__.pop(name, None)

with ckpt.Checkpointer(directory, options=options) as run:
    for step in range(6):
        run.save(step, state(step))
    run.wait_until_finished()
    for nth, call in enumerate((lambda: run.delete(1), lambda: run.rollback_to(4), lambda: run.wait_for_new_step(0))):
        recover = failing("look", 1)  # it does not even ask
        told[f"listing {nth}"] = raised(call)
        recover()
    for nth, call in enumerate((lambda: run.delete(4), lambda: run.rollback_to(3))):
        undo = [failing("put", 0), failing("delete", 0)]
        found = raised(call)
        told[f"removal {nth}"] = [found["type"], "Input/output error" in found["text"], found["secs"] < 10]
        for recover in undo:
            recover()
    told["steps"] = run.all_steps()
    told["again"] = run.save(4, state(4))  # it is there: neither written nor compared, on both alike
    told["new"] = run.save(6, state(6))
    run.wait_until_finished()
    told["bad argument"] = raised(lambda: run.wait_for_new_step("6"))["type"]
    stop = KeyboardInterrupt if index == 0 else ckpt.CheckpointError
    if index == 0:
        threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    try:
        run.wait_for_new_step(6)
    except stop as error:
        told["interrupt"] = str(error), time.monotonic() - started < 15
    told["after"] = run.wait_for_new_step(5)
report(**told)
"""


def test_listings_and_removals_that_fail_on_one_process(tmp_path: Path) -> None:
    """Each process listed before all agreed: a listing that failed on one sent it another way."""
    both = reports(launch(COMMON + FAILING, tmp_path / "run"))
    for index, told in enumerate(both):
        assert [told[f"listing {nth}"] for nth in range(3)] == [None] * 3, told
        for nth in range(2):
            kind = "CheckpointError" if index else "OSError"
            assert told[f"removal {nth}"] == [kind, True, True], told
        assert told["steps"] == [0, 2, 3, 4] and told["again"] is False and told["new"] is True, (
            told
        )
        assert told["bad argument"] == "TypeError" and told["after"] == 6, told
        text, soon = told["interrupt"]
        assert soon and (index == 0 or text == "process 0: interrupt: KeyboardInterrupt"), told
    code = COMMON + RESTORES.replace("local_directory=local, ", "")
    for told in reports(launch(code, tmp_path / "run")):
        assert told["back"] == [[0, 2, 3, 4, 6], 6, True], told


CONSTRUCTS = """
if index == 1:
    open(local, "w").close()

def construct():
    global run
    run = ckpt.Checkpointer(directory, local_directory=local, options=options)

told["first"] = raised(construct)
if index == 1:
    os.unlink(local)
told["again"] = raised(construct)
run.save(4, state(4))
run.wait_until_finished()
told["steps"] = run.all_steps()
run.close()
report(**told)
"""


def test_a_local_directory_that_one_process_cannot_have(tmp_path: Path) -> None:
    """The others waited ``timeout_secs`` for it, and where they tried again all made different calls."""
    for index, told in enumerate(reports(launch(COMMON + CONSTRUCTS, tmp_path / "run"))):
        error = told["first"]
        assert error["type"] == ("NotADirectoryError" if index else "NotTogether"), told
        assert "process 1 gave up: NotADirectoryError" in error["text"] or index, told
        assert error["secs"] < 15 and told["again"] is None and told["steps"] == [4], told
    for told in reports(launch(COMMON + RESTORES, tmp_path / "run")):
        assert told["back"] == [[4], 4, True], told


# One process is interrupted somewhere in the constructor, while the others go on to a save.
CUT = """
from tests.unit.interrupts.test_calls import AtMoment

class Stop(BaseException):
    pass

def construct():
    return ckpt.Checkpointer(directory, local_directory=local, options=options)

def save(stops=None):
    # what the constructor and a save say, and after how long
    global step
    step += 1
    began, run = time.monotonic(), None
    try:
        with stops or contextlib.nullcontext():
            run = construct()
        run.save(step, state(step))
        run.wait_until_finished()
        found = ["", "", 0]
    except BaseException as error:
        found = [type(error).__name__, str(error), time.monotonic() - began]
    meet(f"step{step}")  # whoever is interrupted makes no other call meanwhile
    if run is not None:
        run.close()
    return found

class Counted(AtMoment):
    first, last = 0, 0

    def _look(self, frame, event, argument):
        super()._look(frame, event, argument)
        if frame.f_code.co_name == "leaving_if_interrupted":
            self.first, self.last = self.first or self.seen + 2, self.seen

step = 0
save()
with Counted() as counted:
    run = construct()
run.close()
told["cut"], told["next"] = [], []
for nth in range({many}):
    moment = counted.first + (counted.last - counted.first) * nth // {many}
    told["cut"].append(save(AtMoment(moment, Stop) if index == {cut} else None))
    told["next"].append([save() for _ in range(2)])
    if told["next"][-1][1][0]:
        break
report(**told)
"""


@pytest.mark.parametrize(
    ("cut", "many"),
    [(0, 3), (1, 3), *(pytest.param(cut, 40, marks=pytest.mark.slow) for cut in (0, 1))],
)
def test_an_interrupt_in_the_constructor(tmp_path: Path, cut: int, many: int) -> None:
    """The others waited ``timeout_secs`` for a process that was interrupted before its first call."""
    code = CUT.replace("{cut}", str(cut)).replace("{many}", str(many))
    for index, told in enumerate(
        reports(launch(COMMON + code, tmp_path / "run", limit_secs=60 + 20 * many))
    ):
        for (kind, text, secs), later in zip(told["cut"], told["next"], strict=True):
            heard = ("NotTogether", "CheckpointError")  # the second of an interrupt in a decision
            assert kind == "Stop" if index == cut else kind in heard, (kind, text)
            assert index == cut or "Stop" in text, text
            assert secs < 15, (secs, text)
            assert later[1] == ["", "", 0], later


UNCLEAN = """
exec(compile('''
def fails(*_, **__):
    raise OSError(5, "Input/output error")
''', "<injected>", "exec"))
from ckpt_core._directory import PosixBackend
real, PosixBackend.clean = PosixBackend.clean, fails if index == 0 else PosixBackend.clean

def construct():
    with ckpt.Checkpointer(directory, options=options) as run:
        run.save(1, state(1))

told["first"] = raised(construct)
PosixBackend.clean = real
told["next"] = raised(construct)
meet("next")
PosixBackend.clean = fails if index == 0 else real
told["second"] = raised(construct)
report(**told)
"""


def test_a_directory_that_process_0_cannot_clean(tmp_path: Path) -> None:
    """The others had a Checkpointer, and waited ``timeout_secs`` in their first call."""
    for index, told in enumerate(reports(launch(COMMON + UNCLEAN, tmp_path / "run"))):
        assert told["first"]["type"] == ("NotTogether" if index else "OSError"), told
        assert "Input/output error" in told["first"]["text"], told
        assert told["first"]["secs"] < 15 and told["next"] is None, told
        assert told["second"]["type"] == told["first"]["type"] and told["second"]["secs"] < 15, told


def test_what_they_save_comes_back(tmp_path: Path) -> None:
    comes_back(COMMON + "def make(n): return {'w': state(n)}\n", tmp_path / "saved")
