"""``ckpt.writer``: a checkpoint built piece by piece."""

import tracemalloc
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.testing import assert_same
from tests.support.stores import keys_at
from tests.support.units import MIB


def state(mesh: Any = None) -> dict[str, Any]:
    large = jnp.arange(3 * MIB, dtype=jnp.float32).reshape(1024, -1)
    if mesh is not None:
        large = jax.device_put(large, jax.NamedSharding(mesh, jax.P("data")))
    return {
        "layers": {
            "0": {"w": np.arange(12, dtype=np.int16).reshape(3, 4), "b": jnp.ones(3, jnp.bfloat16)},
            "1": {"w": np.zeros((2, 0)), "b": None, "more": [1, (2.5, "text"), b"bytes"]},
        },
        "large": large,
        "key": jax.random.key(3),
        "empty": {},
    }


def write_in_parts(path: Any, tree: dict[str, Any], **arguments: Any) -> None:
    first, second = tree["layers"]["0"], tree["layers"]["1"]
    with ckpt.writer(path, **arguments) as w:
        w.add("params", {"large": tree["large"]})
        w.add("params", {"layers": {"1": second}})
        w.add("params", {"empty": {}, "key": tree["key"]})
        w.add("params", {"layers": {"0": {"b": first["b"]}}})
        w.add("params", {"layers": {"0": {"w": first["w"]}}})
        w.add("config", ckpt.Json({"a": [1]}))
        w.add("one", np.arange(3))


def test_parts_are_what_one_save_writes(tmp_path, mesh):
    tree = state(mesh)
    items = {"params": tree, "config": ckpt.Json({"a": [1]}), "one": np.arange(3)}
    ckpt.save(tmp_path / "whole", items=items, metadata={"from": "here"})
    write_in_parts(tmp_path / "parts", tree, metadata={"from": "here"})
    whole, parts = ckpt.load(tmp_path / "whole"), ckpt.load(tmp_path / "parts")
    assert_same(parts, whole)
    assert ckpt.verify(tmp_path / "parts").ok
    one, other = ckpt.inspect(tmp_path / "whole"), ckpt.inspect(tmp_path / "parts")
    assert other.metadata == {"from": "here"} and list(other.items) == list(one.items)
    assert parts["params"]["large"].sharding.is_equivalent_to(tree["large"].sharding, 2)
    leaves = {leaf.path: leaf for leaf in one.items["params"].leaves}
    assert {leaf.path: leaf for leaf in other.items["params"].leaves} == leaves
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_in_a_store(store):
    tree = state()
    write_in_parts(store, tree)
    assert_same(ckpt.load(store)["params"], tree)
    assert ckpt.verify(store).ok
    ckpt.save(f"{store}-2", items={"params": tree, "config": ckpt.Json(1), "one": np.arange(3)})
    kinds = [
        {key.partition(".")[0] for key in keys_at(url).list() if "/d/" not in key}
        for url in (store, f"{store}-2")
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("length", [1000, 3 * MIB])
def test_what_was_added_may_be_changed(tmp_path, length, compression):
    """Small parts wait for others, large ones are written at once."""
    values, options = np.zeros(length), ckpt.Options(compression=compression)
    with ckpt.writer(tmp_path / "a", options=options) as w:
        for part in range(4):
            values[:] = part
            w.add("params", {str(part): values})
        values[:] = 99
    found = ckpt.load(tmp_path / "a")["params"]
    assert [np.unique(found[str(part)]).tolist() for part in range(4)] == [[0], [1], [2], [3]]


def test_memory_is_that_of_one_part(tmp_path):
    part_bytes, count = 16 * MIB, 20
    tracemalloc.start()
    try:
        with ckpt.writer(tmp_path / "a", options=ckpt.Options(durable=False)) as w:
            for part in range(count):
                w.add("params", {str(part): np.full(part_bytes, part, np.uint8)})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * MIB + 3 * part_bytes  # TensorStore's cache, and the part
    assert ckpt.verify(tmp_path / "a").ok


def test_small_parts_do_not_make_many_files(tmp_path):
    with ckpt.writer(tmp_path / "a") as w:
        for part in range(300):
            w.add("params", {str(part): np.full(100, part)})
    assert sum(file.is_file() for file in (tmp_path / "a").rglob("*")) < 20
    assert ckpt.load(tmp_path / "a")["params"]["299"][0] == 299


def fail_halfway(path: Any, **arguments: Any) -> None:
    with ckpt.writer(path, **arguments) as w:
        w.add("params", {"a": np.zeros(9 * MIB, np.uint8)})
        raise KeyError("mine")


def test_an_exception_leaves_nothing(store):
    with pytest.raises(KeyError, match="mine"):
        fail_halfway(store)
    assert keys_at(store).list() == []


def test_an_exception_on_disk_leaves_what_was_there(tmp_path):
    ckpt.save(tmp_path / "a", {"x": 1})
    with pytest.raises(KeyError, match="mine"):
        fail_halfway(tmp_path / "a", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert ckpt.load(tmp_path / "a") == {"x": 1}
    with pytest.raises(ckpt.CheckpointExists, match="exists already"), ckpt.writer(tmp_path / "a"):
        pass
    with ckpt.writer(tmp_path / "a", overwrite=True) as w:
        w.add("params", {"x": 2})
    assert ckpt.load(tmp_path / "a") == {"params": {"x": 2}}
    with pytest.raises(ckpt.CheckpointError, match="inside of the with block"):
        w.add("params", {"b": 1})


def test_a_part_that_cannot_be_written_is_the_end(tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def go_on_after_a_failure() -> None:
        with ckpt.writer(tmp_path / "a") as w:
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
                with pytest.raises(OSError, match="large"):
                    w.add("params", {"a": np.zeros(9 * MIB, np.uint8)})
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            with pytest.raises(ckpt.CheckpointError, match="start again"):
                w.add("params", {"b": np.zeros(3)})

    with pytest.raises(ckpt.CheckpointError, match="could not be written") as raised:
        go_on_after_a_failure()
    assert isinstance(raised.value.__cause__, OSError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("item", "value", "where"),
    [
        ("params", {"a": {"x": 2}}, "a/x"),
        ("params", {"new": 1, "a": 5}, "a"),
        ("params", OrderedDict(z=1), "(root)"),
        ("params", {"a.x": 2}, "both be stored as"),
        ("params", ckpt.Json(1), "item 'params'"),
        ("json", ckpt.Json(2), "item 'json'"),
        ("json", {"a": 1}, "item 'json'"),
        ("bare", np.ones(2), "(root)"),
        ("params", {"o": object()}, "object"),
    ],
)
def test_what_is_there_is_refused_and_the_rest_goes_on(tmp_path, item, value, where):
    with ckpt.writer(tmp_path / "a") as w:
        w.add("params", {"a": {"x": np.ones(2)}})
        w.add("json", ckpt.Json(1))
        w.add("bare", np.ones(2))
        with pytest.raises(ckpt.UnsupportedLeaf) as raised:
            w.add(item, value)
        assert where in str(raised.value)
        w.add("params", {"a": {"y": 3}})
    found = ckpt.load(tmp_path / "a")
    assert found["params"]["a"]["y"] == 3 and found["params"]["a"]["x"].tolist() == [1, 1]
    assert list(found["params"]) == ["a"] and found["json"] == 1


def test_wrong_use_is_refused(tmp_path):
    with (
        pytest.raises(ckpt.CheckpointError, match="nothing was added"),
        ckpt.writer(tmp_path / "a"),
    ):
        pass
    with pytest.raises(ckpt.CheckpointError, match="inside of the with"):
        ckpt.writer(tmp_path / "a").add("params", {})
    with pytest.raises(ValueError, match="cannot be the name"), ckpt.writer(tmp_path / "a") as w:
        w.add("a/b", {})
    with pytest.raises(TypeError, match="metadata"):
        ckpt.writer(tmp_path / "a", metadata=object())
    with ckpt.writer(tmp_path / "a") as w:
        w.add("params", {})
    with pytest.raises(ckpt.CheckpointError, match="make another"), w:
        pass


def test_the_metadata_of_a_writer(tmp_path):
    with ckpt.writer(tmp_path / "x", metadata={"a": 1}) as writer:
        writer.add("w", np.ones(2))
        told = {"b": [2]}
        writer.set_metadata(told)
        told["b"].append(3)
        with pytest.raises(TypeError, match="JSON"):
            writer.set_metadata({"c": object()})
    assert ckpt.inspect(tmp_path / "x").metadata == {"b": [2]}
    with pytest.raises(ckpt.CheckpointError, match="inside of the with block"):
        writer.set_metadata({})
