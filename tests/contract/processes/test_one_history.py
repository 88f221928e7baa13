"""One number, one value, over the tiers of several processes: replaced, left and deleted steps, parts that are lost, and a takeover that all know of."""

import pytest

from tests.support.launch import launch, reports
from tests.support.local_tiers import ON_ALL

COMMON = (
    ON_ALL
    + """
import shutil, warnings
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
"""
)

AWAY = """
for step in range(4):
    with start() as c:  # whose end waits for copies
        found = c.restore_latest(state=like())
        assert found is None or found["state"]["n"] == step * 10 - 10
        save(c, step, step * 10)
meet("saved")
# a host goes away with its directory, and the others go on without it
shutil.copytree(own, str(own) + ".away")
with start() as c:
    {back}
    for step in {saved}:
        save(c, step, step * 10 + 1)
meet("went on")
for process in range(count):
    def comes_back():
        shutil.rmtree(own)
        shutil.copytree(str(own) + ".away", own)
    if process < {many}:
        on(process, comes_back)
told["found"] = seen()
told["again"] = seen()
"""


# How many come back, what the others did meanwhile, the steps that they saved then, and what may be there.
LATEST = "c.restore_latest(state=like())['state']"
BACK = [
    (1, "c.rollback_to(1)", "(2, 3, 4)", {1: 10, 2: 21, 3: 31, 4: 41}),
    (3, "c.restore(1, state=like())['state']", "(2, 3, 4)", {1: 10, 2: 21, 3: 31, 4: 41}),
    (1, "c.rollback_to(1)", "()", {0: 0, 1: 10}),
    (3, f"{LATEST}; c.delete(3)", "()", {0: 0, 1: 10, 2: 20}),
    (1, f"{LATEST}; c.delete(2)", "()", {0: 0, 1: 10, 3: 30}),
    (1, f"{LATEST}; save(c, 3, 35, overwrite=True)", "()", {0: 0, 1: 10, 2: 20, 3: 35}),
]


@pytest.mark.parametrize(("many", "back", "saved", "kept"), BACK)
def test_a_host_that_was_away_brings_nothing_back(tmp_path, many, back, saved, kept):
    """Whatever comes back is of the history that the run is on, as far as parts of it are left."""
    code = COMMON + AWAY.replace("{back}", back).replace("{saved}", saved).replace(
        "{many}", str(many)
    )
    told = reports(launch(code, tmp_path / "run", processes=3, devices=1, limit_secs=150))
    allowed = {str(step): value for step, value in ({0: 0} | kept).items()}
    for one in told:
        assert one["found"] == one["again"] == told[0]["found"]
        assert one["found"], one
        assert one["found"].items() <= allowed.items(), one
        if many == 1:  # partners have what one host lost
            assert max(one["found"]) == str(max(kept)), one


# A restore that fails in one process.
SETTING = """
def begin(kind):
    persists = ckpt.Options(timeout_secs=600, local_max_to_keep=4, persist_policy=never if kind == "local" else always)
    local = None if kind == "plain" else Path(f"{directory}/{kind}/local/{index}")
    return ckpt.Checkpointer(f"{directory}/{kind}/steps", local_directory=local, options=persists)

def told_of(call):
    try:
        return [None, call().step]
    except BaseException as error:
        return [type(error).__name__, str(error)]

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
"""


@pytest.mark.parametrize("kind", ["plain", "tiers"])
def test_an_object_refuses_in_one_process_to_be_set(tmp_path, kind):
    """No process goes on from a step that another one did not get, nor is the step taken for damaged."""
    all_told = reports(launch(f"kind = {kind!r}\n{COMMON + SETTING}", tmp_path / "run", devices=1))
    classes = {
        "a value": "ValueError",
        "a file": "FileNotFoundError",
        "Ctrl-C": "KeyboardInterrupt",
    }
    for told in all_told:
        assert told.pop("then") == [1, 3]
        for name, (its_own, (error, text), value, again, older) in told.items():
            bad = classes[name.rpartition(" ")[0]]
            assert error == (bad if its_own else "CheckpointError"), (name, error, text)
            assert its_own or bad in text, (name, text)
            assert (value, again, older) == (-1 if its_own else 20, [2, 20], 1), (name, value)


OVERWRITTEN = """
from pytest import MonkeyPatch
from tests.support import seams
fails = seams.fail(OSError, "the disk is gone")
points = {"commit": {"before": fails}, "write": {"after": fails}}

told["errors"], told["found"], told["again"] = {}, {}, {}
c = start(timeout_secs=600)
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
"""


def test_an_overwrite_that_fails_somewhere_leaves_one_value(tmp_path):
    """In the persistent directory: the old one, in both tiers. In a fast one: the new one. All processes raise."""
    told = reports(launch(COMMON + OVERWRITTEN, tmp_path / "run", limit_secs=200))
    for one in told:
        for name, (found, new, persistent) in one["found"].items():
            assert found == persistent, (name, found, persistent)
            assert (found == new) == (" local " in name), (name, found, new)
        assert one["again"] == {"2": 2, "4": 99}
    for name in told[0]["errors"]:
        both = [one["errors"][name] for one in told]
        assert any(both), (name, both)


FORCED = """
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
"""


def test_a_forced_save_of_what_local_directories_have(tmp_path):
    """It goes to the persistent directory on all processes, or on none."""
    for one in reports(launch(COMMON + FORCED, tmp_path / "run", limit_secs=120)):
        assert not one["again"]
        assert one["persistent"] == {"0": 0, "1": 1}
        assert one["end"] == {"0": 0, "1": 1, "2": 2}


TAKEOVER = """
options = ckpt.Options(timeout_secs=30, durable=False)

def state(value):
    return {"rows": put(np.full((4, 3), value, np.float32))}

def value(tree):
    return [float(shard.data[0, 0]) for shard in tree["rows"].addressable_shards][0]

def start(local=False, **more):
    where = f"{directory}/local/{index}" if local else None
    return ckpt.Checkpointer(
        f"{directory}/steps", local_directory=where, asynchronous=False, options=options, **more
    )

def values():
    with start(read_only=True) as reader:
        return {step: value(reader.load(step, state(0))) for step in reader.all_steps()}

with start(local=True) as old:
    for step in range(4):
        old.save(step, state(step))
    with start() as new:
        told["never restored"] = [raised(lambda: new.save(3, state(9))),
                                  raised(lambda: new.save(0, state(9)))]
        found = new.restore(1, state=state(0))
        told["restored"] = value(found["state"])
        told["still"] = new.all_steps()
        meet("looked")
        new.save(2, state(102))
        told["retired"] = new.all_steps()
        new.save(3, state(103))
        told["values"] = values()
    told["old"] = raised(lambda: old.save(4, state(4)))

# nothing of the branch that was left comes back from local directories
with start(local=True) as checkpointer:
    told["local"] = checkpointer.all_steps()
    found = checkpointer.restore_latest(state=state(0))
    told["newest"] = [found.step, value(found["state"])]
    checkpointer.save(4, state(204))

# past damage, which is set aside for all
if index == 0:
    import shutil
    shutil.rmtree(f"{directory}/local/0")
    os.remove(f"{directory}/steps/4/state/manifest.ocdbt")
meet("damaged")
import warnings
with start() as checkpointer, warnings.catch_warnings():
    warnings.simplefilter("ignore")
    found = checkpointer.restore_latest(state=state(0))
    told["past damage"] = [found.step, value(found["state"])]
    checkpointer.save(4, state(304))
    told["again"] = checkpointer.save(5, state(305))
told["at last"] = values()
"""


def test_all_know_of_a_takeover(tmp_path):
    for told in reports(launch(TAKEOVER, tmp_path / "run", devices=1)):
        assert [one["type"] for one in told["never restored"]] == ["CheckpointExists"] * 2
        assert told["restored"] == 1
        assert told["still"] == [0, 1, 2, 3]
        assert told["retired"] == [0, 1, 2]
        assert told["values"] == {"0": 0, "1": 1, "2": 102, "3": 103}
        assert told["old"]["type"] == "CheckpointError"
        assert "another Checkpointer" in told["old"]["text"]
        assert told["local"] == [0, 1, 2, 3]
        assert told["newest"] == [3, 103]
        assert told["past damage"] == [3, 103]
        assert told["again"] is True
        assert told["at last"] == {"0": 0, "1": 1, "2": 102, "3": 103, "4": 304, "5": 305}
    steps = tmp_path / "run" / "steps"
    assert sorted(path.name for path in (steps / "retired").iterdir()) == ["2", "3"]
    assert [path.name for path in (steps / "damaged").iterdir()] == ["4"]
