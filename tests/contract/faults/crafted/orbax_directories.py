"""Orbax's directories: nothing there is signed."""

import shutil
import struct
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import tensorstore as ts

from tests.contract.faults.crafted.by_hand import (
    DEEP,
    GIB,
    LITTLE,
    ONE_ARRAY,
    SECRET,
    Case,
    as_json,
    grid,
    nested,
    tree_metadata,
    varint,
    zarr2_json,
    zarr3_json,
    zstd_zeros,
)

_SHAPE = 'object member "shape'
_NO_KEYS = "not a description of a tree: KeyError('valu"
_FILES_2 = {"zarr3": False, "ocdbt": False}
_DATA = np.arange(12, dtype="<f4").tobytes()


def _write_keys(item: Path, keys: dict[str, bytes], *, ocdbt: bool) -> None:
    if ocdbt:
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result()
        for key, value in keys.items():
            store.write(key, value).result()
        return
    for key, value in keys.items():
        (item / key).parent.mkdir(parents=True, exist_ok=True)
        (item / key).write_bytes(value)


def _orbax(
    name: str,
    zarr: Any = None,
    says: str | None = None,
    *,
    zarr3: bool = True,
    ocdbt: bool = True,
    chunk: bytes = _DATA,
    keys: list[str] | None = None,
    metadata: Any = None,
    extra: dict[str, bytes] | None = None,
    **more: Any,
) -> Case:
    """A directory as Orbax writes it, of one array, with parts replaced."""

    def make(path: Path) -> None:
        shutil.rmtree(path)
        item = path / "state"
        item.mkdir(parents=True)
        path_of_leaf = keys or ["a"]
        array = ".".join(path_of_leaf)
        stored = zarr if zarr is not None else zarr3_json() if zarr3 else zarr2_json()
        values = {f"{array}/{'zarr.json' if zarr3 else '.zarray'}": as_json(stored)}
        values[f"{array}/{'c/0/0' if zarr3 else '0.0'}"] = chunk
        if keys is None:
            _write_keys(item, values, ocdbt=ocdbt)
        tree = metadata or tree_metadata([path_of_leaf], zarr3=zarr3, ocdbt=ocdbt)
        (item / "_METADATA").write_bytes(as_json(tree))
        for file, data in (extra or {}).items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_bytes(data)
        if "_CHECKPOINT_METADATA" not in (extra or {}):
            (path / "_CHECKPOINT_METADATA").write_text("{}")

    return Case(f"orbax-{name}", make, says=says, **more)


def _nested_sharding(depth: int) -> dict[str, Any]:
    codecs: list[Any] = [LITTLE]
    for _ in range(depth):
        configuration = {
            "chunk_shape": [3, 4],
            "codecs": codecs,
            "index_codecs": [LITTLE, {"name": "crc32c"}],
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": configuration}]
    return zarr3_json(codecs=codecs)


def _deep_attributes(depth: int) -> bytes:
    return as_json(zarr3_json()).replace(
        b'"attributes": {}', b'"attributes": {"x": ' + nested(depth) + b"}"
    )


_BOMB_CODECS = [LITTLE, {"name": "zstd", "configuration": {"level": 1}}]


# name, shape, and what is said of it in zarr3 and in zarr2
_TOO_BIG = [
    ("2-50", [2**50], "impossible shape", "impossible shape"),
    ("overflow", [2**61, 2**61], "Integer overflow", "Product of chunk dimensions"),
    ("2-63", [2**63], _SHAPE, _SHAPE),
    ("2-70", [2**70], _SHAPE, _SHAPE),
]


def _bomb(path: Path) -> None:
    """A chunk of 64 KiB that decompresses to 2 GiB, in an array of twelve elements."""
    _orbax("", zarr3_json(codecs=_BOMB_CODECS), chunk=zstd_zeros(2 * GIB // 2**17)).make(path)


def _outside_reference(path: Path) -> None:
    """The array database of the item refers to a data file outside the directory."""
    shutil.rmtree(path)
    item, child = path / "state", path / "state" / "ocdbt.process_0"
    child.mkdir(parents=True)
    context = ts.Context()

    def database(directory: Path) -> ts.KvStore:
        config = {"compression": None, "max_inline_value_bytes": 10, "manifest_kind": "single"}
        spec = {"driver": "ocdbt", "base": f"file://{directory}/", "config": config}
        return ts.KvStore.open(spec, context=context).result()

    inner, outer = database(child), database(item)
    inner.write("a/zarr.json", as_json(zarr3_json(shape=[250], chunk_grid=grid(250)))).result()
    inner.write("a/c/0", SECRET).result()
    transaction = ts.Transaction(atomic=True)
    inner.experimental_copy_range_to(outer.with_transaction(transaction)).result()
    transaction.commit_async().result()
    # Same length, so that nothing else in the node has to change but its checksum.
    old, new = b"ocdbt.process_0/", b"../../outside/r/"
    assert len(old) == len(new)
    patched = 0
    for node in (item / "d").iterdir():
        data = node.read_bytes()
        if old in data:
            body = data.replace(old, new)[:-4]
            node.write_bytes(body + struct.pack("<I", crc32c.crc32c(body)))
            patched += 1
    assert patched, "no node refers to the inner database"
    target = path.parent / "outside" / "r"
    shutil.rmtree(target, ignore_errors=True)
    child.rename(target)
    (item / "_METADATA").write_bytes(ONE_ARRAY)
    (path / "_CHECKPOINT_METADATA").write_text("{}")


def _index_loop(path: Path) -> None:
    """The root of the index has two children, and both are the root: 2**64 nodes for a walker."""
    shutil.rmtree(path)
    item = path / "state"
    item.mkdir(parents=True)
    base = {"driver": "file", "path": f"{item}/"}
    config = {"compression": None, "max_decoded_node_bytes": 2000, "manifest_kind": "single"}
    transaction = ts.Transaction(atomic=True)
    store = ts.KvStore.open({"driver": "ocdbt", "base": base, "config": config}).result()
    for number in range(400):
        store.with_transaction(transaction).write(f"array_{number:04}/c/0", b"x" * 8)
    transaction.commit_async().result()
    versions = ts.ocdbt.dump(ts.KvStore.open(base).result()).result()["versions"]
    root = max(versions, key=lambda version: version["generation_number"])
    _, _, file, offset, length = root["root"]["location"].split(":")
    data = bytearray((item / file).read_bytes())
    start, end = int(offset), int(offset) + int(length)
    magic = bytes(data[start : start + 4])
    # The node must keep its length: the second key takes what is left over.
    for padding in range(int(length)):
        body = bytes([root["root_height"]])
        body += varint(1) + varint(len(file)) + varint(0) + file.encode()
        body += varint(2) + varint(0) + varint(1) + varint(padding) + varint(0) * 2
        body += b"a" + b"b" * padding + varint(0) * 2  # keys, and which file of the table
        body += b"".join(varint(n) * 2 for n in (start, int(length), 400, 5000, 1000))
        node = magic + struct.pack("<Q", len(body) + 18) + b"\0\0" + body
        if len(node) + 4 == int(length):
            data[start:end] = node + struct.pack("<I", crc32c.crc32c(node))
            break
    else:
        raise AssertionError("no padding fits")
    (item / file).write_bytes(data)
    (item / "_METADATA").write_bytes(ONE_ARRAY)
    (path / "_CHECKPOINT_METADATA").write_text("{}")


_HUGE_MESH = {
    "YQ==": '{"sharding_type": "NamedSharding", "shape": [1099511627776], "axis_names": ["x"], "partition_spec": ["x"]}'
}
_CODE = '{"category": "namedtuple", "module": "os", "clazz": "system", "entries": []}'
_EVIL_KEY = {
    "array_metadata": {
        **{"param_name": "a", "write_shape": [3, 4], "chunk_shape": [3, 4]},
        "ext_metadata": {"random_key_impl": "evil"},
    }
}
ORBAX_CASES = [
    _orbax("good", may_load=True),
    _orbax("good-files", ocdbt=False, may_load=True),
    _orbax("good-zarr2", zarr3=False, may_load=True),
    *(
        _orbax(f"shape-{name}", zarr3_json(shape=shape, chunk_grid=grid(*shape)), says=says)
        for name, shape, says, _ in _TOO_BIG
    ),
    *(
        _orbax(f"zarr2-shape-{name}", zarr2_json(shape=shape, chunks=shape), **_FILES_2, says=says)
        for name, shape, _, says in _TOO_BIG
    ),
    _orbax("chunk-2-45", zarr3_json(chunk_grid=grid(2**45, 2**10)), "impossible shape"),
    _orbax(
        "chunk-2-45-files",
        zarr3_json(chunk_grid=grid(2**45, 2**10)),
        ocdbt=False,
        says="impossible shape",
    ),
    _orbax(
        "zarr2-chunk-2-45", zarr2_json(chunks=[2**45, 2**10]), zarr3=False, says="impossible shape"
    ),
    *(
        _orbax(f"missing-chunks-{size}", zarr3_json(**grown), "chunks are missing")
        for size, grown in (
            ("terabyte", {"shape": [2**38, 1], "chunk_grid": grid(1, 1)}),
            ("gigabytes", {"shape": [2**33], "chunk_grid": grid(2**20)}),
        )
    ),
    _orbax("negative", zarr3_json(shape=[-3, 4]), _SHAPE),
    _orbax("chunk-zero", zarr3_json(chunk_grid=grid(0, 4)), 'object member "chunk_grid'),
    _orbax("nan", zarr3_json(shape=[float("nan"), 4]), "Invalid JSON"),
    _orbax("text-shape", zarr3_json(shape=["3", "4"]), _SHAPE),
    _orbax("shape-nothing", zarr3_json(shape=None), _SHAPE),
    _orbax("many-dimensions", zarr3_json(shape=[1] * 1000, chunk_grid=grid(*[1] * 1000)), _SHAPE),
    _orbax("dtype", zarr3_json(data_type="r4000000000"), 'object member "fill_value'),
    _orbax("dtype-text", zarr3_json(data_type="string"), 'object member "data_type'),
    _orbax(
        "zarr2-dtype", zarr2_json(dtype="|V4000000000"), zarr3=False, says="no such dtype: byte"
    ),
    _orbax(
        "zarr2-structured",
        zarr2_json(dtype=[["x", "<f4"], ["y", "<f4"]]),
        zarr3=False,
        says='Must specify a "field"',
    ),
    _orbax("json-deep", _deep_attributes(200_000), may_load=True, says=DEEP),
    _orbax("json-deep-files", _deep_attributes(200_000), ocdbt=False, may_load=True, says=DEEP),
    _orbax("json-only-brackets", b"[" * 200_000, DEEP),
    _orbax(
        "json-large",
        zarr3_json(attributes={"x": "y" * 20_000_000}),
        ocdbt=False,
        may_load=True,
        says="a/zarr.json has",
    ),
    _orbax("json-list", b"[]", "Expected object"),
    _orbax("json-empty", b"", "a/zarr.json: not valid JSON: Expecting value"),
    _orbax("sharding-nested-thousand", _nested_sharding(100), "Error reading shard entry"),
    _orbax("codec-unknown", zarr3_json(codecs=[{"name": "evil"}]), 'object member "codecs'),
    _orbax("chunk-short", chunk=_DATA[:-1], says="Not enough data"),
    _orbax("chunk-long", chunk=_DATA * 100, says="End of data expected"),
    Case("orbax-zstd-bomb", _bomb, says="End of data expected"),
    _orbax(
        "zstd-garbage",
        zarr3_json(codecs=_BOMB_CODECS),
        chunk=b"\x28\xb5\x2f\xfd" + b"\xff" * 100,
        says="ZSTD_decompressStream() failed",
    ),
    _orbax("metadata-deep", metadata=b'{"tree_metadata": ' + nested(200_000) + b"}", says=DEEP),
    _orbax("metadata-list", metadata=b"[1]", says="not a description of a tree: TypeError('lis"),
    *(
        _orbax(f"metadata-{kind}", metadata=b'{"tree_metadata": ' + tree + b"}", says=says)
        for kind, tree, says in (
            ("tree-list", b"[1]", "not a description of a tree: AttributeError"),
            ("keys-text", b'{"x": {"key_metadata": "abc"}}', _NO_KEYS),
            ("keys-numbers", b'{"x": {"key_metadata": [1, 2]}}', _NO_KEYS),
        )
    ),
    _orbax(
        "metadata-not-utf8",
        metadata=b'{"tree_metadata": {"\xff": 1}}',
        says="not valid JSON: 'utf-8' codec can't decode",
    ),
    _orbax(
        "metadata-deep-tree",
        metadata=tree_metadata([["a"] * 20_000], zarr3=True, ocdbt=True),
        says="nested more than 300 levels deep",
    ),
    _orbax(
        "metadata-rich-types",
        metadata=tree_metadata([["a"]], zarr3=True, ocdbt=True, value_metadata_tree=_CODE),
        may_load=True,
    ),
    _orbax(
        "names-up", keys=["..", "..", "outside", "array"], ocdbt=False, says="zarr.json is missing"
    ),
    _orbax("names-up-slash", keys=["../../outside/array"], ocdbt=False, says="Invalid file path"),
    _orbax("names-absolute", keys=["/etc"], ocdbt=False, says="Invalid file path"),
    _orbax("names-nul", keys=["a\0b"], ocdbt=False, says="is no regular file"),
    _orbax("names-long", keys=["x" * 100_000], ocdbt=False, says="File name too long"),
    _orbax("names-up-database", keys=["../../outside/array"], says="manifest.ocdbt is missing"),
    _orbax("strings-deep", extra={"state/_strings.json": nested(200_000)}, may_load=True),
    *(
        _orbax(f"{file}-deep", extra={file: nested(200_000)}, may_load=True, says=DEEP)
        for file in (
            *("state/_sharding", "state/array_metadatas/process_0", "_CHECKPOINT_METADATA"),
        )
    ),
    _orbax("sharding-huge-mesh", extra={"state/_sharding": as_json(_HUGE_MESH)}, may_load=True),
    _orbax(
        "key-implementation",
        extra={"state/array_metadatas/process_0": as_json({"array_metadatas": [_EVIL_KEY]})},
        may_load=True,
    ),
    _orbax(
        "step-metadata-list",
        extra={"_CHECKPOINT_METADATA": b"[]"},
        may_load=True,
        says="_CHECKPOINT_METADATA: not an object",
    ),
    _orbax(
        "step-handlers-evil",
        extra={"_CHECKPOINT_METADATA": b'{"item_handlers": {"../../outside": "os.system"}}'},
        may_load=True,
    ),
    _orbax(
        "manifest-garbage",
        extra={"state/manifest.ocdbt": b"\x0c\xdb:*" + b"\xff" * 200},
        says="its length is not the one",
    ),
    _orbax("manifest-empty", extra={"state/manifest.ocdbt": b""}, says="it begins with no bytes"),
    Case("orbax-reference-outside", _outside_reference, says="outside the item"),
    Case("orbax-index-loop", _index_loop, says="refers to a node twice"),
]
