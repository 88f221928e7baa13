"""Databases of OCDBT: the index that ckpt decodes, and many small values that ckpt encodes: TensorStore finds the same in them."""

import contextlib
import errno
import os
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import crc32c
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import zstandard
from hypothesis import given, settings, strategies as st

import ckpt_core as ckpt
from ckpt_core import CheckpointCorrupt
from ckpt_core._format.packed import apart, name_apart, pack
from ckpt_core._format.record import FileRecord, ItemRecord, Record, dump_record, load_record
from ckpt_core._options import MIB
from ckpt_core._storage import Extent, Location, Rows, encode_index, joined, new_context, read_index
from ckpt_core._storage.database import Inner, NodeRef, decode_manifest, decode_node
from ckpt_core._tree import NONE
from ckpt_core.testing import assert_same
from tests.contract.faults.crafted.by_hand import varint
from tests.support.damage import failing_reads
from tests.support.units import KIB

_names = st.lists(
    st.sampled_from(["a", "layer", "é", "w" * 40, "0", "\x7f"]), min_size=1, max_size=4
)
_keys = st.lists(_names.map("/".join), unique=True, max_size=60)
_configs = st.fixed_dictionaries(
    {
        "compression": st.sampled_from([None, {"id": "zstd"}, {"id": "zstd", "level": 9}]),
        "max_decoded_node_bytes": st.sampled_from([200, 2000, 2**16]),
        "max_inline_value_bytes": st.sampled_from([0, 10, 100]),
        "manifest_kind": st.just("single"),
    }
)
UNCOMPRESSED = {"compression": None, "max_decoded_node_bytes": 1000, "manifest_kind": "single"}


class Database:
    def __init__(self, config: dict[str, Any], folder: str = "") -> None:
        self.context = new_context()
        self.url = f"memory://test_index/{folder}"
        self.files: Any = ts.KvStore.open(self.url, context=self.context()).result()
        self.files.delete_range(ts.KvStore.KeyRange()).result()
        spec = {"driver": "ocdbt", "base": self.url, "config": config}
        self.store: Any = ts.KvStore.open(spec, context=self.context()).result()

    def write(self, keys: list[str]) -> None:
        """Another version, with the values of these keys, which are made of their names."""
        transaction = ts.Transaction(atomic=True)
        for key in keys:
            self.store.with_transaction(transaction).write(key, value_of(key)).result()
        transaction.commit_async().result()

    def index(self) -> dict[str, Any]:
        index = read_index(Location(self.url.rstrip("/"), False), self.context)
        return {key: Extent(*place) for key, place in index.items()}

    def values(self) -> dict[str, bytes]:
        """Key -> value, from the places that the index gives."""
        return {key: self._at(extent) for key, extent in self.index().items()}

    def _at(self, extent: Any) -> bytes:
        if not extent.file:
            return extent.value
        part = slice(extent.offset, extent.offset + extent.size_bytes)
        return self.files.read(extent.file, byte_range=part).result().value

    def file(self, name: str) -> bytes:
        return self.files.read(name).result().value

    def root(self) -> tuple[NodeRef, bytes]:
        """The root of the index, and its stored bytes."""
        root = decode_manifest(self.file("manifest.ocdbt"))
        return root, self.file(root.file)[root.offset : root.offset + root.size_bytes]


def value_of(key: str) -> bytes:
    return (key.encode() * 9)[: 7 * (len(key) % 30)]


@given(_keys, _keys.filter(bool), _configs)
@settings(max_examples=40)
def test_the_places_of_all_keys_are_found(first, second, config):
    database = Database(config)
    database.write(first)
    database.write(second)
    assert database.values() == {key: value_of(key) for key in {*first, *second}}
    inline = [extent.size_bytes for extent in database.index().values() if not extent.file]
    assert max(inline, default=0) <= config["max_inline_value_bytes"]


@pytest.mark.parametrize("compression", [None, {"id": "zstd"}])
def test_every_flipped_bit_and_every_cut_is_noticed(compression):
    database = Database({**UNCOMPRESSED, "compression": compression})
    database.write([f"layer{number:02}/w" for number in range(30)])
    root, node = database.root()
    manifest = database.file("manifest.ocdbt")
    for decode, data in [(decode_manifest, manifest), (lambda data: decode_node(data, b""), node)]:
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(ValueError, match=r"."):
                decode(bytes(flipped))
        for length in range(len(data)):
            with pytest.raises(ValueError, match=r"."):
                decode(data[:length])
    assert root.base == b""


def signed(payload: bytes, magic: int) -> bytes:
    """An uncompressed manifest or node of this content, whose length and checksum are right."""
    head = struct.pack(">I", magic) + struct.pack("<Q", len(payload) + 18) + b"\0\0"
    return head + payload + struct.pack("<I", crc32c.crc32c(head + payload))


def payloads() -> dict[str, tuple[int, bytes]]:
    """Magic number and content of a manifest, a leaf and an inner node."""
    database = Database(UNCOMPRESSED)
    database.write([f"layer{number:03}/w" for number in range(100)])
    root, node = database.root()
    inner = decode_node(node, root.base)
    assert isinstance(inner, Inner) and inner.height == 1
    child = inner.children[0]
    leaf = database.file(child.file)[child.offset : child.offset + child.size_bytes]
    found = {"manifest": database.file("manifest.ocdbt"), "inner": node, "leaf": leaf}
    return {name: (int.from_bytes(data[:4], "big"), data[14:-4]) for name, data in found.items()}


PAYLOADS = payloads()
_changes = st.lists(
    st.tuples(
        st.integers(0, 10_000), st.sampled_from([0, 1, 2, 127, 128, 255]) | st.integers(0, 255)
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", PAYLOADS)
@given(changes=_changes, cut=st.integers(0, 10), more=st.binary(max_size=3))
@settings(max_examples=150)
def test_what_is_signed_but_senseless_is_refused_or_read_never_another_error(
    name, changes, cut, more
):
    magic, payload = PAYLOADS[name]
    content = bytearray(payload)
    for place, value in changes:
        content[place % len(content)] = value
    data = signed(bytes(content[: len(content) - cut]) + more, magic)
    with contextlib.suppress(ValueError):
        decode_manifest(data) if name == "manifest" else decode_node(data, b"")


_NODE, _MANIFEST = 0x0CDB20DE, 0x0CDB3A2A


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\0\0" + varint(0), "0 entries"),
        (b"\0\0" + varint(2**20 + 1), "1048577 entries"),
        (b"\0\0" + varint(1) + b"\xff" * 9 + b"\x02", "64 bits"),
        (b"\0\0" + varint(1) + b"\xff" * 11 + b"\x01", "too early"),
        (b"\0\0" + varint(2) + varint(2) + varint(1) * 2 + b"ab", "shares more"),
        (b"\0\0" + varint(2) + varint(0) + varint(1) * 2 + b"ba", "out of order"),
        (b"\0\0" + varint(2) + varint(0) + varint(1) * 2 + b"aa", "out of order"),
        (b"\0\0" + varint(1) * 2 + b"a" + varint(3) + b"\2" + b"xyz", "kind 2"),
        (b"\0\0" + varint(1) * 2 + b"a" + varint(3) + b"\1" + varint(0) * 2, "file 0 of 0"),
        (b"\0\0" + varint(1) * 2 + b"a" + varint(3) + b"\0" + b"xyzz", "1 bytes too many"),
        (b"\0\0" + varint(1) * 2 + b"a" + varint(3) + b"\0" + b"xy", "too early"),
        (b"\0" + varint(1) + varint(2) + varint(3) + b"ab", "outside"),
        (b"\0" + varint(1) + varint(4) + varint(0) + b"../a", "outside"),
        (b"\0" + varint(1) + varint(2) + varint(0) + b"/a", "outside"),
        (b"\0" + varint(1) + varint(3) + varint(0) + b"./a", "no name"),
        (b"\0" + varint(1) + varint(4) + varint(0) + b"d//a", "no name"),
        (b"\1\0" + varint(1) * 2 + varint(2) + b"a", "too early"),
        # before it takes the memory
        (b"\0\0" + varint(10) + varint(0xFFFF) * 9 + varint(0xFFFF) + varint(1) * 9
         + b"a" * 0xFFFF + b"bcdefghij", "65536 bytes"),
        (b"\0" + varint(2**16 + 1), "table of 65537 files"),
    ],
)  # fmt: skip
def test_impossible_nodes_are_refused_with_the_reason(payload, message):
    with pytest.raises(ValueError, match=message):
        decode_node(signed(payload, _NODE), b"")
    with pytest.raises(ValueError, match="kind 2"):
        decode_manifest(signed(bytes(16) + b"\2" + bytes(5), _MANIFEST))


def table(file: bytes) -> bytes:
    """A table of one file, without a base."""
    return varint(1) + varint(len(file)) + varint(0) + file


def local(folder: Path, nodes: bytes, offset: int, size_bytes: int, file: bytes = b"f") -> Location:
    """A database whose manifest refers to a place in a file."""
    reference = varint(0) + varint(offset) + varint(size_bytes) + varint(0) * 3
    settings = bytes(16) + varint(0) * 3 + b"\0" + varint(0)
    payload = settings + table(file) + varint(1) * 2 + b"\0" + reference
    (folder / "manifest.ocdbt").write_bytes(signed(payload, _MANIFEST))
    (folder / "f").write_bytes(nodes)
    return Location(str(folder), True)


def leaf() -> bytes:
    """A node with the value ``xyz`` of the key ``a``."""
    return signed(b"\0\0" + varint(1) * 2 + b"a" + varint(3) + b"\0xyz", _NODE)


def inner(
    height: int, offset: int, size_bytes: int, keys: list[bytes] | None = None, prefix: int = 0
) -> bytes:
    """A node in the same file as its children, which all are the same; ``prefix``: bytes of a key that they leave out."""
    keys = keys or [b"a"]
    count = len(keys)
    lengths = varint(0) * (count - 1) + b"".join(varint(len(key)) for key in keys)
    names = varint(count) + lengths + varint(prefix) * count + b"".join(keys)
    places = varint(0) * count + varint(offset) * count + varint(size_bytes) * count
    return signed(bytes([height]) + table(b"f") + names + places + varint(0) * 3 * count, _NODE)


def numbered(count: int) -> list[bytes]:
    return [number.to_bytes(3, "big") for number in range(count)]


def three_levels(folder: Path, prefix: int, keys: list[bytes]) -> Location:
    """A database whose root has one key; below it is a node of these, and below that a leaf."""
    below = leaf()
    middle = inner(1, 0, len(below), keys)
    root = inner(2, len(below), len(middle), [b"k" * prefix], prefix)
    return local(folder, below + middle + root, len(below) + len(middle), len(root))


def test_keys_of_nodes_take_no_more_memory_than_those_of_leaves(tmp_path):
    """They share what the parent's key begins with on disk, and not in memory."""
    item = three_levels(tmp_path, 40_000, numbered(20_000))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorrupt, match="its keys take more than 268435456 bytes"):
            read_index(item, new_context())
        assert tracemalloc.get_traced_memory()[1] < 32 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("prefix", "keys", "most", "message"),
    [
        (60_000, [b"x" * 5536], 10**6, "a key that is too long"),
        (1, numbered(2**16 + 1), 9, "more than the 9 keys"),
        (1, numbered(2**16 + 1), 2**16 + 1, "refers to a node twice"),
    ],
    ids=["a long key", "more nodes than keys", "a node twice"],
)
def test_impossible_levels(tmp_path, prefix, keys, most, message):
    item = three_levels(tmp_path, prefix, keys)
    with pytest.raises(CheckpointCorrupt, match=message):
        read_index(item, new_context(), most_keys=lambda: most)


def test_each_level_is_one_lower(tmp_path):
    below = leaf()
    for height in (1, 2):
        root = inner(height, 0, len(below))
        item = local(tmp_path, below + root, len(below), len(root))
        if height == 1:
            assert read_index(item, new_context()) == {"a": ("", 0, 3, b"xyz")}
            continue
        with pytest.raises(CheckpointCorrupt, match="height 0 where 1 is expected"):
            read_index(item, new_context())


def test_a_read_may_give_less_than_was_asked_for(tmp_path, monkeypatch):
    """As those of FUSE may."""
    item, plain = local(tmp_path, leaf(), 0, len(leaf())), os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: plain(file, min(size, 7), at))
    assert list(read_index(item, new_context())) == ["a"]


def test_an_error_of_the_system_is_no_damage_and_says_where(tmp_path, monkeypatch):
    (tmp_path / "d").mkdir()
    item = local(tmp_path / "d", leaf(), 0, len(leaf()))
    failing_reads(monkeypatch, tmp_path, "pread")
    with pytest.raises(OSError, match="index") as caught:
        read_index(item, new_context())
    assert caught.value.errno == errno.EIO and str(tmp_path) in str(caught.value)


LETTERS = b"abl/0\x00\xc3\xff"
_many_keys = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=30),
        st.lists(st.sampled_from(list(LETTERS)), min_size=1, max_size=40).map(bytes),
        st.integers(0, 10**6).map(lambda number: f"layers/{number}/kernel/zarr.json".encode()),
    ),
    min_size=1,
    max_size=300,
    unique=True,
)


class Encoded:
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


@given(_many_keys, st.data(), st.sampled_from([64, 1000, 2**20]))
@settings(max_examples=60)
def test_all_keys_are_found_with_their_values(keys, data, most):
    sizes = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=len(keys)))
    values = [os.urandom(size) for size in sizes]
    choose = st.integers(0, len(values) - 1)
    which = data.draw(st.lists(choose, min_size=len(keys), max_size=len(keys)))
    database = Encoded(keys, which, values, most)
    expected = {key: values[n] for key, n in zip(keys, which, strict=True)}
    assert database.by_tensorstore() == expected
    assert database.by_ckpt() == expected


@pytest.mark.parametrize("count", [1, 1000, 40_000])
def test_an_index_of_any_height_says_what_is_below_each_node(count):
    """TensorStore's dump gives the numbers, which it needs when it splits or joins nodes."""
    keys = [f"{number * 7919 % count:032}".encode() * 16 for number in range(count)]
    values = [bytes(101), bytes(7)]
    which = [number % 2 for number in range(count)]
    database = Encoded(keys, which, values, 2**20)
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
