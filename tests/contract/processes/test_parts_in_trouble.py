"""Local parts in trouble: a sound newest step is never taken for damaged, nor deleted, nor passed over in silence."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.contract.processes.test_lost_hosts import COMMON
from tests.support.command_line import Call, make_call  # noqa: F401
from tests.support.damage import FAILING_OPEN, FAILING_READ
from tests.support.launch import launch, reports

SHARDED = """
ROWS = P("data")
options_of = {"timeout_secs": 20, "persist_policy": never, "partners": None}

def start(by, local=own, **more):
    return ckpt.Checkpointer(persistent, local_directory=local, options=ckpt.Options(**options_of | more))

def there():
    return sorted({int(path.parent.name) for path in own.glob("run-*/process_*/[0-9]*/ckpt.json")})
"""


def run(tmp_path: Path, code: str, processes: int = 2, devices: int = 2) -> list[dict[str, Any]]:
    text = COMMON + SHARDED + code
    return reports(launch(text, tmp_path / "run", processes=processes, devices=devices))


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
        assert (told["there"], told["recovered"], told["after"]) == ([3], 3, [3, "local"])


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
def test_a_part_that_one_process_cannot_read(tmp_path, failure):
    run(tmp_path, "train(3, ROWS)")
    check_unread(run(tmp_path, UNREAD + f"by = ROWS\nrecover = {failure}\n" + LATEST))


@pytest.mark.linux("/proc/self/fd")
def test_its_part_comes_from_another_process_that_holds_the_same(tmp_path):
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


def test_no_start_from_scratch_where_parts_are_lost(tmp_path, call):
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


OTHERS = """
with start(BY) as checkpointer:
    told["errors"] = [
        raised(lambda: checkpointer.restore_latest(state=state(99, BY))), raised(lambda: checkpointer.restore(1, state=state(99, BY)))
    ]
"""


@pytest.mark.parametrize(
    ("processes", "by", "kinds"),
    [(1, "ROWS", ["CheckpointCorrupt", "CheckpointError"]), (2, "P(None, 'data')", ["Misfit"] * 2)],
)
def test_no_start_from_scratch_where_local_steps_are_for_others(tmp_path, processes, by, kinds):
    """Of another number of processes or other shardings, and nothing is persistent: nothing is deleted."""
    late = 'options_of["persist_policy"] = ckpt.when.every_steps(1000)\n'
    train = """
with start(ROWS) as checkpointer:
    checkpointer.save(1, state=state(1, ROWS))
"""
    run(tmp_path, late + train)
    for told in run(tmp_path, f"{late}BY = {by}\n{OTHERS}", processes, 4 // processes):
        assert [error["type"] for error in told["errors"]] == kinds, told
        assert all("step 1" in error["text"] for error in told["errors"]), told
    for told in run(tmp_path, late + "told['found'] = restored(ROWS)"):
        assert told["found"] == [1, "local"]


def test_a_first_save_that_never_ended_is_no_lost_step(tmp_path):
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


DAMAGED_THERE = """
with start(ROWS, persist_policy=ckpt.when.every_steps(1)) as checkpointer:
    checkpointer.save(3, state(3, ROWS))
    checkpointer.wait_until_finished()
on(0, destroy_persistent)
for case, more in {"writer": {}, "reader": {"read_only": True}}.items():
    with ckpt.Checkpointer(persistent, local_directory=own, options=ckpt.Options(**options_of), **more) as one:
        told[case] = is_at(one.load(3, state(99, ROWS)), 3, ROWS), is_at(one.restore(3, state=state(99, ROWS))["state"], 3, ROWS)
"""


def test_a_load_whose_persistent_copy_is_damaged(tmp_path):
    """The local parts are whole, and a reader gets them, too."""
    for told in run(tmp_path, DAMAGED_THERE):
        assert told == {"writer": [True, True], "reader": [True, True]}, told
