"""Steps that are put together, in trouble: a sound newest step is never taken for damaged, and never deleted for it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.processes.test_lost_hosts import COMMON
from tests.support.command_line import Call, make_call  # noqa: F401
from tests.support.damage import FAILING_READ
from tests.support.launch import launch, reports

SHARDED = """
ROWS, COLUMNS = P("data"), P(None, "data")
options_of = {"timeout_secs": 20, "persist_policy": never}

def start(by, local=own, **more):
    return ckpt.Checkpointer(persistent, local_directory=local, options=ckpt.Options(**options_of | more))

def settle(checkpointer):
    meet(f"turn{next(turns)}")

def there():
    return sorted({int(path.parent.name) for path in own.glob("run-*/process_*/[0-9]*/ckpt.json")})

def hidden():
    return len(list(own.rglob(".ckpt-tmp.*")))
"""
ENDS = "\nreport(**told)\n"


def run(
    tmp_path: Path, code: str, processes: int = 2, devices: int = 2, **more: Any
) -> list[dict[str, Any]]:
    ended = launch(
        COMMON + SHARDED + code + ENDS,
        tmp_path / "run",
        processes=processes,
        devices=devices,
        **more,
    )
    return reports(ended)


ITEMS = """
def items(step, by, change=0):
    rows = np.arange(64 * 48, dtype=np.float32).reshape(64, 48) + step
    none = {"empty": {}, "nothing": (), "a none": [None], "text": "some", "number": 3, "numpy": np.arange(3)}
    return {"params": {"w": put(rows, by)}, **none}

def back(by):
    with start(by) as checkpointer:
        found = checkpointer.restore_latest(**items(99, by))
        wanted = items(found.step, by)
        assert {name: found[name] for name in ("text", "number")} == {"text": "some", "number": 3}
        pairs = zip(found["params"]["w"].addressable_shards, wanted["params"]["w"].addressable_shards)
        assert all(np.array_equal(a.data, b.data) for a, b in pairs)
        return found.step
"""


def test_items_without_arrays_beside_one_that_is_put_together(tmp_path: Path) -> None:
    code = """
with start(ROWS) as checkpointer:
    for step in range(3):
        checkpointer.save(step, **items(step, ROWS))
        checkpointer.wait_until_finished()
"""
    run(tmp_path, ITEMS + code)
    for processes in (2, 4):
        found = run(
            tmp_path, ITEMS + 'told["back"] = back(COLUMNS)', processes, devices=4 // processes
        )
        for told in found:
            assert told["back"] == 2


# Where an operation of putting together fails on one process, and with what.
PLACES = {
    "begin": ("joining.PosixBackend", "begin"),
    "bring": ("fetch", "write_pieces"),
    "link": ("joining.os", "symlink"),
    "index": ("joining", "add"),
    "put": ("joining.PosixBackend", "put"),
}
ERRORS = ["ENOSPC", "EROFS", "EACCES", "EMFILE", "ENOMEM"]
QUICK = {("begin", "EROFS"), ("bring", "ENOSPC"), ("bring", "EMFILE"), ("put", "ENOSPC")}

FAILING = """
import errno
from ckpt_core._run.tiers import fetch, joining

def failing(owner, name, number):
    plain = getattr(owner, name)
    def fails(*arguments, **more):
        if "joined" in str(arguments) + str(more):
            raise OSError(number, os.strerror(number))
        return plain(*arguments, **more)
    setattr(owner, name, fails)
    return lambda: setattr(owner, name, plain)

for place, (owner, name), number in cases:
    with start(COLUMNS) as checkpointer:
        undo = failing(eval(owner), name, getattr(errno, number)) if index == 1 else lambda: None
        error = raised(lambda: checkpointer.restore_latest(state=state(99, COLUMNS)))
        undo()
    told[f"{place} {number}"] = error and [error["type"], error["text"]], there()
    meet(f"{place} {number}")
told["after"] = restored(COLUMNS), hidden()
"""


def _check_failing(tmp_path: Path, cases: list[tuple[str, str]]) -> None:
    run(tmp_path, "train(3, ROWS)")
    given = [(place, PLACES[place], number) for place, number in cases]
    for told in run(tmp_path, f"cases = {given!r}\n" + FAILING, limit_secs=240):
        for place, number in cases:
            error, local = told[f"{place} {number}"]
            assert error is not None and error[0] != "CheckpointCorrupt", (place, number, error)
            assert local == [2, 3] or local == [3], (place, number, local)
        assert told["after"] == [[3, "local"], 0]


def test_errors_of_the_machine_are_no_damage(tmp_path: Path) -> None:
    """A full disk, a read-only file system, no descriptors on one process: all raise, and nothing is deleted."""
    _check_failing(tmp_path, sorted(QUICK))


@pytest.mark.slow
def test_further_errors_of_the_machine(tmp_path: Path) -> None:
    rest = {(place, number) for place in PLACES for number in ERRORS} - QUICK
    _check_failing(tmp_path, sorted(rest))


UNREAD = f"""
import errno
names = {{"os": os, "errno": errno, "where": f"{{own}}/run-", "real": os.preadv, "met": []}}
# as from no file: what this program raises counts as raised by a signal handler
exec(compile({FAILING_READ!r}, "<injected>", "exec"), names)

with start(by) as checkpointer:
    if index == 1:
        os.preadv = names["function"]
    told["error"] = raised(lambda: checkpointer.restore_latest(state=state(99, by)))
    os.preadv = names["real"]
told["there"] = there()
told["after"] = restored(by)
"""


@pytest.mark.linux("/proc/self/fd")
def test_a_disk_that_does_not_give_the_part_of_one_process(tmp_path: Path) -> None:
    """No process takes it for damage, or goes back to an older step; afterwards the newest one is there."""
    run(tmp_path, "train(3, ROWS)")
    for index, told in enumerate(run(tmp_path, "by = ROWS\n" + UNREAD)):
        error = told["error"]
        assert error["type"] == ("OSError" if index else "CheckpointError"), error
        assert "step 3 cannot be read" in error["text"] and "restore(step" in error["text"], error
        assert told["there"] == [3] and told["after"] == [3, "local"], told


@pytest.mark.linux("/proc/self/fd")
def test_its_part_comes_from_another_process_that_holds_the_same(tmp_path: Path) -> None:
    run(tmp_path, "train(3, P())")
    for told in run(tmp_path, "by = P()\n" + UNREAD):
        assert told["error"] is None, told
        assert told["there"] == [3] and told["after"] == [3, "local"], told


def test_no_start_from_scratch_where_parts_are_lost(tmp_path: Path, call: Call) -> None:
    """The persistent directory has nothing yet; what the other host still has is not deleted, but by the advised command."""
    late = 'options_of["persist_policy"] = ckpt.when.every_steps(1000)\n'
    train = """
with start(ROWS) as checkpointer:
    for step in range(1, 6):
        checkpointer.save(step, state=state(step, ROWS))
        checkpointer.wait_until_finished()
"""
    run(tmp_path, late + train)
    lost = tmp_path / "run" / "local" / "1"
    lost.rename(tmp_path / "elsewhere")
    code = """
with start(ROWS) as checkpointer:
    error = raised(lambda: checkpointer.restore_latest(state=state(99, ROWS)))
    told["error"] = error and [error["type"], error["text"]]
with start(ROWS) as checkpointer:  # who asks in another way, or does not ask
    told["latest"] = checkpointer.latest_step()
    error = raised(lambda: checkpointer.save(1, state=state(1, ROWS)))
    told["save"] = error and [error["type"], error["text"]]
told["there"] = there()
"""
    for index, told in enumerate(run(tmp_path, late + code)):
        assert told["latest"] is None
        for kind, text in (told["error"], told["save"]):
            assert kind == "CheckpointCorrupt", text
            assert "does not start from scratch by accident" in text, text
        assert "ckpt rm --local DIR" in text
        assert (5 in told["there"]) == (index == 0), told
    for told in run(tmp_path, late + code, processes=1, devices=4):
        assert told["error"] is not None, told
    for path in lost.glob("*"):  # what the new processes have made there
        assert not list(path.rglob("ckpt.json"))
    shutil.rmtree(lost, ignore_errors=True)
    (tmp_path / "elsewhere").rename(lost)
    for told in run(tmp_path, late + "told['found'] = restored(ROWS)"):
        assert told["found"] == [5, "local"]
    shutil.rmtree(lost)
    for host in (0, 1):
        code, _, err = call("rm", "--local", tmp_path / "run" / "local" / str(host), "--yes")
        assert code == 0 or host == 1, err  # where nothing is
    for told in run(tmp_path, late + "told['found'] = restored(ROWS)\ntrain(1, ROWS)"):
        assert told["found"] is None


def test_a_first_save_that_never_ended_is_no_lost_step(tmp_path: Path) -> None:
    """One process has committed the first step of all, and the other was killed before: there was nothing else."""
    code = """
with start(ROWS) as checkpointer:
    checkpointer.save(1, state=state(1, ROWS))
    checkpointer.wait_until_finished()
"""
    run(tmp_path, 'options_of["persist_policy"] = ckpt.when.every_steps(1000)\n' + code)
    (step,) = (tmp_path / "run" / "local" / "1").glob("run-*/process_1-of-2/1")
    shutil.rmtree(step)
    for told in run(tmp_path, "told['found'] = restored(ROWS)"):
        assert told["found"] is None


LOOKS = """
from ckpt_core._run.tiers import joining
began, seen, plain = threading.Event(), [], joining._Joined._bring_next

def slowly(self):
    began.set()
    time.sleep(0.3)
    plain(self)
    time.sleep(0.3)

def look(step):
    began.wait(20)
    try:
        seen.append(sorted(checkpointer.inspect(step).items))
    except BaseException as error:
        seen.append(repr(error))

with start(COLUMNS) as checkpointer:
    joining._Joined._bring_next = slowly
    threads = [threading.Thread(target=look, args=(step,), name=f"look-{step}") for step in (2, 3)]
    for thread in threads:
        thread.start()
    told["found"] = restored_by(checkpointer)
    for thread in threads:
        thread.join(30)
    joining._Joined._bring_next = plain
    told["seen"] = seen
    told["again"] = restored_by(checkpointer)
told["hidden"] = hidden()
"""


def test_looking_at_steps_while_one_is_put_together(tmp_path: Path) -> None:
    """`inspect` is no call of all processes, and may come from another thread."""
    run(tmp_path, 'options_of["local_max_to_keep"] = 2\ntrain(3, ROWS)')
    by = """
def restored_by(checkpointer):
    found = checkpointer.restore_latest(state=state(99, COLUMNS))
    assert same(found["state"], found.step, COLUMNS)
    return found.step
"""
    for told in run(tmp_path, by + LOOKS, processes=4, devices=1):
        assert told == {"found": 3, "seen": [["state"]] * 2, "again": 3, "hidden": 0}, told


LOADS = """
with start(COLUMNS) as checkpointer:
    like = state(99, COLUMNS)
    whole = checkpointer.load(3, like)
    assert same(whole, 3, COLUMNS)
    told["rows"] = list(checkpointer.load(3, like, only="rows"))
    error = raised(lambda: checkpointer.load(3, as_numpy=True))  # each process for itself
    told["host"] = error["type"], "is not damaged" in error["text"]
    meet("as_numpy")
    told["not there"] = raised(lambda: checkpointer.load(7, like))["type"]
    other = {**like, "n": np.ones((3, 3))}
    told["other"] = raised(lambda: checkpointer.load(3, other))["type"]
    found = checkpointer.restore(3, state=like)
    told["path"] = [found.path == str(checkpointer._run._local.directory), os.path.isdir(found.path)]
    told["after"] = checkpointer.load(3, like)["n"]
told["own"] = restored(ROWS)
told["hidden"] = hidden()
"""


def test_load_puts_together_what_restore_does(tmp_path: Path) -> None:
    run(tmp_path, "train(3, ROWS)")
    for told in run(tmp_path, LOADS):
        assert told == {
            "rows": ["rows", "everywhere", "host", "n"],
            "host": ["CheckpointError", True],
            "not there": "CheckpointNotFound",
            "other": "StructureMismatch",
            "path": [True, True],
            "after": 3,
            "own": [3, "local"],
            "hidden": 0,
        }


DAMAGED_THERE = """
with start(ROWS, persist_policy=ckpt.when.every_steps(1)) as checkpointer:
    checkpointer.save(3, state(3, ROWS))
    checkpointer.wait_until_finished()
on(0, destroy_persistent)
joined = []
from ckpt_core._run.tiers import joining
plain = joining.Joining.open
joining.Joining.open = lambda self, step: joined.append(step) or plain(self, step)
for case, more in {"writer": {}, "reader": {"read_only": True}}.items():
    with ckpt.Checkpointer(persistent, local_directory=own, options=ckpt.Options(**options_of), **more) as one:
        told[case] = same(one.load(3, state(99, ROWS)), 3, ROWS), same(one.restore(3, state=state(99, ROWS))["state"], 3, ROWS)
told["joined"] = joined
"""


def test_a_load_whose_persistent_copy_is_damaged(tmp_path: Path) -> None:
    """The local parts are whole, and of these shardings: nothing is put together, and a reader gets them, too."""
    for told in run(tmp_path, DAMAGED_THERE):
        assert told == {"writer": [True, True], "reader": [True, True], "joined": []}, told


FAILS_LATE = """
class Fails:
    broken = False
    def get_state(self):
        return {"n": 1}
    def set_state(self, state):
        if self.broken:
            raise RuntimeError("broken")

options_of["local_max_to_keep"] = 3
"""


def test_a_restore_that_failed_after_it_was_put_together(tmp_path: Path) -> None:
    """The step is each process's own as before, and stays as long as others."""
    code = """
with start(ROWS) as checkpointer:
    for step in range(4):
        checkpointer.save(step, state=state(step, ROWS), more=Fails())
        checkpointer.wait_until_finished()
"""
    run(tmp_path, FAILS_LATE + code)
    code = """
with start(COLUMNS) as checkpointer:
    Fails.broken = True
    told["error"] = raised(lambda: checkpointer.restore_latest(state=state(99, COLUMNS), more=Fails()))["text"]
    Fails.broken = False
    checkpointer.save(4, state=state(4, COLUMNS), more=Fails())
    checkpointer.wait_until_finished()
told["there"] = there()
"""
    for told in run(tmp_path, FAILS_LATE + code):
        assert "broken" in told["error"]
        assert told["there"] == [2, 3, 4], told
