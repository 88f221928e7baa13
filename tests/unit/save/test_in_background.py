"""Saves and loads in the background: what they hold, when they end, and where a failure is raised."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._background import pending as pending_module
from ckpt_core._background.pending import PendingSave
from ckpt_core._save import write as write_module
from ckpt_core._storage import ArrayWriter
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


# ---- the snapshot ------------------------------------------------------------------------------

Save = Callable[[str, Any], Callable[[], Any]]


def _by_function(path: str, state: Any) -> Callable[[], Any]:
    pending = ckpt.save_async(f"{path}/0", state, options=QUICK)
    return pending.result


def _by_checkpointer(path: str, state: Any) -> Callable[[], Any]:
    checkpointer = ckpt.Checkpointer(path, options=QUICK)
    assert checkpointer.save(0, state)
    return checkpointer.close


@pytest.fixture(params=[_by_function, _by_checkpointer], ids=["save_async", "Checkpointer"])
def save(request: pytest.FixtureRequest) -> Save:
    return request.param


SHAPES = [(), (7,), (300, 400)]  # the last is above the limit of small leaves


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numpy_arrays_changed_right_after(path, gate, save, shape):
    one = np.full(shape, 1.5)
    whole = np.ones((*shape, 2), np.float32)
    state = {"one": one, "view": whole[..., 0], "list": [np.array(3)]}
    wait = save(path, state)
    one[...] = 9
    whole[...] = 9
    state["list"].append(np.array(4))
    state["new"] = 1
    gate.go.set()
    wait()
    loaded = ckpt.load(f"{path}/0")
    assert loaded.keys() == {"one", "view", "list"} and len(loaded["list"]) == 1
    assert (loaded["one"] == 1.5).all() and (loaded["view"] == 1).all()


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_jax_arrays_donated_right_after(path, gate, save, shape, mesh):
    divides = len(shape) == 2
    spec = jax.sharding.PartitionSpec("data") if divides else jax.sharding.PartitionSpec()
    where = jax.sharding.NamedSharding(mesh, spec)
    update = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    state = {"one": jnp.full(shape, 1.5), "many": jax.device_put(jnp.full(shape, 2.5), where)}
    wait = save(path, state)
    for name in ("one", "many"):
        state[name] = jax.block_until_ready(update(state[name]))
    gate.go.set()
    wait()
    loaded = ckpt.load(f"{path}/0", as_numpy=True)
    assert (loaded["one"] == 1.5).all() and (loaded["many"] == 2.5).all()


def test_jax_arrays_deleted_right_after(path, gate, save):
    state = {"w": jnp.full((300, 400), 2.5), "key": jax.random.key(3)}
    wait = save(path, state)
    for leaf in state.values():
        leaf.delete()
    gate.go.set()
    wait()
    loaded = ckpt.load(f"{path}/0")
    assert (loaded["w"] == 2.5).all() and loaded["key"] == jax.random.key(3)


def test_generators_that_go_on(path, gate, save):
    generator = np.random.default_rng(3)
    wait = save(path, {"generator": generator})
    drawn = generator.random(5)
    gate.go.set()
    wait()
    assert (ckpt.load(f"{path}/0")["generator"].random(5) == drawn).all()


def test_the_caller_goes_on_before_the_thread_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that computes gives the interpreter back only after the switch interval."""
    monkeypatch.setattr(pending_module, "_HEAD_START_SECS", 60.0)
    seen: list[bool] = []

    def work() -> None:
        thread: Any = threading.current_thread()
        seen.append(thread._target.__self__._caller_left.is_set)

    pending = PendingSave("somewhere", work, "ckpt-test")
    pending.start()
    pending.result()
    assert seen == [True]


def test_a_relative_path_is_resolved_at_the_call(tmp_path, gate, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    pending = ckpt.save_async("here", {"n": 1}, options=QUICK)
    monkeypatch.chdir("other")
    gate.go.set()
    pending.result()
    assert pending.path == str(tmp_path / "here")
    assert ckpt.load(tmp_path / "here") == {"n": 1}


# ---- PendingSave and PendingLoad ---------------------------------------------------------------


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


def test_several_at_once(tmp_path):
    states = [{"w": np.full(1000, number), "n": number} for number in range(6)]
    pending = [
        ckpt.save_async(tmp_path / str(number), state, options=QUICK)
        for number, state in enumerate(states)
    ]
    for save in reversed(pending):
        save.result()
    loading = [ckpt.load_async(tmp_path / str(number)) for number in range(6)]
    for number, load in enumerate(loading):
        loaded = load.result()
        assert loaded["n"] == number and (loaded["w"] == number).all()


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


# ---- failures of a Checkpointer's saves --------------------------------------------------------


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
    gate.error = Refusal(28, "the disk is full")
    assert checkpointer.save(0, {"n": 0}) is True
    assert gate.entered.wait(LONG_SECS)
    pending, _ = checkpointer._run._persistent._now  # save() asks only once it has ended
    gate.go.set()
    assert pending.wait(LONG_SECS)
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
        threading.Timer(0.1, gate.go.set).start()
        with pytest.raises(Refusal, match="the disk is full"):
            checkpointer.save(1, {"n": 1})
        gate.error = None
        assert checkpointer.save(1, {"n": 1})
    assert checkpointer.all_steps() == [1]


def test_a_directory_that_became_a_file(path, gate):
    with ckpt.Checkpointer(path, options=QUICK) as checkpointer:
        checkpointer.save(0, {"n": 0})
        checkpointer_directory = Path(path)
        assert gate.entered.wait(LONG_SECS)
        checkpointer_directory.rename(f"{path}-away")
        checkpointer_directory.write_text("in the way")
        gate.go.set()
        with pytest.raises(OSError):
            checkpointer.wait_until_finished()
    assert checkpointer_directory.read_text() == "in the way"


def test_on_pending_wait(path, gate):
    with ckpt.Checkpointer(path, options=QUICK) as checkpointer:
        checkpointer.save(0, {"n": 0})
        assert gate.entered.wait(LONG_SECS)
        assert checkpointer.save(0, {"n": 9}) is False  # it is on its way
        assert checkpointer.all_steps() == []
        threading.Timer(0.1, gate.go.set).start()
        assert checkpointer.save(1, {"n": 1}) is True
        assert 0 in checkpointer.all_steps()  # one at a time
    assert checkpointer.all_steps() == [0, 1] and checkpointer.load(0) == {"n": 0}


def test_delete_waits_for_the_save(path, gate):
    with ckpt.Checkpointer(path, options=QUICK) as checkpointer:
        checkpointer.save(0, {"n": 0})
        assert gate.entered.wait(LONG_SECS)
        threading.Timer(0.1, gate.go.set).start()
        checkpointer.delete(0)
    assert checkpointer.all_steps() == []


def test_on_pending_fail(path, gate):
    options = ckpt.Options(durable=False, on_pending="fail")
    with ckpt.Checkpointer(path, options=options) as checkpointer:
        checkpointer.save(0, {"n": 0})
        assert gate.entered.wait(LONG_SECS)
        with pytest.raises(ckpt.CheckpointError, match="save of step 0 is still running"):
            checkpointer.save(1, {"n": 1})
        gate.go.set()
        checkpointer.wait_until_finished()
        assert checkpointer.save(1, {"n": 1}) is True
    assert checkpointer.all_steps() == [0, 1]


def test_continuously_saves_when_it_can(path, gate):
    with ckpt.Checkpointer(
        path, save_policy=ckpt.when.continuously(), options=QUICK
    ) as checkpointer:
        assert checkpointer.save(0, {"n": 0}) is True
        assert gate.entered.wait(LONG_SECS)
        assert [checkpointer.save(step, {"n": step}) for step in (1, 2, 3)] == [False] * 3
        gate.go.set()
        checkpointer.wait_until_finished()
        assert checkpointer.save(4, {"n": 4}) is True
    assert checkpointer.all_steps() == [0, 4]


# ---- the end of the interpreter, and forks -----------------------------------------------------

_PRELUDE = """
import os, sys, threading, time
import numpy as np
import ckpt_core as ckpt
from tests.support import seams
failing = seams.fail(OSError, 28, "the disk is full")
path = sys.argv[1]
"""


def _run(code: str, path: str) -> forked.Done:
    return forked.run(_PRELUDE + code, path, environment=environment(), timeout_secs=120)


@pytest.mark.parametrize("how", ["save_async", "Checkpointer", "exception"])
def test_a_save_pending_at_exit_is_drained(path, how):
    ended = _run(
        f"""
seams.at(None, "commit", before=lambda *_: time.sleep(0.3))
if {how!r} == "Checkpointer":
    ckpt.Checkpointer(path).save(0, {{"w": np.arange(5000)}})
else:
    pending = ckpt.save_async(path + "/0", {{"w": np.arange(5000)}})
assert not os.path.exists(path + "/0")
if {how!r} == "exception":
    raise SystemExit(3)
""",
        path,
    )
    assert ended.returncode == (3 if how == "exception" else 0), ended.stderr
    assert ended.stderr == ""
    assert ckpt.verify(f"{path}/0").ok
    assert (ckpt.load(f"{path}/0")["w"] == np.arange(5000)).all()


@pytest.mark.parametrize("how", ["save_async", "Checkpointer"])
def test_a_failure_that_nobody_asked_about(path, how):
    ended = _run(
        f"""
seams.at(None, "commit", before=failing)
if {how!r} == "Checkpointer":
    ckpt.Checkpointer(path).save(0, {{"n": 1}})
else:
    ckpt.save_async(path + "/0", {{"n": 1}})
print("done")
""",
        path,
    )
    assert ended.returncode == 1 and ended.stdout == "done\n"
    assert "was not saved" in ended.stderr and path in ended.stderr
    assert "Traceback" in ended.stderr and "the disk is full" in ended.stderr


def test_a_failure_that_was_asked_about_is_not_reported_again(path):
    ended = _run(
        """
seams.at(None, "commit", before=failing)
pending = ckpt.save_async(path, {"n": 1})
try:
    pending.result()
except OSError:
    print("caught")
""",
        path,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "caught\n", "")


def test_a_forked_child_is_refused(path):
    ended = _run(
        """
import warnings
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
codes = {}
for call in (save, save_async, load, load_async, restore, inspect, verify, checkpointer):
    child = os.fork()
    if child == 0:
        try:
            call()
        except ckpt.ForkedProcess as error:
            os._exit(7 if "spawn" in str(error) else 8)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(9)
        os._exit(0)
    codes[call.__name__] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert set(codes.values()) == {7}, codes
assert ckpt.load(path) == {"n": 1}  # the parent goes on
""",
        path,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_thread_that_cannot_start_leaves_the_step_to_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with ckpt.Checkpointer(tmp_path, options=QUICK) as checkpointer:
        with monkeypatch.context() as few_threads:
            few_threads.setattr(pending_module._thread, "start_new_thread", refused)
            with pytest.raises(RuntimeError, match="can't start"):
                checkpointer.save(0, {"w": np.arange(3)})
        assert os.listdir(tmp_path) == [".ckpt-owner"]  # nothing is left of it but the claim
        assert checkpointer.save(0, {"w": np.arange(3)})
    assert ckpt.Checkpointer(tmp_path).all_steps() == [0]


NO_THREADS = """
import sys
import numpy as np
import ckpt_core as ckpt
from ckpt_core._background import pending
directory, call = sys.argv[1:]
start = pending._thread.start_new_thread
def refused(function, arguments):
    if getattr(function, "__name__", "") == "_launch" and isinstance(function.__self__, pending.Pending):
        raise RuntimeError("can't start new thread")
    return start(function, arguments)
ckpt.save(directory + "/there", {"w": np.ones(3)})
pending._thread.start_new_thread = refused
try:
    if call == "save":
        ckpt.save_async(directory + "/one", {"w": np.ones(3)})
    else:
        ckpt.load_async(directory + "/there")
except RuntimeError as error:
    print(error)
pending._thread.start_new_thread = start
assert not pending._unfinished
ckpt.save_async(directory + "/two", {"w": np.ones(3)})
"""


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_process_without_threads_ends(tmp_path: Path, call: str) -> None:
    """Interpreter exit waited for the thread that could not be started, without end."""
    done = forked.run(NO_THREADS, str(tmp_path), call, environment=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("can't start new thread")
    assert not [name for name in os.listdir(tmp_path) if name not in ("there", "two")]
    assert ckpt.load(tmp_path / "two")["w"].tolist() == [1, 1, 1]


def test_a_checkpointer_that_is_left_open_says_nothing_at_exit(tmp_path: Path) -> None:
    code = """
import sys
import ckpt_core as ckpt
left_open = ckpt.Checkpointer(sys.argv[1], asynchronous=False)
left_open.save(0, {"n": 1})
"""
    done = forked.run(code, str(tmp_path), environment=environment())
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_that_is_renamed_while_progress_is_read_does_no_harm(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    finish = ArrayWriter.finish

    def renamed(*_: object) -> dict[str, int]:
        looked.append("looked")
        raise FileNotFoundError(f"{path}/d/0.__lock")

    def watching(writer: ArrayWriter, watch: Callable[[], None] | None = None) -> None:
        assert watch is not None
        watch()
        finish(writer)

    monkeypatch.setattr(write_module, "own_data", renamed)
    monkeypatch.setattr(ArrayWriter, "finish", watching)
    options = ckpt.Options(durable=False, on_event=lambda _: None)
    ckpt.save(path, {"w": np.arange(3)}, options=options)
    assert looked == ["looked"]
    assert (ckpt.load(path)["w"] == np.arange(3)).all()
