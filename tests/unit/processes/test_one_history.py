"""One number, one value, over the tiers of several processes: replaced, left and deleted steps, and parts that are lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import launch, reports
from tests.support.local_tiers import ON_ALL

COMMON = (
    ON_ALL
    + """
import logging, shutil, warnings
warnings.simplefilter("ignore", RuntimeWarning)
never, always = ckpt.when.at_steps([0]), ckpt.when.every_steps(1)
by = P("data")

def state(value, spec=by):
    rows = np.arange(24 << 8, dtype=np.float32).reshape(24, -1) + value
    return {"rows": put(rows, spec), "n": value}

def like(dtype=np.float32):
    sharding = NamedSharding(mesh, by)
    return {"rows": jax.ShapeDtypeStruct((24, 256), dtype, sharding=sharding), "n": 0}

def start(policy=never, local=own, **more):
    set_ = {"timeout_secs": 30, "persist_policy": policy, "partners": "host", "local_max_to_keep": 4}
    only = more.pop("read_only", False)
    options = ckpt.Options(**set_ | more)
    return ckpt.Checkpointer(persistent, local_directory=local, options=options, read_only=only)

def save(checkpointer, step, value, **more):
    assert checkpointer.save(step, state(value), metadata=value, **more), step
    checkpointer.wait_until_finished()

def settle(checkpointer):
    checkpointer._run._local._copier.finish(20)
    meet(f"turn{next(turns)}")

def on(process, work):
    meet(f"turn{next(turns)}")
    if index == process:
        work()
    meet(f"turn{next(turns)}")

def seen(local=own, policy=never, **more):
    # all that a restart reports of its steps, which must agree
    with start(policy, local, **more) as checkpointer:
        steps = checkpointer.all_steps()
        values = {step: checkpointer.load(step, like())["n"] for step in steps}
        infos = {step: checkpointer.inspect(step).metadata for step in steps}
        assert infos == values, (infos, values)
        found = checkpointer.restore_latest(state=like())
        if found is None:
            assert not steps
            return {}
        tree = found["state"]
        assert (found.step, tree["n"]) == max(values.items()), (found.step, tree["n"], values)
        for shard in tree["rows"].addressable_shards:
            wanted = np.arange(24 << 8, dtype=np.float32).reshape(24, -1) + tree["n"]
            assert np.array_equal(np.asarray(shard.data), wanted[shard.index]), found.step
        return {str(step): value for step, value in values.items()}

def part(step, folder=None):
    (found,) = own.glob(f"run-*/{folder or f'process_{index}-of-{count}'}/{step}")
    return found

def flip(path):
    file = max(path.rglob("d/*"), key=lambda one: one.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

def lose(step):
    shutil.rmtree(part(step))
"""
)

REPLACED = (
    COMMON
    + """
c = start(always)
save(c, 4, 40)
save(c, 5, 50)
settle(c)
meet("saved")
# the job dies before copies of the new save are made
c._run._local._copier.copy = lambda step, token: None
save(c, 5, 55, overwrite=True)
c._run._local._copier._now = (-1, "")
c._run._local._copier._state = "idle"
c.close()
meet("replaced")
on(1, lambda: lose(5))
with start(always, read_only=True) as reader:
    told["read"] = reader.load(5, like())["n"]
told["first"] = seen(policy=always)
told["again"] = seen(policy=always)
told["part"] = json.loads((part(5) / "ckpt.json").read_text())["record"]["metadata"] if index == 0 else 55
report(**told)
"""
)


def test_a_replaced_step_of_which_a_part_is_lost(tmp_path: Path) -> None:
    """The persistent copy of the new save counts, and not what partners have of the old one."""
    for one in reports(launch(REPLACED, tmp_path / "run")):
        assert one["read"] == 55
        assert one["first"] == one["again"] == {"4": 40, "5": 55}
        assert one["part"] == 55, "the good new part was replaced by the old one"


AWAY = (
    COMMON
    + """
with start() as c:
    for step in range(4):
        save(c, step, step * 10)
        settle(c)
meet("saved")
# a host goes away with its directory, and the others go on without it
shutil.copytree(own, str(own) + ".away")
with start() as c:
    {back}
    told["steps"] = c.all_steps()
    for step in {saved}:
        save(c, step, step * 10 + 1)
        settle(c)
meet("went on")
for process in range(count):
    def comes_back():
        shutil.rmtree(own)
        shutil.copytree(str(own) + ".away", own)
    if process < {many}:
        on(process, comes_back)
told["found"] = seen()
told["again"] = seen()
report(**told)
"""
)


BACK = [
    ("c.rollback_to(1)", "(2, 3, 4)", {1: 10, 2: 21, 3: 31, 4: 41}),
    ("c.restore(1, state=like())['state']", "(2, 3, 4)", {1: 10, 2: 21, 3: 31, 4: 41}),
    ("c.rollback_to(1)", "()", {0: 0, 1: 10}),
    ("c.restore_latest(state=like())['state']; c.delete(3)", "()", {0: 0, 1: 10, 2: 20}),
    ("c.restore_latest(state=like())['state']; c.delete(2)", "()", {0: 0, 1: 10, 3: 30}),
]


@pytest.mark.parametrize(
    ("many", "back", "saved", "kept"),
    [
        pytest.param(many, *case, marks=pytest.mark.slow if (many == 1) == nth % 2 else [])
        for nth, case in enumerate(BACK)
        for many in (1, 3)
    ],
)
def test_a_host_that_was_away_brings_nothing_back(
    tmp_path: Path, many: int, back: str, saved: str, kept: dict[int, int]
) -> None:
    """Whatever comes back is of the history that the run is on, as far as parts of it are left."""
    code = AWAY.replace("{back}", back).replace("{saved}", saved).replace("{many}", str(many))
    told = reports(launch(code, tmp_path / "run", processes=3, devices=1, limit_secs=150))
    allowed = {str(step): value for step, value in ({0: 0} | kept).items()}
    for one in told:
        assert one["found"] == one["again"] == told[0]["found"]
        assert one["found"], one
        assert one["found"].items() <= allowed.items(), one
        if many == 1:  # partners have what one host lost
            assert max(one["found"]) == str(max(kept)), one


DAMAGED = (
    COMMON
    + """
with start(ckpt.when.every_steps(2)) as c:
    for step in range(5):
        save(c, step, step * 10)
        settle(c)
meet("saved")
on(0, lambda: flip(part(4)))
on(1, lambda: lose(4))
on(2, lambda: shutil.rmtree(own))
told["found"] = seen(policy=ckpt.when.every_steps(2))
told["again"] = seen(policy=ckpt.when.every_steps(2))
# two hosts change places
import pathlib
meet("swap")
if index == 0:
    one, other = (pathlib.Path(f"{directory}/local/{n}") for n in (0, 1))
    one.rename(str(one) + ".x"); other.rename(one); pathlib.Path(str(one) + ".x").rename(other)
meet("swapped")
told["swapped"] = seen(policy=ckpt.when.every_steps(2))
report(**told)
"""
)


def test_parts_lost_flipped_wiped_and_swapped(tmp_path: Path) -> None:
    told = reports(launch(DAMAGED, tmp_path / "run", processes=4, devices=1, limit_secs=150))
    for one in told:
        assert one["found"].get("4") == one["again"].get("4") == one["swapped"].get("4") == 40, one
        for name in ("found", "again", "swapped"):
            assert all(value == int(step) * 10 for step, value in one[name].items()), one


LEFT = (
    COMMON
    + """
class Own(Exception):
    pass

def left(leaver, call):
    began = time.monotonic()
    error = None
    try:
        with start(timeout_secs=60) as c:
            c.restore_latest(state=like())["state"]
            if index == leaver:
                raise Own("its data ended")
            call(c)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return [error, time.monotonic() - began]

with start() as c:
    save(c, 1, 10)
    save(c, 2, 20)
meet("saved")
calls = {
    "save": lambda c: (c.save(3, state(30)), c.wait_until_finished()),
    "delete": lambda c: c.delete(2),
    "roll back": lambda c: c.rollback_to(1),
    "restore": lambda c: c.restore(1, state=like()),
    "list": lambda c: [c.all_steps() for _ in range(50)] and c.restore_latest(state=like()),
}
told["left"], told["later"] = {}, {}
for name, call in calls.items():
    for leaver in {leavers}:
        # no process meets another in between: the rounds alone bring them together again
        told["left"][f"{name} {leaver}"] = left(leaver, call)
        told["later"][f"{name} {leaver}"] = seen()
report(**told)
"""
)


@pytest.mark.parametrize(
    ("processes", "leavers"), [pytest.param(2, "(0, 1)", marks=pytest.mark.slow), (3, "(0, 2)")]
)
def test_others_hear_soon_of_a_process_that_left(
    tmp_path: Path, processes: int, leavers: str
) -> None:
    """By an exception out of the ``with`` block: not after Options.timeout_secs, and all can go on together."""
    code = LEFT.replace("{leavers}", leavers)
    told = reports(launch(code, tmp_path / "run", processes=processes, devices=1, limit_secs=200))
    for name, (error, secs) in [item for one in told for item in one["left"].items()]:
        assert error is not None, name
        assert "Own: its data ended" in error, (name, error)
        assert secs < 20, (name, secs, error)
    for one in told:
        assert one["later"] == told[0]["later"]
        assert all(steps == {"1": 10, "2": 20} for steps in one["later"].values()), one["later"]


REFUSED = (
    COMMON
    + """
with start() as c:
    save(c, 1, 10)
    save(c, 2, 20)
meet("saved")
reader = start(timeout_secs=60)
odd = index == count - 1
calls = {
    "other leaves": lambda c: c.restore(2, state=like(), only="n" if odd else "rows"),
    "other dtypes": lambda c: c.restore(
        2, state=like(np.float16 if odd else np.float32), cast=True),
    "other shapes": lambda c: c.restore(
        2, state={"rows": jax.ShapeDtypeStruct((4, 4), np.float32)} if odd else like()),
    "latest, other dtypes": lambda c: c.restore_latest(
        state=like(np.float16 if odd else np.float32), cast=True),
}
told["refused"], told["later"] = {}, {}
for name, call in calls.items():
    told["refused"][name] = raised(lambda: call(reader))
    meet(f"turn{next(turns)}")
    found = reader.restore_latest(state=like())
    told["later"][name] = [found.step, found["state"]["n"]]
save(reader, 3, 30)
told["saved"] = reader.all_steps()
reader.close()
report(**told)
"""
)


@pytest.mark.parametrize("processes", [2, 3])
def test_a_refused_restore_leaves_no_process_alone(tmp_path: Path, processes: int) -> None:
    told = reports(
        launch(REFUSED, tmp_path / "run", processes=processes, devices=1, limit_secs=200)
    )
    for one in told:
        for name, error in one["refused"].items():
            assert error is not None, name
            assert error["secs"] < 25, (name, error)
            assert error["type"] != "BarrierTimeout", (name, error)
        assert all(found == [2, 20] for found in one["later"].values()), one["later"]
        assert one["saved"] == [1, 2, 3] or one["saved"] == [0, 1, 2, 3], one["saved"]


# A restore that fails in one process, or in several for different reasons.

OPEN = (
    COMMON
    + """
def begin(kind):
    persists = ckpt.Options(timeout_secs=30, local_max_to_keep=4, persist_policy=never if kind == "local" else always)
    local = None if kind == "plain" else Path(f"{directory}/{kind}/local/{index}")
    return ckpt.Checkpointer(f"{directory}/{kind}/steps", local_directory=local, options=persists)

def told_of(call):
    began = time.monotonic()
    try:
        result = [None, call().step]
    except BaseException as error:
        result = [type(error).__name__, str(error)]
    return [*result, time.monotonic() - began]
"""
)

SETTING = (
    OPEN
    + """
class Box:
    def __init__(self, value, bad=""):
        self.value, self.bad = value, bad
    def get_state(self):
        return {"value": self.value}
    def set_state(self, state):
        if self.bad and state["value"] > 0:
            if self.bad == "a file":
                np.load(f"{directory}/its data, which is gone")
            raise {"a value": ValueError, "Ctrl-C": KeyboardInterrupt}[self.bad](self.bad)
        self.value = state["value"]

with begin(kind) as c:
    for step in (1, 2):
        c.save(step, state=state(step), box=Box(step * 10))
for bad in ("a value", "a file", "Ctrl-C"):
    for who in range(count):
        with begin(kind) as c:
            box, sound = Box(-1, bad if index == who else ""), Box(-1)
            found = told_of(lambda: c.restore_latest(state=like(), box=box))
            again = [c.restore_latest(state=like(), box=sound).step, sound.value]
            told[f"{bad} {who}"] = [index == who, found, box.value, again, c.restore(1, box=sound).step]
with begin(kind) as c:
    c.restore(1, state=like(), box=Box(-1))["state"]
    c.save(3, box=Box(30), state=state(3))
with begin(kind) as c:
    told["then"] = c.all_steps()
report(**told)
"""
)


@pytest.mark.parametrize("kind", ["plain", "local", "tiers"])
def test_an_object_refuses_in_one_process_to_be_set(tmp_path: Path, kind: str) -> None:
    """No process goes on from a step that another one did not get, nor is the step taken for damaged."""
    all_told = reports(launch(f"kind = {kind!r}\n{SETTING}", tmp_path / "run", devices=1))
    classes = {
        "a value": "ValueError",
        "a file": "FileNotFoundError",
        "Ctrl-C": "KeyboardInterrupt",
    }
    for told in all_told:
        assert told.pop("then") == [1, 3]
        for name, (its_own, (error, text, secs), value, again, older) in told.items():
            bad = classes[name.rpartition(" ")[0]]
            assert error == (bad if its_own else "CheckpointError"), (name, error, text)
            assert its_own or bad in text, (name, text)
            assert secs < 10, name
            assert (value, again, older) == (-1, [2, 20], 1), (name, value, again, older)


DIFFERENT = (
    OPEN
    + """
def failing(kind):
    def fail(*_):
        if kind == "file":
            np.load(f"{directory}/nowhere")
        raise {"damage": ckpt.CheckpointCorrupt, "gone": ckpt.CheckpointNotFound,
               "Ctrl-C": KeyboardInterrupt}[kind](kind)
    return fail

with begin("plain") as c:
    for step in (1, 2):
        c.save(step, state=state(step))
for kinds in (("damage", "file"), ("file", "damage"), ("gone", "damage"), ("damage", "gone"),
              ("damage", "Ctrl-C"), ("damage", "damage")):
    with begin("plain") as c:
        open_, c._run._steps.open = c._run._steps.open, lambda step, *more, **options: (
            failing(kinds[index])() if step == 2 else open_(step, *more, **options))
        found = told_of(lambda: c.restore_latest(state=like()))
        c._run._steps.open = open_
        told[" ".join(kinds)] = [*found, c.restore_latest(state=like()).step]
report(**told)
"""
)


def test_processes_that_fail_for_different_reasons_go_one_way(tmp_path: Path) -> None:
    """Only a step that is damaged, and nothing else, is skipped: in all processes, or in none."""
    names = {
        "damage": "CheckpointCorrupt",
        "gone": "CheckpointNotFound",
        "file": "FileNotFoundError",
        "Ctrl-C": "KeyboardInterrupt",
    }
    all_told = reports(launch(DIFFERENT, tmp_path / "run", devices=1))
    for index, told in enumerate(all_told):
        assert told.pop("damage damage")[:2] == [None, 1]
        for kinds, (error, text, secs, again) in told.items():
            kind = kinds.split(" ")[index]
            assert error == names[kind], (kinds, error, text)
            assert secs < 10, kinds
            assert again == 2, kinds


OVERWRITTEN = (
    COMMON
    + """
from pytest import MonkeyPatch
from tests.support import seams
fails = seams.fail(OSError, "the disk is gone")
points = {"commit": {"before": fails}, "write": {"after": fails}}

told["errors"], told["found"], told["again"] = {}, {}, {}
c = start(timeout_secs=30)
save(c, 2, 2, force=True)
save(c, 4, 4, force=True)
value = 4
for who in range(count):
    for where in ("persistent", "local"):
        for point in ("commit", "write") if who == 0 else ("write",):
            name = f"{point} {where} {who}"
            patch, place = MonkeyPatch(), persistent if where == "persistent" else own
            if index == who:
                seams.at(patch, point, where=seams.below(place), **points[point])
            began = time.monotonic()
            told["errors"][name] = raised(lambda: save(c, 4, value + 1, overwrite=True))
            patch.undo()
            meet(f"turn{next(turns)}")
            value += 1
            with start(read_only=True) as reader:
                told["found"][name] = [reader.load(4, like())["n"], value]
            with ckpt.Checkpointer(persistent, read_only=True) as tool:
                told["found"][name].append(tool.load(4, like())["n"])
c.close()
told["end"] = seen()
with start() as c:
    c.restore_latest(state=like())["state"]
    save(c, 4, 99, overwrite=True)
told["again"] = seen()
report(**told)
"""
)


def test_an_overwrite_that_fails_somewhere_leaves_one_value(tmp_path: Path) -> None:
    """In the persistent directory: the old one, in both tiers. In a fast one: the new one. All processes raise."""
    told = reports(launch(OVERWRITTEN, tmp_path / "run", processes=2, limit_secs=200))
    for one in told:
        for name, (found, new, persistent) in one["found"].items():
            assert found == persistent, (name, found, persistent)
            assert (found == new) == (" local " in name), (name, found, new)
        assert one["again"] == {"2": 2, "4": 99}
    for name in told[0]["errors"]:
        both = [one["errors"][name] for one in told]
        assert any(both), (name, both)
        assert all(error is None or error["secs"] < 25 for error in both), both


SLOW_RETENTION = (
    COMMON
    + """
from ckpt_core._run.retention import Retention
apply = Retention.apply
def slow(*arguments, **more):
    return (meet("went on") if index == 0 else None) or apply(*arguments, **more)

with start() as c:
    save(c, 2, 2, force=True)
    save(c, 4, 4, force=True)
    Retention.apply = slow
    told["error"] = raised(lambda: save(c, 4, 5, overwrite=True))
    meet("went on")
    Retention.apply = apply
told["end"] = seen()
report(**told)
"""
)


def test_an_overwrite_does_not_wait_for_retention(tmp_path: Path) -> None:
    """Process 0 deletes until the others have gone on."""
    for one in reports(launch(SLOW_RETENTION, tmp_path / "run", processes=2, limit_secs=200)):
        assert one["error"] is None, one["error"]
        assert one["end"] == {"2": 2, "4": 5}


FORCED = (
    COMMON
    + """
with start() as c:
    save(c, 0, 0)
    for forced in (False, True):  # perhaps before the first has ended
        assert c.save(1, state(1), metadata=1, force=forced)
    c.wait_until_finished()
    told["again"] = c.save(1, state(2), force=True)
    save(c, 2, 2)
meet("saved")
with ckpt.Checkpointer(persistent, read_only=True) as tool:
    told["persistent"] = {str(step): tool.load(step, like())["n"] for step in tool.all_steps()}
told["end"] = seen()
report(**told)
"""
)


def test_a_forced_save_of_what_local_directories_have(tmp_path: Path) -> None:
    """It goes to the persistent directory on all processes, or on none."""
    for one in reports(launch(FORCED, tmp_path / "run", processes=2, limit_secs=120)):
        assert not one["again"]
        assert one["persistent"] == {"0": 0, "1": 1}
        assert one["end"] == {"0": 0, "1": 1, "2": 2}
