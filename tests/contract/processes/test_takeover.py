"""Several processes take over together: process 0 decides what makes way, and all know of it."""

from tests.support.launch import launch, reports

JOURNEY = """
options = ckpt.Options(timeout_secs=30, durable=False)
told = {}

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
report(**told)
"""


def test_two_processes(tmp_path):
    for told in reports(launch(JOURNEY, tmp_path / "run", processes=2, devices=1)):
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
