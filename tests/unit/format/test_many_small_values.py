"""Databases of many small values, whose files ckpt encodes itself: TensorStore and our own reader must find the same in them; and small files in one value."""

import os
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import zstandard
from hypothesis import given, settings, strategies as st

import ckpt_core as ckpt
from ckpt_core._format.packed import apart, name_apart, pack
from ckpt_core._format.record import FileRecord, ItemRecord, Record, dump_record, load_record
from ckpt_core._storage import Extent, Location, Rows, encode_index, joined, new_context, read_index
from ckpt_core._tree import NONE
from ckpt_core.testing import assert_same
from tests.support.units import KIB

LETTERS = b"abl/0\x00\xc3\xff"
_keys = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=30),
        st.lists(st.sampled_from(list(LETTERS)), min_size=1, max_size=40).map(bytes),
        st.integers(0, 10**6).map(lambda number: f"layers/{number}/kernel/zarr.json".encode()),
    ),
    min_size=1,
    max_size=300,
    unique=True,
)


class Database:
    """A database in memory, of files that ckpt has encoded; ``store`` is TensorStore's view of it."""

    def __init__(
        self, keys: list[bytes], which: list[int], values: list[bytes], most_file_bytes: int
    ) -> None:
        self.context = new_context()
        self.url = "memory://test_many_small_values"
        self.files: Any = ts.KvStore.open(f"{self.url}/", context=self.context()).result()
        self.files.delete_range(ts.KvStore.KeyRange()).result()
        rows, contents = Rows([*map(os.fsdecode, keys)], which), list[bytes]()
        for value in values:
            if len(value) <= 100:
                rows.inline.append(value)
                rows.places.extend((-1, 0, len(value)))
                continue
            if not contents or len(contents[-1]) + len(value) > most_file_bytes:
                rows.paths.append(f"d/{len(contents)}")
                contents.append(b"")
            contents[-1] = contents[-1].ljust(-(-len(contents[-1]) // 64) * 64, b"\0")
            rows.inline.append(b"")
            rows.places.extend((len(contents) - 1, len(contents[-1]), len(value)))
            contents[-1] += value
        half = len(keys) // 2  # as if two processes had written them
        others = replace(rows, keys=rows.keys[half:], which=rows.which[half:])
        rows = replace(rows, keys=rows.keys[:half], which=rows.which[:half])
        nodes, manifest = encode_index(joined([rows.dump(), others.dump()]), "d/nodes", "below/")
        for number, content in enumerate(contents):
            self.files.write(f"below/d/{number}", content).result()
        self.files.write("d/nodes", nodes).result()
        self.files.write("manifest.ocdbt", manifest).result()
        self.files_count = len(contents)
        spec = {"driver": "ocdbt", "base": f"{self.url}/"}
        self.store: Any = ts.KvStore.open(spec, context=self.context()).result()

    def by_tensorstore(self) -> dict[bytes, bytes]:
        return {key: self.store.read(key).result().value for key in self.store.list().result()}

    def by_ckpt(self) -> dict[bytes, bytes]:
        index = read_index(Location(self.url, False), self.context)
        return {
            key.encode(errors="surrogateescape"): self._at(Extent(*place))
            for key, place in index.items()
        }

    def _at(self, extent: Any) -> bytes:
        if not extent.file:
            return extent.value
        assert extent.offset % 64 == 0
        part = slice(extent.offset, extent.offset + extent.size_bytes)
        return self.files.read(extent.file, byte_range=part).result().value


@given(_keys, st.data(), st.sampled_from([64, 1000, 2**20]))
@settings(max_examples=60)
def test_all_keys_are_found_with_their_values(keys, data, most):
    sizes = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=len(keys)))
    values = [os.urandom(size) for size in sizes]
    choose = st.integers(0, len(values) - 1)
    which = data.draw(st.lists(choose, min_size=len(keys), max_size=len(keys)))
    database = Database(keys, which, values, most)
    expected = {key: values[n] for key, n in zip(keys, which, strict=True)}
    assert database.by_tensorstore() == expected
    assert database.by_ckpt() == expected


@pytest.mark.parametrize("count", [1, 1000, 40_000])
def test_an_index_of_any_height_says_what_is_below_each_node(count):
    """TensorStore's dump gives the numbers, which it needs when it splits or joins nodes."""
    keys = [f"{number * 7919 % count:032}".encode() * 16 for number in range(count)]
    values = [bytes(101), bytes(7)]
    which = [number % 2 for number in range(count)]
    database = Database(keys, which, values, 2**20)
    dumped = ts.ocdbt.dump(database.files).result()
    (version,) = dumped["versions"]
    assert version["root_height"] == {1: 0, 1000: 1, 40_000: 2}[count]
    nodes_bytes = len(database.files.read("d/nodes").result().value)
    assert version["root"]["statistics"] == {
        "num_indirect_value_bytes": 101 * (count - count // 2),
        "num_keys": count,
        "num_tree_bytes": nodes_bytes,
    }
    assert len(database.by_ckpt()) == count


def _tree(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(count)
    kinds = [
        lambda n: rng.random((n % 50, 3), np.float32),
        lambda n: jnp.arange(n % 7, dtype=jnp.bfloat16),
        lambda n: np.asarray(n),
        lambda n: jax.random.key(n),
        lambda n: n,
        lambda n: rng.integers(0, 2, 3000).astype(bool),
        lambda n: np.zeros((0, 3)),
        lambda n: rng.random(5).astype(">f8"),
        lambda n: f"text {n}",
    ]
    return {f"l{n}/é" if n % 3 else f"l{n}": kinds[n % len(kinds)](n) for n in range(count)}


def test_thousands_of_leaves_of_all_kinds_come_back(tmp_path):
    tree = _tree(3000)
    ckpt.save(tmp_path / "a", tree)
    assert_same(ckpt.load(tmp_path / "a"), tree)
    assert ckpt.verify(tmp_path / "a").ok
    # arrays that are alike have one zarr.json
    files = [*(tmp_path / "a" / "state" / "ocdbt.process_0" / "d").iterdir()]
    stored = sum(np.asarray(v).nbytes for v in tree.values() if isinstance(v, np.ndarray))
    assert len(files) == 1 and files[0].stat().st_size < stored * 1.1 + 64 * KIB


def test_a_record_holds_small_files_up_to_the_sizes_that_it_lists():
    files = {"state/_METADATA": b"{}" * 500, "ckpt.token": b"x"}

    def record(packed: bytes) -> Record:
        listed = {name: FileRecord.of(data) for name, data in files.items()}
        items = {"state": ItemRecord("process", NONE)}
        return load_record(dump_record(Record(items, listed, "t", packed=packed)))

    found = record(pack(files))
    assert found.small_files == files
    assert found.where("state/big") == ".attempt.t.state!0big"
    assert found.where("state/d/t.1") == "state/d/t.1"
    assert record(b"").small_files == {} and record(b"").where("a") == "a"
    no_packs = [b"", b"[]\n", b"{}", b'{"a":5}\nab', b'{"a":-1}\n', b'{"a":1.0}\na', b"\xff\n"]
    no_packs += [b'{"a":true}\na', b'{"a":1}\nab']
    unlisted = [pack({"state/_METADATA": b"{}" * 5000}), pack({"../2/ckpt.json": b"x"})]
    for bad in [b"x", *unlisted, *map(zstandard.ZstdCompressor().compress, no_packs)]:
        with pytest.raises(ckpt.CheckpointCorrupt, match="small files"):
            _ = record(bad).small_files


@given(st.text())
def test_a_file_apart_is_one_name_from_which_its_own_comes_back(name):
    key = apart("t", name)
    assert key.startswith(".attempt.t.") and "/" not in key
    assert name_apart("t", key) == name
