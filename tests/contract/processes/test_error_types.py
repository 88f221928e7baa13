"""An error that one process meets has the same class on all: programs decide by it what to do next."""

import pytest

from tests.support.launch import launch, reports

CODE = """
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
    for index, told in enumerate(reports(launch(CODE, tmp_path / "saved", processes=2, devices=2))):
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
told = {}
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
report(**told)
"""


@pytest.mark.parametrize("reader", [0, 1])
def test_a_value_that_only_one_process_read_is_refused_by_all(tmp_path, reader):
    for told in reports(launch(READ_BY_ONE.replace("READER", str(reader)), tmp_path / "run")):
        assert told["refused"]["type"] == "RestoredValueIgnored", told
        assert "was never read" in told["refused"]["text"]
        assert told["refused"]["secs"] < 10
        assert told["read"] is None and told["again"] is None
        assert told["steps"] == [1, 2, 3]
