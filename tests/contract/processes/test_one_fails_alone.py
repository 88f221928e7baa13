"""What one process meets alone (a failing disk, its own code, a lone decision): all hear of it at once, by one class of error, and go on together."""

import os
from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt
from tests.contract.faults.conftest import make_shim  # noqa: F401 (fixture)
from tests.support.launch import launch, reports

COMMON = """
import threading
options = ckpt.Options(timeout_secs=600, persist_policy=ckpt.when.every_steps(2))
local = f"{directory}.local.{index}"

def state(step):
    return put(np.arange(8, dtype=np.float32) + step)
"""
RESTORES = """
with ckpt.Checkpointer(directory, local_directory=local, options=options) as run:
    found = run.restore_latest(state=state(0))
    told["back"] = [run.all_steps(), found.step, same(found["state"], state(found.step))]
"""

# A directory that one process cannot list.
FAILING = """
def fails(*_, **__):
    raise OSError(5, "Input/output error")

def unlisted(where):
    # the disk of one process gives no listing; gives what ends that
    real = os.scandir, os.listdir
    def failing(plain):
        return lambda path=".": fails() if str(path).startswith(directory) else plain(path)
    if index == where:
        os.scandir, os.listdir = map(failing, real)
    def recover():
        os.scandir, os.listdir = real
    return recover

def interrupts(call):
    # Ctrl-C when the main thread is in this call
    main, names = threading.main_thread().ident, []
    while call not in names:
        frame, names = sys._current_frames()[main], []
        while frame:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
    signal.pthread_kill(main, signal.SIGINT)

with ckpt.Checkpointer(directory, options=options) as run:
    for step in range(6):
        run.save(step, state(step))
    run.wait_until_finished()
    for nth, call in enumerate((lambda: run.delete(1), lambda: run.rollback_to(4), lambda: run.wait_for_new_step(0))):
        recover = unlisted(1)  # it does not even ask
        told[f"listing {nth}"] = raised(call)
        recover()
    told["steps"] = run.all_steps()
    told["again"] = run.save(4, state(4))  # it is there: neither written nor compared, on both alike
    told["new"] = run.save(6, state(6))
    run.wait_until_finished()
    told["bad argument"] = raised(lambda: run.wait_for_new_step("6"))["type"]
    stop = KeyboardInterrupt if index == 0 else ckpt.CheckpointError
    if index == 0:
        threading.Thread(target=interrupts, args=("wait_for_new_step",), daemon=True).start()
    try:
        run.wait_for_new_step(6)
    except stop as error:
        told["interrupt"] = str(error)
    told["after"] = run.wait_for_new_step(5)
"""


def test_listings_that_fail_on_one_process(tmp_path):
    """Each process listed before all agreed: a listing that failed on one sent it another way."""
    both = reports(launch(COMMON + FAILING, tmp_path / "run"))
    for index, told in enumerate(both):
        assert [told[f"listing {nth}"] for nth in range(3)] == [None] * 3, told
        assert (told["steps"], told["again"], told["new"]) == ([0, 2, 3, 4], False, True)
        assert told["bad argument"] == "TypeError" and told["after"] == 6, told
        text = "process 0 could not wait for a new step: KeyboardInterrupt: "
        assert told["interrupt"] == text or index == 0, told
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
"""


def test_a_local_directory_that_one_process_cannot_have(tmp_path):
    """The others waited ``timeout_secs`` for it, and where they tried again all made different calls."""
    for index, told in enumerate(reports(launch(COMMON + CONSTRUCTS, tmp_path / "run"))):
        error = told["first"]
        assert error["type"] == ("NotADirectoryError" if index else "CheckpointError"), told
        said = "process 1 could not open local steps: NotADirectoryError" in error["text"]
        assert said or index, told
        assert told["again"] is None and told["steps"] == [4], told
    for told in reports(launch(COMMON + RESTORES, tmp_path / "run")):
        assert told["back"] == [[4], 4, True], told


SAVES = """
import ctypes
shim = ctypes.CDLL(None)
FULL = {  # part of the paths for which process 0 gets no more room, and of which operations
    "index": (b"/state/manifest.ocdbt", b""),
    "record": (b"/ckpt.json", b""),
    "sync of the arrays": (b"/d/", b"fsync"),
    "sync of the record": (b"/ckpt.json", b"fsync"),
}

class Data:
    def __init__(self, error=None): self.error = error
    def get_state(self):
        if self.error is not None:
            raise self.error
        return {"at": 1}
    def set_state(self, state): pass

def save(step, error=None):
    state = put(np.arange(8 << 12, dtype=np.float32).reshape(8, -1) + step)
    run.save(step, state=state, data=Data(error))
    run.wait_until_finished()

def fails(case, own, error=None):  # and the next save works
    step = run.latest_step() + 1
    told[f"{case} {own}"] = [own, raised(lambda: save(step, error)), run.latest_step() == step - 1]
    meet(f"{case} {step} {background}")
    shim.fault_disarm()
    save(step)

for background in (False, True):
    where = f"{directory}/{background}"
    with ckpt.Checkpointer(where, options=ckpt.Options(timeout_secs=600), asynchronous=background) as run:
        save(0)
        for case, (path, operations) in FULL.items():
            if index == 0:
                shim.fault_configure(path, operations, b"enospc", 1, None)
                shim.fault_arm()
            fails(f"{case} {background}", index == 0)
        for who in range(count):
            fails(f"object {who} {background}", index == who, ValueError("not now") if index == who else None)
"""


@pytest.mark.linux("the preload shim")
def test_all_raise_at_once(tmp_path, monkeypatch, shim):
    """Where it happened its own error; elsewhere one that says where, which no handler takes for its own."""
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    for told in reports(launch(SAVES, tmp_path / "run", devices=1)):
        assert len(told) == 12
        for case, (own, error, unseen) in told.items():
            assert error is not None and error["secs"] < 30 and unseen, (case, error, unseen)
            object_, disk = ("ValueError", "not now"), ("OSError", "[Errno 28]")
            kind, text = object_ if "object" in case else disk
            assert error["type"] == (kind if own else "CheckpointError"), (case, error)
            assert text in error["text"] and (own or f"{kind}: " in error["text"]), (case, error)
    for where in (tmp_path / "run" / "False", tmp_path / "run" / "True"):
        assert sorted(name for name in os.listdir(where) if name != ".ckpt-run") == [*"0123456"]
        assert all(ckpt.verify(where / str(step)).ok for step in range(7))


ERRORS = """
def full(value):
    return put(np.full(8, value, np.float32))
one = directory + "/one"
ckpt.save(one, w=full(1), options=options)
failed = {}
failed["save"] = raised(lambda: ckpt.save(one, w=full(2), options=options))
failed["save_async"] = raised(lambda: ckpt.save_async(one, w=full(2), options=options).result())
for who in range(count):
    value = object() if index == who else 1
    failed[f"unsupported {who}"] = raised(lambda: ckpt.save(directory + "/no", {"w": full(3), "v": value}, options=options))
ckpt.save(directory + "/two", {"w": full(1)}, options=options)
for who in range(count):
    wanted = {"w": full(0), "more": 1} if index == who else {"w": full(0)}
    failed[f"mismatch {who}"] = raised(lambda: ckpt.load(directory + "/two", wanted, options=options))
    path = directory + ("/absent" if index == who else "/two")
    failed[f"absent {who}"] = raised(lambda: ckpt.load(path, {"w": full(0)}, options=options))
still = ckpt.load(one, options=options)["w"]
report(failed=failed, still=[int(part.data[0]) for part in still.addressable_shards])
"""

CLASSES = {
    "save": "CheckpointExists",
    "save_async": "CheckpointExists",
    "unsupported": "UnsupportedLeaf",
    "mismatch": "StructureMismatch",
    "absent": "CheckpointNotFound",
}


def test_errors_have_one_class_on_all_processes(tmp_path):
    (tmp_path / "saved").mkdir()
    for index, told in enumerate(reports(launch(ERRORS, tmp_path / "saved"))):
        assert told["still"] == [1] * len(told["still"])
        for name, error in told["failed"].items():
            assert error is not None, name
            assert error["type"] == CLASSES[name.partition(" ")[0]], (index, name, error)
    first = told["failed"]["save"]["text"]
    assert "process 0 could not save: CheckpointExists" in first


# what process 0 alone reads, for its log, the others have not read
READ_BY_ONE = """
state = {"w": put(np.arange(8.0, dtype="f4")), "step": 1}
with ckpt.Checkpointer(directory, options=options) as run:
    run.save(1, state)
with ckpt.Checkpointer(directory, options=options) as run:
    restored = run.restore_latest(state=state)
    if index == READER:
        restored["state"]
    told["refused"] = raised(lambda: run.save(2, state))
    assert restored["state"]["step"] == 1
    told["read"] = raised(lambda: run.save(2, state))
    told["again"] = raised(lambda: run.save(3, state))
    run.wait_until_finished()
    told["steps"] = run.all_steps()
"""


@pytest.mark.parametrize("reader", [0, 1])
def test_a_value_that_only_one_process_read_is_refused_by_all(tmp_path, reader):
    for told in reports(launch(READ_BY_ONE.replace("READER", str(reader)), tmp_path / "run")):
        assert told["refused"]["type"] == "RestoredValueIgnored", told
        assert "was never read" in told["refused"]["text"]
        assert told["refused"]["secs"] < 10
        assert told["read"] is None and told["again"] is None
        assert told["steps"] == [1, 2, 3]


STATE = """
def state(step=0):
    return {"n": step, "x": np.arange(4) + step}
"""


def run(code: str, directory: Path) -> list[dict[str, Any]]:
    return reports(launch(STATE + code, directory, devices=1))


def test_one_process_is_600_decisions_behind(tmp_path):
    """A clock policy asks at each step, and nothing else makes the processes meet."""
    told = run(
        """
def mine(step, context):
    return step % 7 == 0

with ckpt.Checkpointer(f"{directory}/steps", save_policy=mine, options=options) as checkpointer:
    wanted = []
    if index == 1:
        meet("ahead")
    for step in range(600):
        wanted.append(checkpointer.should_save(step))
    if index == 0:
        meet("ahead")
    for step in range(700, 703):  # and go on together
        checkpointer.save(step, state(step))
report(wanted=wanted, steps=checkpointer.all_steps())
""",
        tmp_path / "run",
    )
    assert told[0] == told[1]
    assert told[0]["wanted"] == [step % 7 == 0 for step in range(600)]
    assert told[0]["steps"] == [700]


ALONE = """
from pytest import MonkeyPatch
from tests.support import seams
failed = {}

def alone(name, who, **more):
    # fails in one process, and then both go on together
    patch = MonkeyPatch()
    if index == who:
        seams.at(patch, "write", before=seams.fail(OSError, 5, "EIO"))
    path = f"{directory}/{name}"
    failed[name] = raised(lambda: ckpt.save(path, state(), options=options, **more))
    patch.undo()
    ckpt.save(path + "-after", state(), options=options)

alone("first", 0)
alone("second", 1)
alone("metadata", None, metadata=object() if index else 1)

broken = None
def policy(step, context):
    if index == broken:
        raise ValueError(f"no step {step}")
    return False
with ckpt.Checkpointer(f"{directory}/steps", save_policy=policy, options=options) as checkpointer:
    for broken in (0, 1):
        failed[f"policy {broken}"] = raised(lambda: checkpointer.should_save(broken))
    broken = None
    failed["other step"] = raised(lambda: checkpointer.should_save(10 + index))
    assert checkpointer.should_save(20) is False
    # refused before anything was said: the next call is told at once, and then both go on
    if index == 0:
        failed["refused"] = raised(lambda: checkpointer.save(20, state(), force=True))
    else:
        failed["refused"] = raised(lambda: checkpointer.save(-20, state(), force=True))
        failed["after"] = raised(lambda: (
            checkpointer.save(21, state(), force=True), checkpointer.wait_until_finished()
        ))
    if index == 0:
        failed["after"] = raised(checkpointer.wait_until_finished)
    checkpointer.save(22, state(), force=True)
report(failed=failed, steps=checkpointer.all_steps())
"""


def test_what_fails_in_one_process_alone_is_told_to_all(tmp_path):
    """The others do not wait for it to the time limit, and the next calls meet again."""
    first, second = run(ALONE, tmp_path / "run")

    def error(process: dict[str, Any], name: str) -> str:
        found = process["failed"][name]
        return f"{found['type']}: {found['text']}"

    assert error(first, "first").startswith("OSError")
    assert "process 0 could not save: OSError" in error(second, "first")
    assert error(second, "second").startswith("OSError")
    assert "process 1 could not save: OSError" in error(first, "second")
    assert error(second, "metadata").startswith("TypeError")
    assert "process 1 could not save: TypeError" in error(first, "metadata")
    assert error(first, "policy 0") == "ValueError: no step 0"
    assert "process 0 could not decide" in error(second, "policy 0")
    assert "ValueError: no step 0" in error(second, "policy 0")
    assert first["failed"]["policy 1"] is None
    assert error(second, "policy 1") == "ValueError: no step 1"
    assert first["failed"]["other step"] is None
    assert "asks whether to save step 10, and process 1 step 11" in error(second, "other step")
    assert first["failed"]["refused"] is None and second["failed"]["refused"] is not None
    for process in (first, second):
        assert "the path on processes [1] differs" in error(process, "after")
        assert process["steps"] == [22]
