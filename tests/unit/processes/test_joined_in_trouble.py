"""Steps that are put together, in trouble: a sound newest step is never taken for damaged, and never deleted for it."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Call, make_call  # noqa: F401
from tests.support.damage import FAILING_OPEN, FAILING_READ
from tests.support.launch import launch, reports
from tests.unit.processes.test_lost_hosts import COMMON

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


# On process 1, until `recover()`: EIO, or another error, from reading data or from opening a file below `where`.
UNREAD = f"""
import errno

def failing(of, where, number=errno.EIO):
    if index != 1:
        return lambda: None
    names = {{"os": os, "errno": errno, "where": where, "number": number, "met": [], "real": getattr(os, of)}}
    # as from no file: what this program raises counts as raised by a signal handler
    exec(compile({FAILING_OPEN!r} if of == "open" else {FAILING_READ!r}, "<injected>", "exec"), names)
    setattr(os, of, names["function"])
    return lambda: setattr(os, of, names["real"])
"""
LATEST = """
with start(by) as checkpointer:
    told["error"] = raised(lambda: checkpointer.restore_latest(state=state(99, by)))
    told["again"] = raised(lambda: checkpointer.restore_latest(state=state(99, by)))
    recover()
    found = resume(checkpointer, by)  # the same Checkpointer, once the disk gives it
    told["recovered"] = found and found.step
told["there"] = there()
told["after"] = restored(by)
"""


def check_unread(found: list[dict[str, Any]]) -> None:
    """No process took it for damage, or went back to an older step; afterwards the newest one is there."""
    for told in found:
        for error in (told["error"], told["again"]):
            assert error["type"] in ("OSError", "CheckpointError"), error
            assert "cannot be read" in error["text"] and "restore(step" in error["text"], error
            assert error["secs"] < 15, error
        assert told["there"] == [3] and told["recovered"] == 3 and told["after"] == [3, "local"], (
            told
        )


@pytest.mark.linux("/proc/self/fd")
@pytest.mark.parametrize(
    "failure",
    [
        'failing("preadv", f"{own}/run-")',
        'failing("open", f"{own}/run-") if index else (lambda: None)',
        'failing("open", "/3/ckpt.json", errno.ENXIO)',
        'failing("open", "/3/ckpt.json", errno.EMFILE)',
    ],
    ids=["data", "everything", "record", "no descriptors"],
)
def test_a_part_that_one_process_cannot_read(tmp_path: Path, failure: str) -> None:
    run(tmp_path, "train(3, ROWS)")
    check_unread(run(tmp_path, UNREAD + f"by = ROWS\nrecover = {failure}\n" + LATEST))


@pytest.mark.linux("/proc/self/fd")
def test_its_part_comes_from_another_process_that_holds_the_same(tmp_path: Path) -> None:
    run(tmp_path, "train(3, P())")
    code = """
bad = max(part(3).rglob("d/*"), key=lambda path: path.stat().st_size)  # one file, and not what takes its place
by, recover = P(), failing("preadv", str(bad))
with start(by) as checkpointer:
    told["step"] = resume(checkpointer, by).step
recover()
told["there"], told["after"] = there(), restored(by)
"""
    for told in run(tmp_path, UNREAD + code):
        assert told == {"step": 3, "there": [3], "after": [3, "local"]}


@pytest.mark.linux("/proc/self/fd")
def test_a_part_that_cannot_be_read_and_no_other_reaches(tmp_path: Path) -> None:
    """Process 0 holds the same, and process 1 cannot write what it would get, or not get it."""
    run(tmp_path, "train(3, P())")
    for failing in ("os.fsync", "peers.Peers.connect"):
        code = f"""
from ckpt_core._run.tiers import peers
by, recover_reads, works = P(), failing("preadv", f"{{own}}/run-"), {failing}
if index == 1:
    exec(compile("def fails(*_): raise OSError(5, 'gone') if {failing[0]!r} == 'o' else ConnectionError('blocked')", "<injected>", "exec"))
    {failing} = fails
def recover():
    recover_reads()
    {failing} = works
"""
        check_unread(run(tmp_path, UNREAD + code + LATEST))


@pytest.mark.linux("/proc/self/fd")
def test_other_shardings_where_a_part_cannot_be_verified(tmp_path: Path) -> None:
    """Whether it is whole is asked, as it might be damaged; that it cannot be read does not make it so."""
    run(tmp_path, "train(3, ROWS)")
    code = """
from ckpt_core._run.tiers import fetch
by, verify = COLUMNS, fetch.verify_part
exec(compile("def failing_verify(*_): raise MemoryError('none left')", "<injected>", "exec"))
if index == 1:
    fetch.verify_part = failing_verify
def recover():
    fetch.verify_part = verify
"""
    check_unread(run(tmp_path, UNREAD + code + LATEST))


@pytest.mark.linux("/proc/self/fd")
def test_a_part_that_another_number_of_processes_cannot_read(tmp_path: Path) -> None:
    """It is in the folder of a process that is no more, and nothing is deleted for it."""
    code = """
def start(by, local=Path(f"{directory}/local"), **more):
    return ckpt.Checkpointer(persistent, local_directory=local, options=ckpt.Options(**options_of | more))
def there():
    return sorted({int(path.parent.name) for path in Path(f"{directory}/local").glob("run-*/process_*/[0-9]*/ckpt.json")})
in_own = restored
def restored(by):
    return in_own(by, Path(f"{directory}/local"))
index = 1  # of those that meet errors
"""
    run(tmp_path, code.replace("index = 1", "") + "train(3, ROWS)")
    failure = 'by, recover = ROWS, failing("open", "process_1-of-2/3/ckpt.json")\n'
    last = "\nindex = 0  # of the only process, for which it waits at the end\n"
    check_unread(run(tmp_path, code + UNREAD + failure + LATEST + last, processes=1, devices=4))


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
        remove = shlex.split(text.partition("on each host: ")[2])
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
        assert remove[:3] == ["ckpt", "rm", "--local"], remove
        remove[3] = str(tmp_path / "run" / "local" / str(host))  # on real hosts it is one path
        code, _, err = call(*remove[1:], "--yes")
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
