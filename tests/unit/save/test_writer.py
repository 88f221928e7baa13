"""``ckpt.writer``: a checkpoint built piece by piece."""

from __future__ import annotations

import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt_core as ckpt
from ckpt_core import _processes
from ckpt_core._processes import Processes
from ckpt_core._save import pieces
from ckpt_core._tree import flatten, unflatten
from ckpt_core._tree.grow import GrownTree
from tests.support import seams
from tests.support.stores import (  # noqa: F401 (fixtures)
    keys_at,
    make_s3_url,
    make_server,
    make_store,
)

MIB = 1024 * 1024


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


def parts_of(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"large": tree["large"]},
        {"layers": {"1": tree["layers"]["1"]}},
        {"empty": {}, "key": tree["key"]},
        {"layers": {"0": {"b": tree["layers"]["0"]["b"]}}},
        {"layers": {"0": {"w": tree["layers"]["0"]["w"]}}},
    ]


def plain(tree: Any) -> Any:
    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, (np.ndarray, jax.Array)):
            return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()
        return leaf

    return jax.tree.map(one, tree)


def write_in_parts(path: Any, tree: dict[str, Any], **arguments: Any) -> None:
    with ckpt.writer(path, **arguments) as w:
        for part in parts_of(tree):
            w.add("params", part)
        w.add("config", ckpt.Json({"a": [1]}))
        w.add("one", np.arange(3))


def test_parts_are_what_one_save_writes(tmp_path: Path) -> None:
    tree = state()
    items = {"params": tree, "config": ckpt.Json({"a": [1]}), "one": np.arange(3)}
    ckpt.save(tmp_path / "whole", items=items, metadata={"from": "here"})
    write_in_parts(tmp_path / "parts", tree, metadata={"from": "here"})
    whole, parts = ckpt.load(tmp_path / "whole"), ckpt.load(tmp_path / "parts")
    assert plain(parts) == plain(whole)
    assert ckpt.verify(tmp_path / "parts").ok
    one, other = ckpt.inspect(tmp_path / "whole"), ckpt.inspect(tmp_path / "parts")
    assert other.metadata == {"from": "here"} and list(other.items) == list(one.items)
    leaves = {leaf.path: leaf for leaf in one.items["params"].leaves}
    assert {leaf.path: leaf for leaf in other.items["params"].leaves} == leaves
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_sharded_arrays_keep_their_sharding(tmp_path: Path, mesh: Any) -> None:
    tree = state(mesh)
    write_in_parts(tmp_path / "a", tree)
    large = ckpt.load(tmp_path / "a", item="params")["large"]
    assert large.sharding.is_equivalent_to(tree["large"].sharding, 2)
    assert np.array_equal(large, tree["large"])


def test_orbax_reads_it(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    with ckpt.writer(tmp_path / "a") as w:
        w.add("params", {"layers": {"0": {"w": np.arange(4)}}})
        w.add("params", {"layers": {"1": {"w": np.arange(5.0)}}})
    found = ocp.StandardCheckpointer().restore(tmp_path / "a" / "params")
    assert found["layers"]["1"]["w"].tolist() == [0, 1, 2, 3, 4]
    assert found["layers"]["0"]["w"].tolist() == [0, 1, 2, 3]


def test_in_a_store(store: str) -> None:
    tree = state()
    write_in_parts(store, tree)
    assert plain(ckpt.load(store)["params"]) == plain(tree)
    assert ckpt.verify(store).ok
    ckpt.save(f"{store}-2", items={"params": tree, "config": ckpt.Json(1), "one": np.arange(3)})
    kinds = [
        {key.partition(".")[0] for key in keys_at(url).list() if "/d/" not in key}
        for url in (store, f"{store}-2")
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("small", [True, False])
def test_what_was_added_may_be_changed(tmp_path: Path, monkeypatch: Any, small: bool) -> None:
    if not small:
        monkeypatch.setattr(pieces, "_SMALL_ADD_BYTES", 0)
    values = np.zeros(1000)
    with ckpt.writer(tmp_path / "a") as w:
        for part in range(4):
            values[:] = part
            w.add("params", {str(part): values})
        values[:] = 99
    found = ckpt.load(tmp_path / "a")["params"]
    assert [set(found[str(part)].tolist()) for part in range(4)] == [{0.0}, {1.0}, {2.0}, {3.0}]


def test_memory_is_that_of_one_part(tmp_path: Path) -> None:
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


def test_small_parts_do_not_make_many_files(tmp_path: Path) -> None:
    with ckpt.writer(tmp_path / "a") as w:
        for part in range(300):
            w.add("params", {str(part): np.full(100, part)})
    assert sum(file.is_file() for file in (tmp_path / "a").rglob("*")) < 20
    assert ckpt.load(tmp_path / "a")["params"]["299"][0] == 299


def test_small_parts_wait_only_so_long(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(pieces, "_WAITING_BYTES", 2000)
    written: list[int] = []
    put = (pieces.ArrayWriter, "put")
    seams.at(monkeypatch, put, before=lambda _, arrays: written.append(len(arrays)))
    with ckpt.writer(tmp_path / "a") as w:
        for part in range(9):
            w.add("params", {str(part): np.full(100, part)})
            w.add("other", {str(part): np.full(100, part)})
    assert len(written) > 6 and sum(written) == 18
    assert ckpt.verify(tmp_path / "a").ok


def fail_halfway(path: Any, **arguments: Any) -> None:
    with ckpt.writer(path, **arguments) as w:
        w.add("params", {"a": np.zeros(9 * MIB, np.uint8)})
        raise KeyError("mine")


def test_an_exception_leaves_nothing(store: str) -> None:
    with pytest.raises(KeyError, match="mine"):
        fail_halfway(store)
    assert keys_at(store).list() == []


def test_an_exception_on_disk_leaves_what_was_there(tmp_path: Path) -> None:
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


def test_a_part_that_cannot_be_written_is_the_end(tmp_path: Path, monkeypatch: Any) -> None:
    def go_on_after_a_failure() -> None:
        with ckpt.writer(tmp_path / "a") as w:
            seams.at(monkeypatch, (pieces.ArrayWriter, "put"), before=seams.fail(), nth=1)
            with pytest.raises(OSError, match="No space"):
                w.add("params", {"a": np.zeros(3)})
            with pytest.raises(ckpt.CheckpointError, match="start again"):
                w.add("params", {"b": np.zeros(3)})

    monkeypatch.setattr(pieces, "_SMALL_ADD_BYTES", 0)
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
def test_what_is_there_is_refused_and_the_rest_goes_on(
    tmp_path: Path, item: str, value: Any, where: str
) -> None:
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


def test_wrong_use_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
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
    monkeypatch.setattr(_processes, "this_run", lambda: Processes(0, 2))
    with pytest.raises(ckpt.CheckpointError, match="2 processes run"):
        ckpt.writer(tmp_path / "b")


def test_patterns_of_compression_are_of_the_whole(tmp_path: Path) -> None:
    zeros = np.zeros((512, 512), np.float32)
    options = ckpt.Options(compression={"a/**": "zstd"})
    with ckpt.writer(tmp_path / "a", options=options) as w:
        w.add("params", {"b": {"x": zeros}})
        w.add("params", {"a": {"x": zeros}})
    on_disk = sum(
        file.stat().st_size for file in (tmp_path / "a" / "params").rglob("*") if file.is_file()
    )
    assert zeros.nbytes < on_disk < 1.2 * zeros.nbytes
    assert ckpt.verify(tmp_path / "a").ok
    with (
        pytest.raises(ValueError, match="matches no leaf"),
        ckpt.writer(tmp_path / "b", options=options) as w,
    ):
        w.add("params", {"b": {"x": zeros}})
    assert not (tmp_path / "b").exists()


def test_events(tmp_path: Path) -> None:
    heard: list[Any] = []
    with ckpt.writer(tmp_path / "a", options=ckpt.Options(on_event=heard.append)) as w:
        w.add("params", {"a": np.zeros(100, np.uint8)})
    told = [(event.kind, event.bytes) for event in heard]
    assert told == [("save_started", 0), ("committed", 100)]
    heard.clear()
    with (
        pytest.raises(KeyError),
        ckpt.writer(tmp_path / "b", options=ckpt.Options(on_event=heard.append)),
    ):
        raise KeyError
    assert [event.kind for event in heard] == ["save_started", "save_failed"]


trees = st.recursive(
    st.integers() | st.none() | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3),
    max_leaves=12,
)


def split(tree: Any) -> list[Any]:
    if not isinstance(tree, dict) or not tree:
        return [tree]
    return [{key: part} for key, value in tree.items() for part in split(value)]


@given(trees, st.randoms())
def test_any_order_of_parts_makes_the_tree(tree: Any, random: Any) -> None:
    parts = split(tree)
    random.shuffle(parts)
    grown = GrownTree()
    for part in parts:
        flat = flatten(part)
        assert grown.clash(flat.root) is None
        grown.add(flat.root, flat.leaves)
    assert unflatten(*grown.whole()) == tree
    if isinstance(tree, dict) and flatten(tree).leaves:
        assert any(grown.clash(flatten(part).root) is not None for part in parts)


def test_the_metadata_of_a_writer(tmp_path) -> None:
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
