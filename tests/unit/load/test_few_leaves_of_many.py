"""Who loads one leaf of thousands reads little: counted in bytes and calls, not in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings

import ckpt_core as ckpt
from ckpt_core import CheckpointCorrupt
from ckpt_core._directory import PosixBackend
from ckpt_core._format.checksums import Checksums, crc_of, dump_checksums
from ckpt_core._format.record import (
    FileRecord,
    ItemRecord,
    LeafRecord,
    Record,
    dump_record,
    load_record,
)
from ckpt_core._storage import Location, arrays, database, new_context, read_index
from ckpt_core._tree import flatten, format_path
from ckpt_core._tree.leaves import LeafSpec
from ckpt_core._tree.match import positions_of
from ckpt_core._tree.patterns import selector
from ckpt_core.testing import assert_same
from tests.support.units import KIB, MIB

LEAVES = 5000
LEAF_BYTES = 1 * KIB


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many") / "step"
    groups = {
        f"group{i:02}": {
            f"leaf{j:02}": np.full(LEAF_BYTES // 4, 100 * i + j, np.float32) for j in range(100)
        }
        for i in range(LEAVES // 100)
    }
    ckpt.save(path, groups)
    return path


class Counted:
    """Bytes that were read: of small files, of the index, and of data files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: list[int] = []
        self.data: list[int] = []
        self.index_bytes = 0
        plain_file, plain_data = PosixBackend.read, arrays.DataFiles.read
        plain_part = arrays.DataFiles.part

        def read_file(form: PosixBackend, path: str, name: str, *limit: int) -> bytes | None:
            found = plain_file(form, path, name, *limit)
            self.files.append(len(found or b""))
            return found

        def read_data(files: Any, *arguments: Any) -> int:
            self.data.append(plain_data(files, *arguments))
            return self.data[-1]

        def read_part(files: Any, *which: Any) -> bytes:
            found = plain_part(files, *which)
            self.index_bytes += len(found)
            return found

        monkeypatch.setattr(PosixBackend, "read", read_file)
        monkeypatch.setattr(arrays.DataFiles, "read", read_data)
        monkeypatch.setattr(arrays.DataFiles, "part", read_part)

    @property
    def all_bytes(self) -> float:
        return sum(self.files) + sum(self.data) + self.index_bytes


def test_one_leaf_of_thousands_takes_one_read_of_it(many: Path, monkeypatch: pytest.MonkeyPatch):
    counted = Counted(monkeypatch)
    loaded = ckpt.load(many, only="group31/leaf41")
    assert_same(loaded, {"group31": {"leaf41": np.full(LEAF_BYTES // 4, 3141, np.float32)}})
    assert counted.data == [LEAF_BYTES]
    assert counted.all_bytes < MIB
    assert 0 < counted.index_bytes < 16 * KIB  # of 30: some of its nodes


def test_all_leaves_are_read_in_few_pieces(many: Path, monkeypatch: pytest.MonkeyPatch):
    counted = Counted(monkeypatch)
    loaded = ckpt.load(many)
    assert len(loaded) == 50 and loaded["group49"]["leaf99"][0] == 4999
    # 3 or 4 after a save on a quiet machine, 11 on a busy one: TensorStore decides the order of the chunks
    assert len(counted.data) < 20
    assert sum(counted.data) < 1.5 * LEAVES * LEAF_BYTES


def test_the_index_of_some_arrays_holds_all_their_keys(many: Path):
    item = Location(str(many / "state"), True)
    every = dict(read_index(item, new_context()))
    assert len(every) == 2 * LEAVES
    names = ["group00.leaf00", "group17.leaf42", "group49.leaf99"]
    some = dict(read_index(item, new_context(), names))
    assert {key for key in every if key.startswith(tuple(f"{n}/" for n in names))} <= some.keys()
    assert some.items() <= every.items()
    assert len(some) < len(every) / 2
    assert dict(read_index(item, new_context(), [""])) == every


def test_an_index_of_one_node_is_read_as_well(tmp_path: Path):
    """As checkpoints before 0.2 have it, and small ones."""
    ckpt.save(tmp_path / "few", {"a": jnp.ones(30), "b": jnp.ones(40)})
    found = read_index(Location(str(tmp_path / "few" / "state"), True), new_context(), ["b"])
    assert found["b/c/0"].size_bytes == 160


_texts = st.text(st.characters(codec="utf-8", categories=["L", "P", "S", "N"]), max_size=5)
_keys = _texts | st.lists(st.sampled_from(list('a":,[]{}\\12/')), max_size=8).map("".join)


@given(
    st.dictionaries(_keys, st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3)),
    st.lists(_keys),
)
@settings(max_examples=300)
def test_checksums_found_in_the_text_are_those_parsed(chunks: dict[str, list[int]], others: Any):
    data = dump_checksums(chunks)
    few, every = Checksums(data, "file", few=True), Checksums(data, "file")
    assert few.block_bytes == every.block_bytes
    for key in [*chunks, *others]:
        assert few.get(key) == every.get(key) == chunks.get(key)


def test_who_asks_for_more_than_a_few_has_all_of_the_text_parsed():
    chunks = {f"{number}/c/0": [number] for number in range(500)}
    few = Checksums(dump_checksums(chunks), "file", few=True)
    assert [few.get(key) for key in chunks] == list(chunks.values())
    assert few.get("500/c/0") is None
    assert not few._text  # each search costs a share of what parsing costs


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b'{"block_bytes":0,"chunks":{}}', b'{"chunks":{}}', b'{"block_bytes":4}', b"{"],
)
def test_what_is_no_checksum_file_is_refused(data: bytes, few: bool):
    with pytest.raises(CheckpointCorrupt, match=r"not a checksum file|not valid JSON"):
        Checksums(data, "file", few=few)


def test_checksums_of_other_writing_are_found_too():
    spaced = b'{ "block_bytes": 7, "chunks": {"a/c/0": [1, 2]} }'
    assert Checksums(spaced, "file", few=True).get("a/c/0") == [1, 2]


_names = st.lists(st.text("ab/.0", min_size=1, max_size=4), max_size=5)
_key = st.text("ab/.0c", max_size=6).map(str.encode)


@given(_names, _key, _key | st.none(), st.lists(_key, max_size=20))
@example(["a", "a."], b"", None, [b"a/0", b"a./0"])
def test_ranges_leave_out_no_wanted_key(
    names: list[str], start: bytes, stop: bytes | None, keys: list[bytes]
):
    ranges = database._key_ranges(names)
    assert ranges == sorted(ranges)
    prefixes = tuple(f"{name}/".encode() for name in names)
    for key in keys:
        wanted = key.startswith(prefixes)
        assert wanted == any(first <= key < after for first, after in ranges if after is not None)
        if wanted and start <= key and (stop is None or key < stop):
            assert database._overlaps_any(ranges, start, stop)


@pytest.mark.parametrize(
    ("only", "found"),
    [
        ("a/b", ["a/b"]),
        ("state/a/b", ["a/b"]),
        (["a/b", "state/c"], ["a/b", "c"]),
        ("a/~1x", ["a/~1x"]),
        ("a/7", ["a/7"]),
        ("a/7/", []),
        ("", []),
        ("state", []),
        ("a", []),
    ],
)
def test_patterns_without_stars_name_leaves(only: Any, found: list[str]):
    paths = {"a/b": ("a", "b"), "c": ("c",), "a/~1x": ("a", "/x"), "a/7": ("a", 7)}
    select = selector(only, item="state")
    assert select is not None
    spec: Any = None
    assert [text for text, path in paths.items() if select(path, spec)] == found


@pytest.mark.parametrize(("only", "found"), [("state", True), ("(root)", True), ("other", False)])
def test_a_bare_leaf_is_named_by_its_item(only: str, found: bool):
    select = selector(only, item="state")
    spec: Any = None
    assert select is not None and select((), spec) == found


_spec = st.sampled_from(
    [
        LeafSpec("jax", "float32", (4, 2)),
        LeafSpec("numpy", "int16", (3,), ">"),
        LeafSpec("key", "threefry2x32", (2,)),
        LeafSpec("str"),
        LeafSpec("generator", detail="PCG64"),
        LeafSpec("float", "float64"),
    ]
)
_tree = st.recursive(
    st.just(0) | st.none(),
    lambda inner: (
        st.dictionaries(_keys | st.integers(), inner, max_size=4)
        | st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=30,
)
_names_of_items = st.text("ab:,[]{}", min_size=1, max_size=5)


@given(_names_of_items.flatmap(lambda name: st.tuples(st.just(name), _tree)), st.data())
@settings(max_examples=300)
def test_a_record_is_the_same_read_at_once_or_in_parts(named: Any, data: Any):
    """What is spaced otherwise than ours is read by ``json`` alone."""
    name, tree = named
    flat = flatten(tree)
    many = st.lists(_spec, min_size=len(flat.paths), max_size=len(flat.paths))
    leaves = tuple(
        LeafRecord(spec, spec.stored_shape if spec.stored_dtype else (), 0)
        for spec in data.draw(many)
    )
    item = ItemRecord("tree", flat.root, tuple(flat.paths), leaves, ({"a": ']],"shardings":'},))
    metadata = data.draw(
        st.sampled_from([None, {"leaves": [["x"]], "items": {}}, ['"leaves":[["jax",']])
    )
    record = Record({name: item}, {"f": FileRecord(1, 2)}, "token", metadata=metadata)
    ours = dump_record(record)
    body = json.dumps(json.loads(ours)["record"]).encode()
    spaced = b'{"crc32c":"%08x","record":' % crc_of(body) + body + b"}\n"
    assert load_record(ours) == load_record(spaced) == record


@pytest.mark.parametrize(
    ("found", "replaced"),
    [
        ('["dict","",["a","b"]],0,0', '["dict","",["a","b"]],0'),
        ('["dict","",["a","b"]],0,0', '["dict","",["a","b"]],0,0,0'),
        ('["dict","",["a","b"]],0,0', '["dict","",["a",true]],0,0'),
        ('["dict","",["a","b"]],0,0', '["list","",3],0,0'),
        ('["dict","",["a","b"]],0,0', '["list","",-1],0,0'),
        ('["jax","float32",[2],[2],"",0]', '["jax","float32",[2],[2],"",7]'),
        ('["jax","float32",[2],[2],"",0]', '["jax","float32",[2],[3,1],"",0]'),
        ('["jax","float32",[2],[2],"",0]', '["jax","float32",[2],null,"",0]'),
        ('["jax","float32",[2],[2],"",0]', '["jax","float32",[[2]],[2],"",0]'),
        ('["jax","float32",[2],[2],"",0]', '["jax","object",[2],[2],"",0]'),
        ('["jax","float32",[2],[2],"",0]', '["jax","float32",[-2],[2],"",0]'),
        ('["jax","float32",[2],[2],"",0]', '["jax","float32"]'),
        ('["jax","float32",[2],[2],"",0],', ""),
        ('["jax","float32",[2],[2],"",0],', "[],"),
        ('["jax","float32",[2],[2],"",0],', '["jax",'),
        (',"shardings":', ',"sharding":'),
        ('"leaves":', '"leafs":'),
        ('"items":{"state":{', '"items":{"state":{{'),
    ],
)
def test_a_wrong_record_in_our_writing_is_refused(found: str, replaced: str):
    spec = LeafSpec("jax", "float32", (2,))
    flat = flatten({"a": 0, "b": 0})
    leaves = (LeafRecord(spec, (2,), 0),) * 2
    item = ItemRecord("tree", flat.root, tuple(flat.paths), leaves, ({},))
    ours = dump_record(Record({"state": item}, {}, "token"))
    head = len(b'{"crc32c":"xxxxxxxx","record":')
    body = ours[head:-2].replace(found.encode(), replaced.encode(), 1)
    assert body != ours[head:-2]
    with pytest.raises(CheckpointCorrupt):
        load_record(b'{"crc32c":"%08x","record":' % crc_of(body) + body + b"}\n")


_path = st.lists(_keys | st.integers(-20, 20), max_size=3).map(tuple)


@given(st.lists(_path, unique=True, max_size=8), st.data())
def test_names_find_the_leaves_whose_paths_are_written_so(paths: list[Any], data: Any):
    spec: Any = None
    texts = st.sampled_from([*map(format_path, paths), "a", "state/a"])
    names = data.draw(st.lists(texts, min_size=1, max_size=3))
    if any(character in name for name in names for character in "*?"):
        return
    select = selector(names, item="state")
    assert select is not None
    wanted = {*names, *(name.removeprefix("state/") for name in names)}
    bare = "(root)" in wanted or "state" in wanted
    expected = [
        n for n, path in enumerate(paths) if (format_path(path) in wanted if path else bare)
    ]
    specs: Any = [spec] * len(paths)
    assert list(positions_of(paths, specs, select)) == expected
    assert [n for n, path in enumerate(paths) if select(path, spec)] == expected
