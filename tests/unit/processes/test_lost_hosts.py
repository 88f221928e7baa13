"""A lost host costs no step: parts of local steps travel between real processes.

What the persistent directory holds of saved steps is destroyed before the restores that must not read it.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.launch import launch, reports
from tests.support.local_tiers import ON_ALL

COMMON = (
    ON_ALL
    + """
import hashlib, itertools, logging, shutil, threading, warnings
from pathlib import Path
warnings.simplefilter("ignore", RuntimeWarning)
never = ckpt.when.at_steps([0])

def state(step, by):
    rows = np.arange(8 << 12, dtype=np.float32).reshape(8, -1) / 7 + step
    return {"rows": put(rows, by), "everywhere": put(rows[:2, :9], P()), "host": rows[0, :5], "n": step}

def start(by, local=own, **more):
    partners = None if by == P() else "host"
    options = ckpt.Options(**{"timeout_secs": 30, "persist_policy": never, "partners": partners} | more)
    return ckpt.Checkpointer(persistent, local_directory=local, options=options)

def train(last, by, **more):
    with start(by, **more) as checkpointer:
        found = resume(checkpointer, by)
        settle(checkpointer)
        for step in range(found.step + 1 if found else 0, last + 1):
            assert checkpointer.save(step, state(step, by)), step
            checkpointer.wait_until_finished()
            settle(checkpointer)

def settle(checkpointer):
    # until this process has the copies that it is to have; the others meet here too
    checkpointer._run._local._copier.finish(20)
    meet(f"turn{next(turns)}")

def restored(by, local=own, **more):
    # the step that comes back and from where; None if there is none
    with start(by, local, **more) as checkpointer:
        found = resume(checkpointer, by)
        return found and [found.step, "persistent" if Path(found.path).parent == persistent else "local"]

def part(step, of=index):
    (found,) = own.glob(f"run-*/process_{of}-of-{count}/{step}")
    return found

def damage(step):
    file = max(part(step).rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

def lose():
    shutil.rmtree(own)

def everyone(work):
    for process in range(count):
        on(process, work)

def on(process, work):
    # one process does something, and the others wait
    meet(f"turn{next(turns)}")
    if index == process:
        work()
    meet(f"turn{next(turns)}")

def destroy_persistent():
    # what was saved there cannot be read any more
    for path in persistent.glob("[0-9]*/**/*"):
        if path.is_file():
            path.write_bytes(b"destroyed")

def copies():
    return sorted(
        f"{path.parent.name.rpartition('-of')[0]}:{path.name}"
        for path in own.glob(f"run-*/process_{index}-of-*/partner-of_*/[0-9]*")
    )
"""
)

REPLICATED = (
    COMMON
    + """
import grain.python as grain

def data():
    numbers = grain.MapDataset.range(100)[index::count].shuffle(seed=3).repeat()
    few = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(numbers.batch(2).to_iter_dataset(few))

by = P()
train(3, by)
on(0, destroy_persistent)
on(count - 1, lose)
told["lost"] = restored(by)
told["again"] = restored(by), part(3).is_dir()
on(0, lose)
told["the first"] = restored(by)
for process in range(1, count):
    on(process, lose)
with start(by) as checkpointer:  # any call that opens the step gets the part
    told["asked"] = checkpointer.all_steps(), list(checkpointer.inspect(3).items), part(3).is_dir()
    told["loaded"] = checkpointer.load(3)["n"]
for process in range(1, count):
    on(process, lose)
told["all but one"] = restored(by)
train(5, by)
told["went on"] = restored(by)

on(count - 1, lambda: damage(5))
told["damaged"] = restored(by)
told["verified"] = ckpt.verify(part(5)).ok
on(0, lambda: (part(5) / "ckpt.json").write_bytes(b"{"))
told["no record"] = restored(by), ckpt.verify(part(5)).ok

# a pipeline belongs to one process, and its state goes with the parts of the others
batches = data()
with start(by) as checkpointer:
    resume(checkpointer, by)
    for step in range(6, 9):
        next(batches)
        checkpointer.save(step, data=batches, params=state(step, by))
wanted = [next(batches).tolist() for _ in range(3)]
on(count - 1, lose)
batches = data()
with start(by) as checkpointer:
    found = checkpointer.restore_latest(data=batches, params=state(99, by))
    told["pipeline"] = [found.step, found.path.startswith(str(own))]
told["its batches"] = [next(batches).tolist() for _ in range(3)] == wanted

# values that differ from process to process are nobody else's
with start(by) as checkpointer:
    assert checkpointer.restore_latest(data=data(), params=state(99, by))["params"]
    checkpointer.save(9, {"mine": np.arange(3) + index})
on(count - 1, lose)
with start(by) as checkpointer:
    told["own values"] = checkpointer.all_steps()
report(**told)
"""
)


def check_replicated(tmp_path: Path, processes: int) -> None:
    ended = launch(REPLICATED, tmp_path / "run", processes=processes, devices=1, limit_secs=200)
    for told in reports(ended):
        for case in ("lost", "the first", "all but one"):
            assert told[case] == [3, "local"], case
        assert told["again"] == [[3, "local"], True]
        for case in ("went on", "damaged"):
            assert told[case] == [5, "local"], case
        assert told["asked"] == [[0, 3], ["state"], True] and told["loaded"] == 3
        assert told["verified"]
        assert told["no record"] == [[5, "local"], True]
        assert told["pipeline"] == [8, True] and told["its batches"]
        assert told["own values"] == [0]
    text = ended[-1].text
    assert "was missing; it was fetched from process" in text
    assert "was damaged (state/ocdbt.process_0/d/" in text


def test_replicated_state_of_two_processes(tmp_path: Path) -> None:
    check_replicated(tmp_path, 2)


@pytest.mark.slow
def test_replicated_state_of_four_processes(tmp_path: Path) -> None:
    check_replicated(tmp_path, 4)


SHARDED = (
    COMMON
    + """
by = P("data")
train(3, by)
told["copies"] = copies()
on(0, destroy_persistent)
on(count - 1, lose)
told["lost"] = restored(by)
on(0, lose)
told["the first"] = restored(by)
told["changed places"] = restored(by, local=Path(f"{directory}/local/{(index + 1) % count}"))
def forget():
    for path in own.glob("run-*/process_*"):
        if path.name != f"process_{index}-of-{count}":
            shutil.rmtree(path)
everyone(forget)

train(5, by)
told["went on"] = restored(by), copies()
on(count - 1, lambda: damage(5))
told["damaged"] = restored(by), ckpt.verify(part(5)).ok

# a partner that has no room: the step before stays, whole with its copies
with start(by, partner_bytes_per_sec=1 << 20) as checkpointer:
    resume(checkpointer, by)
    settle(checkpointer)
    from ckpt_core._run.tiers import copying
    plain = copying.bring
    def full(*_):
        raise OSError(28, "No space left on device")
    if index == 0:
        copying.bring = full
    for step in (6, 7):
        checkpointer.save(step, state(step, by))
        checkpointer.wait_until_finished()
        settle(checkpointer)
    copying.bring = plain
told["protected"] = sorted(int(path.name) for path in part(7).parent.glob("[0-9]*"))
on(count - 1, lose)  # of whose part of step 7 process 0 has no copy
told["back to it"] = restored(by)
train(8, by)
told["and on"] = restored(by), copies()

# rolled back: no copy of a later step comes back
with start(by) as checkpointer:
    resume(checkpointer, by)
    settle(checkpointer)
    checkpointer.save(9, state(9, by))
    checkpointer.wait_until_finished()
    settle(checkpointer)
    checkpointer.rollback_to(8)
    told["rolled back"] = checkpointer.all_steps(), copies()

# two that are partners of each other, or all in a row, are lost
on(0, lose)
on(1, lose)
with start(by) as checkpointer:
    told["both lost"] = checkpointer.all_steps()
report(**told)
"""
)


def check_sharded(tmp_path: Path, processes: int) -> None:
    ended = launch(SHARDED, tmp_path / "run", processes=processes, devices=1, limit_secs=240)
    for index, told in enumerate(reports(ended)):
        before = (index - 1) % processes  # on one machine, the next process is the partner

        def mine(*steps: int, of: int = before) -> list[str]:
            return [f"partner-of_{of}:{step}" for step in steps]

        assert told["copies"] == mine(2, 3)
        for case in ("lost", "the first", "changed places"):
            assert told[case] == [3, "local"], case
        assert told["went on"] == [[5, "local"], mine(4, 5)]
        assert told["damaged"] == [[5, "local"], True]
        assert told["protected"] == [5, 7]
        assert told["back to it"] == [5, "local"]
        assert told["and on"] == [[8, "local"], mine(7, 8)]
        assert 9 not in told["rolled back"][0] and 8 in told["rolled back"][0]
        assert mine(9)[0] not in told["rolled back"][1]
        assert told["both lost"] == [0]
    assert "No space left on device" in ended[0].text


def test_shards_of_two_processes(tmp_path: Path) -> None:
    check_sharded(tmp_path, 2)


@pytest.mark.slow
def test_shards_of_four_processes(tmp_path: Path) -> None:
    check_sharded(tmp_path, 4)


SLOW = (
    COMMON
    + """
by = P("data")
train(1, by)
with start(by, partner_bytes_per_sec=40_000) as checkpointer:
    resume(checkpointer, by)
    settle(checkpointer)
    for step in range(2, 6):
        checkpointer.save(step, state(step, by))
        checkpointer.wait_until_finished()
    told["still copies"] = checkpointer._run._local._copier.busy
    told["kept"] = checkpointer.all_steps()
# the end waited for the copies of the newest step
on(0, destroy_persistent)
on(1, lose)
told["newest"] = restored(by)

with start(by) as checkpointer:
    resume(checkpointer, by)
    settle(checkpointer)
    if index == 1:
        checkpointer._run._local._peers.server.close()
    meet("away")
    for step in (6, 7):
        checkpointer.save(step, state(step, by))
        checkpointer.wait_until_finished()
    told["without copies"] = checkpointer.all_steps()
on(1, lambda: shutil.rmtree(part(7)))
options = ckpt.Options(timeout_secs=30, partners="host")
reader = ckpt.Checkpointer(persistent, local_directory=own, options=options, read_only=True)
told["reader"] = reader.all_steps()
reader.close()
told["itself"] = raised(lambda: start(by, partners=lambda index, count: 0))
report(**told)
"""
)


def test_partners_that_are_slow_or_away_delay_nothing(tmp_path: Path) -> None:
    ended = launch(SLOW, tmp_path / "run", devices=1)
    first, second = reports(ended)
    assert first["without copies"] == second["without copies"]
    for told in (first, second):
        assert told["still copies"]
        assert told["kept"] == [0, 1, 2, 5]  # the last with copies, the copied, and the newest
        assert told["newest"] == [5, "local"]
        assert told["without copies"] in ([0, 5, 7], [0, 5, 6, 7])  # process 1 could copy step 6
        # the one of which the reader lacks its part is not read, nor is that part brought to it
        assert told["reader"][:2] == [0, 5] and 7 not in told["reader"]
        assert told["itself"]["type"] == "CheckpointError"
        assert "process 0 has no partner" in told["itself"]["text"]
    assert "no copy of the part of process 1 was made here" in ended[0].text


KEPT = (
    COMMON
    + """
from ckpt_core._run.tiers import copying
by = P("data")
at_once = copying.bring

def slowly(*_):
    raise OSError(28, "No space left on device")

def save(checkpointer, step, **more):
    checkpointer.save(step, state(step, by), **more)
    checkpointer.wait_until_finished()
    settle(checkpointer)

def mine():
    return sorted(int(path.name) for path in own.glob(f"run-*/process_{index}-of-*/[0-9]*"))

# a run ends while the copies of its newest step are lacking: they are made by the next one, and
# until they are, the step before stays
train(1, by)
copying.bring = slowly
with start(by) as checkpointer:
    resume(checkpointer, by)
    save(checkpointer, 2)
    told["lacking"] = mine(), copies()
with start(by) as checkpointer:
    resume(checkpointer, by)
    settle(checkpointer)
    save(checkpointer, 3)
    told["after a restart"] = mine(), copies()
    save(checkpointer, 4)
    told["and later"] = mine(), copies()
copying.bring = at_once

# so does what a rollback leaves
lose()
meet("all lost")
train(0, by)
with start(by) as checkpointer:
    resume(checkpointer, by)
    settle(checkpointer)
    save(checkpointer, 1)
    save(checkpointer, 2)
    checkpointer.rollback_to(1)
    copying.bring = slowly
    save(checkpointer, 2)
    told["rolled back"] = mine(), copies()
    copying.bring = at_once
    save(checkpointer, 3)
    told["copied"] = mine(), copies()
    # copies of a step are none of another one of its number
    copying.bring = slowly
    save(checkpointer, 3, overwrite=True)
    told["saved once more"] = mine(), copies()
    copying.bring = at_once

# to write and verify a copy may take long, and the end waits for it
copying._STALLED_SECS = 0.5
def after_a_while(key, pieces, target):
    def may_commit():
        time.sleep(1.5)
        target.may_commit()
    return at_once(key, pieces, target._replace(may_commit=may_commit))
copying.bring = after_a_while
with start(by) as checkpointer:
    found = resume(checkpointer, by)
    checkpointer.save(4, state(4, by))
told["waited"] = copies()
copying.bring = at_once

# who got its part from another one, which wrote it, offers it to its partner all the same
lose()
meet("all lost again")
same_everywhere = dict(by=P(), partners="host")
with start(**same_everywhere) as checkpointer:
    checkpointer.save(6, state(6, P()))
on(1, lose)
on(0, lambda: [shutil.rmtree(path) for path in own.glob("run-*/process_*/partner-of_*")])
for case in ("fetched", "in the next run"):
    with start(**same_everywhere) as checkpointer:
        resume(checkpointer, P())
        settle(checkpointer)
        told[case] = copies()
    on(0, lambda: [shutil.rmtree(path) for path in own.glob("run-*/process_*/partner-of_*")])

# who has not set it is named
with start(by, partners="host" if index == 0 else None) as checkpointer:
    resume(checkpointer, by)
    save(checkpointer, 7)
report(**told)
"""
)


def test_a_step_with_copies_stays_until_another_has_them(tmp_path: Path) -> None:
    ended = launch(KEPT, tmp_path / "run", devices=1)
    for index, told in enumerate(reports(ended)):

        def of_the_other(*steps: int, other: int = 1 - index) -> list[str]:
            return [f"partner-of_{other}:{step}" for step in steps]

        assert told["lacking"] == [[1, 2], of_the_other(1)]
        assert told["after a restart"] == [[1, 3], of_the_other(1)]
        assert told["and later"] == [[1, 4], of_the_other(1)]
        assert told["rolled back"] == [[1, 2], of_the_other(1)]
        assert told["copied"] == [[1, 3], of_the_other(1, 3)]
        assert told["saved once more"][0] == [1, 3]
        assert told["waited"][-1:] == of_the_other(4)
        assert told["fetched"] == told["in the next run"] == of_the_other(6)
    assert "is set here, but not on processes [1]: no copies are made" in ended[0].text


ALARM = (
    COMMON
    + """
by = P()
train(2, by)
on(1, lose)
from ckpt_core._run.tiers import fetch
# as from a file of the user's
exec(compile("def handler(*_): raise TimeoutError('an alarm')", "/home/user/train.py", "exec"))
plain = fetch.bring
def slowly(key, pieces, target):
    def some(position):
        for piece in pieces(position):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            time.sleep(5)
            yield piece
    return plain(key, some, target)
checkpointer = start(by)
if index == 1:
    signal.signal(signal.SIGALRM, handler)
    fetch.bring = slowly
told["first"] = raised(lambda: resume(checkpointer, by))
fetch.bring = plain
found = resume(checkpointer, by)
told["then"] = found.step, found.path.startswith(str(own))
checkpointer.close()
report(**told)
"""
)


def test_an_exception_of_a_signal_handler_is_no_damage(tmp_path: Path) -> None:
    """It must not lead back to an older step."""
    told = reports(launch(ALARM, tmp_path / "run", devices=1))
    assert told[1]["first"]["type"] == "TimeoutError" and told[0]["first"] is not None
    assert [one["then"] for one in told] == [[2, True]] * 2


KILLED = (
    COMMON
    + """
from ckpt_core._run.tiers import copying
by = P("data")
train(2, by)
leaving = [0]
checkpointer = start(by)
resume(checkpointer, by)
settle(checkpointer)
plain = copying.bring
def dying(key, pieces, target):
    def some(position):
        for piece in pieces(position):
            yield piece
            if position > 2:
                meet("copied")  # the other one has its copy
                kill()
    return plain(key, some, target)
if index == 1:
    copying.bring = dying
checkpointer.save(3, state(3, by))
checkpointer.wait_until_finished()
if index == 1:
    time.sleep(60)  # its other thread ends it
if index == 0:
    while not any(copy.endswith(":3") for copy in copies()):
        time.sleep(0.02)
meet("copied")
report(copies=copies())
"""
)

AGAIN = (
    COMMON
    + """
by = P("data")
told["left"] = len(list(own.rglob(".ckpt-tmp.*")))
on(0, destroy_persistent)
on(1, lose)
told["restored"] = restored(by)
train(4, by)
told["then"] = restored(by)
told["leftovers"] = len(list(own.rglob(".ckpt-tmp.*")))
report(**told)
"""
)


@pytest.mark.faults
def test_one_is_killed_while_it_copies(tmp_path: Path) -> None:
    """Then the step is whole in the own parts, and a lost host can have it from the other copy."""
    ended = launch(KILLED, tmp_path / "run", devices=1)
    assert ended[1].status == -signal.SIGKILL
    for index, told in enumerate(reports(launch(AGAIN, tmp_path / "run", devices=1))):
        assert told["left"] == index  # half a copy, under a hidden name
        assert told["restored"] == [3, "local"]  # process 0 has the copy of the part that was lost
        assert told["then"] == [4, "local"]
        assert told["leftovers"] == 0
