"""An error that one process meets has the same class on all: programs decide by it what to do next."""

from __future__ import annotations

from pathlib import Path

from tests.support.launch import launch, reports

CODE = """
mesh = Mesh(np.array(jax.devices()), ("x",))
def put(value):
    return jax.make_array_from_callback((8,), NamedSharding(mesh, P("x")), lambda at: np.full(8, value, np.float32)[at])
one = directory + "/one"
ckpt.save(one, w=put(1), options=options)
failed = {}
failed["save"] = raised(lambda: ckpt.save(one, w=put(2), options=options))
failed["save_async"] = raised(lambda: ckpt.save_async(one, w=put(2), options=options).result())
for who in range(count):
    value = object() if index == who else 1
    failed[f"unsupported {who}"] = raised(lambda: ckpt.save(directory + "/no", {"w": put(3), "v": value}, options=options))
ckpt.save(directory + "/two", {"w": put(1)}, options=options)
for who in range(count):
    wanted = {"w": put(0), "more": 1} if index == who else {"w": put(0)}
    failed[f"mismatch {who}"] = raised(lambda: ckpt.load(directory + "/two", wanted, options=options))
    path = directory + ("/absent" if index == who else "/two")
    failed[f"absent {who}"] = raised(lambda: ckpt.load(path, {"w": put(0)}, options=options))
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


def test_errors_have_one_class_on_all_processes(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    for index, told in enumerate(reports(launch(CODE, tmp_path / "saved", processes=2, devices=2))):
        assert told["still"] == [1] * len(told["still"])
        for name, error in told["failed"].items():
            assert error is not None, name
            assert error["type"] == CLASSES[name.partition(" ")[0]], (index, name, error)
    first = told["failed"]["save"]["text"]
    assert "process 0 cannot save: CheckpointExists" in first
