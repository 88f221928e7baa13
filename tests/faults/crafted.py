"""Checkpoints made to harm: our own format, signed again after each change, and Orbax's.

A `Case` turns a copy of a good checkpoint into a hostile one. Beside the checkpoint stands a
directory `outside` with a file of `SECRET`, for what tries to leave the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import tensorstore as ts

GIB = 2**30
SECRET = b"SECRET--" * 125


@dataclass(frozen=True)
class Case:
    """A hostile checkpoint.

    Attributes:
        make: turns a copy of the good checkpoint, or an empty directory, into the hostile one.
        may_load: whether some reader may succeed, because what is odd is harmless or not read.
        found: whether `verify` must find it, whatever a load needs.
        base: which good checkpoint it is made from: "" or "-zstd" or "-blosc".
    """

    name: str
    make: Callable[[Path], None]
    may_load: bool = False
    found: bool = False
    base: str = ""

    @property
    def says(self) -> str | None:
        """Part of the message of the bound that the case is made for; None where nothing refuses it."""
        return SAYS.get(self.name)


# ---- our record ---------------------------------------------------------------------------------

_HEAD = b'{"crc32c":"%08x","record":'


def read_record(path: Path) -> Any:
    data = (path / "ckpt.json").read_bytes()
    return json.loads(data)["record"]


def write_record(path: Path, record: Any) -> None:
    # as ckpt writes it, which is what its own parser takes; bytes are written as they please
    compact = record if isinstance(record, bytes) else json.dumps(record, separators=(",", ":"))
    body = compact if isinstance(compact, bytes) else compact.encode()
    (path / "ckpt.json").write_bytes(_HEAD % crc32c.crc32c(body) + body + b"}\n")


def _sign(path: Path) -> None:
    """Makes sizes and digests of all files fit again, of new files too."""
    record = read_record(path)
    there = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
    del there["ckpt.json"]
    for name, file in there.items():
        if not record["files"].get(name, [0, 0, 0])[2]:
            data = file.read_bytes()
            record["files"][name] = [len(data), zlib.crc32(data), 0]
    write_record(path, record)


def _record(name: str, change: Callable[[Any], Any], *, may_load: bool = False) -> Case:
    """A case that changes the record, or replaces it by what `change` returns."""

    def make(path: Path) -> None:
        record = read_record(path)
        replaced = change(record)
        write_record(path, record if replaced is None else replaced)

    return Case(f"record-{name}", make, may_load)


def _leaf(name: str, index: int, value: Any, *, may_load: bool = False) -> Case:
    """A case that sets one field of the first leaf: kind, dtype, shape, chunk, detail, sharding."""

    def change(record: Any) -> None:
        record["items"]["state"]["leaves"][0][index] = value

    return _record(f"leaf-{name}", change, may_load=may_load)


def _shape(name: str, shape: list[Any], chunk: list[Any]) -> Case:
    def change(record: Any) -> None:
        record["items"]["state"]["leaves"][0][2:4] = [shape, chunk]

    return _record(f"shape-{name}", change)


def _item(name: str, field: str, value: Any, *, may_load: bool = False) -> Case:
    def change(record: Any) -> None:
        record["items"]["state"][field] = value

    return _record(f"item-{name}", change, may_load=may_load)


def _field(name: str, field: str, value: Any, *, may_load: bool = False) -> Case:
    return _record(name, lambda record: record.update({field: value}), may_load=may_load)


def _renamed_item(new: str) -> Case:
    def change(record: Any) -> None:
        record["items"] = {new: record["items"]["state"]}

    return _record(f"item-named-{new[:12]!r}", change)


def _listed_file(name: str, entry: Any) -> Case:
    """A file in the list of files: a load may do without it, `verify` may not."""

    def change(record: Any) -> None:
        record["files"][name] = entry

    case = _record(f"file-{name[:20]!r}-{entry}", change, may_load=True)
    return dataclasses.replace(case, found=True)


def _nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def _deep_record(record: Any) -> bytes:
    body = json.dumps(record).encode()
    return body.replace(b'"metadata": null', b'"metadata": ' + _nested(200_000), 1)


def _doubled_record(record: Any) -> bytes:
    """The files again, under keys that stand there already, without any file in them."""
    return json.dumps(record).encode()[:-1] + b', "files": {}}'


def _not_a_number(record: Any) -> bytes:
    body = json.dumps(record).encode()
    return re.sub(rb'"created_unix_secs": [0-9.e+-]+', b'"created_unix_secs": NaN', body)


def _long_number(record: Any) -> bytes:
    return re.sub(
        rb'"format_version": 1', b'"format_version": ' + b"9" * 100_000, json.dumps(record).encode()
    )


def _code_as_type(type_name: str, kind: str) -> Case:
    """A container whose class is code: resuming must not call what a stranger names."""
    nodes = [["dict", "", ["a"]], [kind, type_name, ["command"]], 0]

    def change(record: Any) -> None:
        item = record["items"]["state"]
        item["nodes"] = nodes
        item["leaves"] = [["str", "", [], [], "", None]]

    def make(path: Path) -> None:
        record = read_record(path)
        change(record)
        write_record(path, record)
        (path / "state/_strings.json").write_text('{"a.command": "touch outside/made"}')
        _sign(path)

    return Case(f"class-{kind}-{type_name}", make, may_load=True)


def _checksums(name: str, change: Callable[[Any], Any], *, may_load: bool = False) -> Case:
    def make(path: Path) -> None:
        for file in path.glob("*/checksums/*"):
            value = json.loads(file.read_bytes())
            replaced = change(value)
            body = replaced if isinstance(replaced, bytes) else json.dumps(value).encode()
            file.write_bytes(body)
        _sign(path)

    return Case(f"checksums-{name}", make, may_load)


def _text(name: str, kind: str, detail: str, text: str) -> Case:
    """A case whose one leaf is stored as text."""

    def make(path: Path) -> None:
        record = read_record(path)
        item = record["items"]["state"]
        item["nodes"] = [["dict", "", ["a"]], 0]
        item["leaves"] = [[kind, "", [], [], detail, None]]
        write_record(path, record)
        (path / "state/_strings.json").write_text(json.dumps({"a": text}))
        _sign(path)

    return Case(f"text-{name}", make)


def _process(name: str, exact: bytes, count: int = 1) -> Case:
    """A case whose item is the state of a process."""

    def make(path: Path) -> None:
        record = read_record(path)
        item = record["items"]["state"]
        item |= {"form": "process", "process_count": count, "nodes": [0]}
        item["leaves"] = [["str", "", [], [], "", None]]
        write_record(path, record)
        (path / "state/exact").mkdir()
        (path / "state/exact/process_0-of-1.json").write_bytes(exact)
        _sign(path)

    return Case(f"process-{name}", make)


def _rewritten(
    name: str, base: str, key: str, change: Callable[[bytes], bytes], *, codec: str | None = None
) -> Case:
    """A case in whose database one value is another one; all of it is signed."""

    def make(path: Path) -> None:
        store: Any = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/state/"}).result()
        store.write(key, change(bytes(store.read(key).result().value))).result()
        _sign(path)

    return Case(f"database-{name}{base}", make, base=base)


def _metadata_of_large(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | changes).encode()


def _large_leaf(name: str, base: str, shape: list[int], chunk: list[int], **changes: Any) -> Case:
    """A case in which record and `zarr.json` agree about a leaf that is not what is stored."""

    def make(path: Path) -> None:
        record = read_record(path)
        record["items"]["state"]["leaves"][-1][2:4] = [shape, chunk]
        write_record(path, record)
        metadata = _metadata_of_large(shape=shape, chunk_grid=grid(*chunk), **changes)
        _rewritten("", base, "large/zarr.json", metadata).make(path)

    return Case(f"database-{name}{base}", make, base=base)


def _node(payload: bytes) -> bytes:
    """A node of the index of an OCDBT database, uncompressed."""
    head = struct.pack(">I", 0x0CDB20DE) + struct.pack("<Q", len(payload) + 18) + b"\0\0"
    return head + payload + struct.pack("<I", crc32c.crc32c(head + payload))


def _missing() -> bytes:
    return b"\xff" * 9 + b"\1"  # an offset or length that is not given


def _root(
    name: str, node: Callable[[], bytes], *, length: int = 0, grown: int = 0, record: bool = True
) -> Case:
    """A case whose index has another root, of a length that may be a lie.

    Args:
        node: its bytes.
        length: what the manifest says of its length; the truth where it is 0.
        grown: the size that its file is given.
        record: whether ckpt wrote the checkpoint, or Orbax.
    """

    def make(path: Path) -> None:
        item = path / "state"
        shutil.rmtree(item / "d", ignore_errors=True)
        (item / "manifest.ocdbt").unlink()
        if not record:
            (path / "ckpt.json").unlink()
            (item / "_METADATA").write_bytes(as_json(_metadata([["a"]], zarr3=True, ocdbt=True)))
            (path / "_CHECKPOINT_METADATA").write_text("{}")
        put_root(item, node(), length=length, grown=grown)
        if record:
            _sign_sparse(path)

    return Case(f"index-{name}{'' if record else '-orbax'}", make)


def put_root(item: Path, node: bytes, *, length: int = 0, grown: int = 0) -> None:
    """A database of one key, whose root is then replaced."""
    config = {"compression": None, "max_inline_value_bytes": 10, "manifest_kind": "single"}
    base = ts.KvStore.open(f"file://{item}/").result()
    spec = {"driver": "ocdbt", "base": f"file://{item}/", "config": config}
    ts.KvStore.open(spec).result().write("a/zarr.json", b"x" * 100).result()
    versions: Any = ts.ocdbt.dump(base).result()
    root = max(versions["versions"], key=lambda version: version["generation_number"])["root"]
    _, _, file, offset, old_length = root["location"].split(":")
    manifest = (item / "manifest.ocdbt").read_bytes()
    old = _missing() + _varint(int(offset)) + _missing() + _varint(int(old_length))
    assert manifest.count(old) == 1
    data = (item / file).read_bytes()
    new = _missing() + _varint(len(data)) + _missing() + _varint(length or len(node))
    body = manifest[12:-4].replace(old, new)
    whole = manifest[:4] + struct.pack("<Q", len(body) + 16) + body
    (item / "manifest.ocdbt").write_bytes(whole + struct.pack("<I", crc32c.crc32c(whole)))
    (item / file).write_bytes(data + node)
    if grown:
        os.truncate(item / file, grown)


def _sign_sparse(path: Path) -> None:
    """Signs, without reading what is of gigabytes: a data file, whose digest covers nothing then."""
    record = read_record(path)
    for file in path.rglob("d/*"):
        if file.stat().st_size > GIB:
            record["files"][str(file.relative_to(path))] = [file.stat().st_size, 0, 1]
    write_record(path, record)
    _sign(path)


def _many_keys(count: int) -> bytes:
    """A leaf node of keys without values: as many as TensorStore takes in one."""
    keys = b"".join(number.to_bytes(3, "big") for number in range(count))
    return _node(
        b"\0\0"
        + _varint(count)
        + _varint(0) * (count - 1)
        + _varint(3) * count
        + keys
        + _varint(0) * count
        + _varint(0) * count
    )


def _blocks(count: int) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for key in value["chunks"]:
            value["chunks"][key] = [0] * count

    return change


RECORD_CASES = [
    _shape("huge", [2**40, 2**19], [2**40, 2**19]),
    _shape("overflow-64", [2**62, 2**62], [2**62, 2**62]),
    _shape("beyond-64", [2**70], [2**70]),
    _shape("thousand-digits", [10**1000], [10**1000]),
    _shape("negative", [-3, -4], [3, 4]),
    _shape("fraction", [1.5, 4], [1, 4]),
    _shape("text", ["3", "4"], ["3", "4"]),
    _shape("bool", [True, 12], [True, 12]),
    _shape("many-dimensions", [1] * 1000, [1] * 1000),
    _shape("terabyte", [2**38], [2**38]),
    _shape("terabyte-in-tiny-chunks", [2**38], [1]),
    _shape("zero-chunk", [3, 4], [0, 0]),
    _shape("huge-chunk", [3, 4], [2**62, 2**62]),
    _shape("hundred-million-chunks", [10**8], [1]),
    _shape("not-a-list", None, None),  # type: ignore[arg-type]
    _shape("one-element-more", [3, 5], [3, 5]),
    _leaf("kind", 0, "evil"),
    _leaf("kind-list", 0, ["evil"]),
    _leaf("dtype", 1, "object"),
    _leaf("dtype-void", 1, "V1000000000"),
    _leaf("dtype-text", 1, "U1000000000"),
    _leaf("dtype-nothing", 1, None),
    _leaf("dtype-number", 1, 7),
    _leaf("dtype-list", 1, [["a", "f4"]]),
    _leaf("dtype-wider", 1, "float64"),
    _leaf("sharding-index", 5, 10**9),
    _leaf("sharding-negative", 5, -1, may_load=True),
    _leaf("sharding-text", 5, "x"),
    _item("form", "form", "evil"),
    _item("codec", "codec", "evil"),
    _item("process-count", "process_count", 10**15, may_load=True),
    _item("process-count-negative", "process_count", -1, may_load=True),
    _item("no-nodes", "nodes", []),
    _item("deep-nodes", "nodes", [["dict", "", ["a"]]] * 200_000 + [0]),
    _item("endless-list", "nodes", [["list", "", 2**59], 0, 0, 0]),
    _item("negative-list", "nodes", [["list", "", -3], 0, 0, 0]),
    _item("unknown-kind", "nodes", [["set", "", ["a"]], 0]),
    _item("double-key", "nodes", [["dict", "", ["a", "a", "b", "large"]], 0, 0, 0, 0]),
    _item("float-key", "nodes", [["dict", "", [1.5]], 0]),
    _item("many-shardings", "shardings", [{"sharding_type": "NamedSharding"}] * 100, may_load=True),
    _item("shardings-text", "shardings", "x", may_load=True),
    *(
        _renamed_item(name)
        for name in (
            "../outside",
            "/etc",
            "a/../../outside",
            "..",
            ".",
            "",
            "a\0b",
            "state/",
            "x" * 5000,
        )
    ),
    *(
        _listed_file(name, [8, 0, 0])
        for name in (
            "../outside/canary",
            "/etc/passwd",
            "state/../../outside/canary",
            "",
            "a\0b",
            "..",
            "state",
        )
    ),
    _listed_file("state/_METADATA", [-1, 0, 0]),
    _listed_file("state/_METADATA", [2**59, 0, 0]),
    _listed_file("state/_METADATA", [float("nan"), 0, 0]),
    _listed_file("state/_METADATA", "text"),
    _listed_file("state/missing", [1, 1, 1]),
    _field("version-future", "format_version", 999),
    _field("version-text", "format_version", "1"),
    _field("version-nothing", "format_version", None),
    _field("items-list", "items", ["state"]),
    _field("items-empty", "items", {}, may_load=True),
    _field("files-list", "files", ["a"]),
    _field("files-empty", "files", {}, may_load=True),
    _field("metrics", "metrics", {"loss": [[]]}, may_load=True),
    _field("metrics-text", "metrics", "loss"),
    _field("token", "token", {"a": [1]}, may_load=True),
    _field("single", "single", False, may_load=True),
    _record("a-list", lambda record: b"[]"),
    _record("a-number", lambda record: b"12"),
    _record("nothing", lambda record: b"null"),
    _record("empty-object", lambda record: b"{}"),
    _record("deep", _deep_record),
    _record("all-deep", lambda record: _nested(200_000)),
    _record("double-files", _doubled_record, may_load=True),
    _record("nan-time", _not_a_number, may_load=True),
    _record("long-number", _long_number),
    _record("not-utf8", lambda record: b'{"format_version": "\xff\xfe"}'),
    _code_as_type("os.system", "namedtuple"),
    _code_as_type("os:system", "namedtuple"),
    _code_as_type("os.system", "dataclass"),
    _code_as_type("subprocess.Popen", "dataclass"),
    _code_as_type("subprocess:Popen", "custom"),
    _code_as_type("builtins.exec", "custom"),
    _code_as_type("trap_module.Trap", "namedtuple"),
    _checksums("block-bytes-zero", lambda value: value.update(block_bytes=0)),
    _checksums("block-bytes-one", lambda value: value.update(block_bytes=1)),
    # One block all the same, so nothing is wrong with what it says.
    _checksums("block-bytes-huge", lambda value: value.update(block_bytes=2**80), may_load=True),
    _checksums("block-bytes-text", lambda value: value.update(block_bytes="4194304")),
    _checksums("no-chunks", lambda value: value.update(chunks={})),
    _checksums("chunks-list", lambda value: value.update(chunks=[])),
    _checksums("no-blocks", _blocks(0)),
    _checksums("many-blocks", _blocks(1000)),
    _checksums("wrong-blocks", _blocks(1)),
    _checksums(
        "text-blocks", lambda value: value.update(chunks=dict.fromkeys(value["chunks"], "x"))
    ),
    _checksums("deep", lambda value: _nested(200_000)),
    _text("generator-deep", "generator", "PCG64", '{"state": ' + "[" * 10**5 + "]" * 10**5 + "}"),
    _text(
        "generator-pool",
        "generator",
        "PCG64",
        json.dumps({"state": {}, "seed": {"entropy": 1, "spawn_key": [], "pool_size": 2**40}}),
    ),
    _text("bigint", "bigint", "", "0x" + "z" * 1000),
    _process("deep", b'{"nodes": [0], "leaves": [' + _nested(200_000) + b"]}"),
    _process("endless-list", b'{"nodes": [["list", "", 1099511627775], 0], "leaves": [1]}'),
    _process(
        "huge-array", b'{"nodes": [0], "leaves": [["numpy", "uint8", [1099511627776], "", ""]]}'
    ),
    _process("huge-count", b'{"nodes": [0], "leaves": [1]}', count=10**15),
]

# ---- our database: signed again, so that what lies in it is believed so far ---------------------

_LARGE = 90_000 * 4
_INNER = {
    "chunk_shape": [1],
    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    "index_location": "end",
}


def _zstd_of_large(_: bytes) -> bytes:
    """As many zeros as the leaf `large` has bytes: sound, and not what was saved."""
    runs = [2**17] * (_LARGE // 2**17) + [_LARGE % 2**17]
    blocks = [(size << 3 | 2).to_bytes(3, "little") + b"\0" for size in runs[:-1]]
    end = (runs[-1] << 3 | 3).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(blocks) + end


def _blosc_bomb(_: bytes) -> bytes:
    """A chunk of 96 KiB that blosc makes 2047 MiB of, by hand: blocks of 1 MiB of zeros."""
    count, block_bytes = 2047, 2**20
    block = _zstd_zeros(block_bytes // 2**17)
    block = struct.pack("<i", len(block)) + block
    starts = [16 + 4 * count + number * len(block) for number in range(count)]
    body = struct.pack(f"<{count}i", *starts) + block * count
    no_split_zstd = 4 << 5 | 0x10
    sizes = (count * block_bytes, block_bytes, 16 + len(body))
    return struct.pack("<BBBBIII", 2, 1, no_split_zstd, 4, *sizes) + body


DATABASE_CASES = [
    _rewritten("chunk-short", "", "large/c/0", lambda data: data[:-1]),
    _rewritten("chunk-long", "", "large/c/0", lambda data: data * 2),
    _rewritten("chunk-long", "-zstd", "large/c/0", lambda data: data + bytes(2 * _LARGE)),
    _rewritten("zstd-bomb", "-zstd", "large/c/0", lambda _: _zstd_zeros(2 * GIB // 2**17)),
    _rewritten("garbage", "-zstd", "large/c/0", lambda data: b"\x28\xb5\x2f\xfd" + b"\xff" * 99),
    _rewritten("blosc-bomb", "-blosc", "large/c/0", _blosc_bomb),
    _rewritten("other-values", "-zstd", "large/c/0", _zstd_of_large),
    _rewritten("metadata-shape", "-zstd", "large/zarr.json", _metadata_of_large(shape=[2**33])),
    _rewritten(
        "metadata-chunk",
        "-zstd",
        "large/zarr.json",
        _metadata_of_large(
            chunk_grid={"name": "regular", "configuration": {"chunk_shape": [2**40]}}
        ),
    ),
    _rewritten("metadata-deep", "-zstd", "large/zarr.json", lambda _: _nested(200_000)),
    _rewritten("metadata-long", "-zstd", "large/zarr.json", lambda data: data + b" " * 2**21),
    _rewritten(
        "metadata-inner-chunks",
        "-zstd",
        "large/zarr.json",
        _metadata_of_large(codecs=[{"name": "sharding_indexed", "configuration": _INNER}]),
    ),
    _large_leaf("terabyte-chunk", "-zstd", [2**38], [2**38]),
    _large_leaf("terabyte-chunk", "", [2**38], [2**38]),
    _root("node-of-40-gigabytes", lambda: b"", length=40 * GIB, grown=41 * GIB),
    _root("node-of-40-gigabytes", lambda: b"", length=40 * GIB, grown=41 * GIB, record=False),
    _root("node-beyond-the-end", lambda: b"", length=2**20),
    _root("node-of-many-keys", lambda: _node(b"\0\0" + _varint(2**28))),
    _root("node-inflates", lambda: _inflating_node(), record=False),
    _root("too-many-keys", lambda: _many_keys(2**17)),
]

# ---- files that are not files -------------------------------------------------------------------


_NEEDED = ("ckpt.json", "state/manifest.ocdbt")  # a load reads these, the rest is for Orbax


def _pipe(name: str) -> Case:
    """Opening a pipe that nobody writes to blocks for ever."""

    def make(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return Case(f"pipe-{name}", make, name not in _NEEDED, found=True)


def _link(name: str, target: str) -> Case:
    def make(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(target)

    return Case(f"link-{name}-{Path(target).name}", make, name not in _NEEDED, found=True)


def _directory_as_file(name: str) -> Case:
    def make(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return Case(f"directory-{name}", make, name not in _NEEDED, found=True)


def _item_link(path: Path) -> None:
    """The item is a link to a directory outside."""
    outside = path.parent / "outside" / f"state-of-{path.name}"
    (path / "state").rename(outside)
    (path / "state").symlink_to(outside)


def _data_link(path: Path) -> None:
    """A data file is a link to a file outside; its size fits."""
    file = max((path / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    size = file.stat().st_size
    outside = path.parent / "outside" / f"data-of-{path.name}"
    outside.write_bytes((SECRET * (size // len(SECRET) + 1))[:size])
    file.unlink()
    file.symlink_to(outside)


def _loop(path: Path) -> None:
    (path / "loop").symlink_to(path)
    (path / "state" / "loop").symlink_to(path)


FILE_CASES = [
    *(
        _pipe(name)
        for name in ("ckpt.json", "_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt")
    ),
    *(
        _link(name, "/dev/zero")
        for name in ("ckpt.json", "_CHECKPOINT_METADATA", "state/_METADATA")
    ),
    *(
        _link(name, "/etc/passwd")
        for name in ("ckpt.json", "state/_METADATA", "state/manifest.ocdbt")
    ),
    *(
        _directory_as_file(name)
        for name in ("ckpt.json", "_CHECKPOINT_METADATA", "state/manifest.ocdbt")
    ),
    Case("link-item", _item_link, may_load=True),
    Case("link-data", _data_link),
    Case("link-loop", _loop, may_load=True),
]

# ---- Orbax's directories: nothing there is signed -----------------------------------------------

_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
_DATA = np.arange(12, dtype="<f4").tobytes()


def zarr3_json(**changes: Any) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [3, 4],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 4]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0,
        "codecs": [_LITTLE],
        "attributes": {},
        **changes,
    }


def zarr2_json(**changes: Any) -> dict[str, Any]:
    return {
        "zarr_format": 2,
        "shape": [3, 4],
        "chunks": [3, 4],
        "dtype": "<f4",
        "order": "C",
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "dimension_separator": ".",
        **changes,
    }


def grid(*shape: Any) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(shape)}}


def as_json(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def _metadata(names: list[list[str]], *, zarr3: bool, ocdbt: bool, **more: Any) -> dict[str, Any]:
    entries = {
        str(tuple(keys)): {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
        for keys in names
    }
    return {"tree_metadata": entries, "use_ocdbt": ocdbt, "use_zarr3": zarr3, **more}


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
    *,
    zarr3: bool = True,
    ocdbt: bool = True,
    chunk: bytes = _DATA,
    keys: list[str] | None = None,
    metadata: Any = None,
    may_load: bool = False,
    extra: dict[str, bytes] | None = None,
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
        tree = metadata or _metadata([path_of_leaf], zarr3=zarr3, ocdbt=ocdbt)
        (item / "_METADATA").write_bytes(as_json(tree))
        for file, data in (extra or {}).items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_bytes(data)
        if "_CHECKPOINT_METADATA" not in (extra or {}):
            (path / "_CHECKPOINT_METADATA").write_text("{}")

    return Case(f"orbax-{name}", make, may_load)


def _zstd_zeros(blocks: int) -> bytes:
    """A zstd frame, written by hand: `blocks` times 128 KiB of zeros in four bytes each."""
    header = b"\x28\xb5\x2f\xfd" + b"\x00" + b"\x58"  # magic, no size given, 2 MiB window
    run, last, length = 1 << 1, 1, 2**17 << 3
    block = (run | length).to_bytes(3, "little") + b"\0"
    end = (run | last | length).to_bytes(3, "little") + b"\0"
    return header + block * (blocks - 1) + end


def _nested_sharding(depth: int) -> dict[str, Any]:
    codecs: list[Any] = [_LITTLE]
    for _ in range(depth):
        configuration = {
            "chunk_shape": [3, 4],
            "codecs": codecs,
            "index_codecs": [_LITTLE, {"name": "crc32c"}],
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": configuration}]
    return zarr3_json(codecs=codecs)


def _inflating_node() -> bytes:
    """A node that is 16 GiB of zeros when it is decompressed."""
    payload = _zstd_zeros(16 * GIB // 2**17)
    head = struct.pack(">I", 0x0CDB20DE) + struct.pack("<Q", len(payload) + 18) + b"\0\1"
    return head + payload + struct.pack("<I", crc32c.crc32c(head + payload))


def _deep_attributes(depth: int) -> bytes:
    return as_json(zarr3_json()).replace(
        b'"attributes": {}', b'"attributes": {"x": ' + _nested(depth) + b"}"
    )


_BOMB_CODECS = [_LITTLE, {"name": "zstd", "configuration": {"level": 1}}]
_TOO_BIG = [("2-50", [2**50]), ("overflow", [2**61, 2**61]), ("2-63", [2**63]), ("2-70", [2**70])]


def _bomb(path: Path) -> None:
    """A chunk of 64 KiB that decompresses to 2 GiB, in an array of twelve elements."""
    _orbax("", zarr3_json(codecs=_BOMB_CODECS), chunk=_zstd_zeros(2 * GIB // 2**17)).make(path)


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
    (item / "_METADATA").write_bytes(as_json(_metadata([["a"]], zarr3=True, ocdbt=True)))
    (path / "_CHECKPOINT_METADATA").write_text("{}")


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


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
        body += _varint(1) + _varint(len(file)) + _varint(0) + file.encode()
        body += _varint(2) + _varint(0) + _varint(1) + _varint(padding) + _varint(0) * 2
        body += b"a" + b"b" * padding + _varint(0) * 2  # keys, and which file of the table
        body += b"".join(_varint(n) * 2 for n in (start, int(length), 400, 5000, 1000))
        node = magic + struct.pack("<Q", len(body) + 18) + b"\0\0" + body
        if len(node) + 4 == int(length):
            data[start:end] = node + struct.pack("<I", crc32c.crc32c(node))
            break
    else:
        raise AssertionError("no padding fits")
    (item / file).write_bytes(data)
    (item / "_METADATA").write_bytes(as_json(_metadata([["a"]], zarr3=True, ocdbt=True)))
    (path / "_CHECKPOINT_METADATA").write_text("{}")


ORBAX_CASES = [
    _orbax("good", may_load=True),
    _orbax("good-files", ocdbt=False, may_load=True),
    _orbax("good-zarr2", zarr3=False, may_load=True),
    *(
        _orbax(f"shape-{name}", zarr3_json(shape=shape, chunk_grid=grid(*shape)))
        for name, shape in _TOO_BIG
    ),
    *(
        _orbax(
            f"zarr2-shape-{name}", zarr2_json(shape=shape, chunks=shape), zarr3=False, ocdbt=False
        )
        for name, shape in _TOO_BIG
    ),
    _orbax("chunk-2-45", zarr3_json(chunk_grid=grid(2**45, 2**10))),
    _orbax("chunk-2-45-files", zarr3_json(chunk_grid=grid(2**45, 2**10)), ocdbt=False),
    _orbax("zarr2-chunk-2-45", zarr2_json(chunks=[2**45, 2**10]), zarr3=False),
    _orbax("terabyte-of-missing-chunks", zarr3_json(shape=[2**38, 1], chunk_grid=grid(1, 1))),
    _orbax("gigabytes-of-missing-chunks", zarr3_json(shape=[2**33], chunk_grid=grid(2**20))),
    _orbax("negative", zarr3_json(shape=[-3, 4])),
    _orbax("chunk-zero", zarr3_json(chunk_grid=grid(0, 4))),
    _orbax("nan", zarr3_json(shape=[float("nan"), 4])),
    _orbax("text-shape", zarr3_json(shape=["3", "4"])),
    _orbax("shape-nothing", zarr3_json(shape=None)),
    _orbax("many-dimensions", zarr3_json(shape=[1] * 1000, chunk_grid=grid(*[1] * 1000))),
    _orbax("dtype", zarr3_json(data_type="r4000000000")),
    _orbax("dtype-text", zarr3_json(data_type="string")),
    _orbax("zarr2-dtype", zarr2_json(dtype="|V4000000000"), zarr3=False),
    _orbax("zarr2-structured", zarr2_json(dtype=[["x", "<f4"], ["y", "<f4"]]), zarr3=False),
    _orbax("json-deep", _deep_attributes(200_000), may_load=True),
    _orbax("json-deep-files", _deep_attributes(200_000), ocdbt=False, may_load=True),
    _orbax("json-only-brackets", b"[" * 200_000),
    _orbax(
        "json-large", zarr3_json(attributes={"x": "y" * 20_000_000}), ocdbt=False, may_load=True
    ),
    _orbax("json-list", b"[]"),
    _orbax("json-empty", b""),
    _orbax("sharding-nested-thousand", _nested_sharding(100)),
    _orbax("codec-unknown", zarr3_json(codecs=[{"name": "evil"}])),
    _orbax("chunk-short", chunk=_DATA[:-1]),
    _orbax("chunk-long", chunk=_DATA * 100),
    Case("orbax-zstd-bomb", _bomb),
    _orbax(
        "zstd-garbage", zarr3_json(codecs=_BOMB_CODECS), chunk=b"\x28\xb5\x2f\xfd" + b"\xff" * 100
    ),
    _orbax("metadata-deep", metadata=b'{"tree_metadata": ' + _nested(200_000) + b"}"),
    _orbax("metadata-list", metadata=b"[1]"),
    _orbax("metadata-tree-list", metadata=b'{"tree_metadata": [1]}'),
    _orbax("metadata-keys-text", metadata=b'{"tree_metadata": {"x": {"key_metadata": "abc"}}}'),
    _orbax("metadata-keys-numbers", metadata=b'{"tree_metadata": {"x": {"key_metadata": [1, 2]}}}'),
    _orbax("metadata-not-utf8", metadata=b'{"tree_metadata": {"\xff": 1}}'),
    _orbax("metadata-deep-tree", metadata=_metadata([["a"] * 20_000], zarr3=True, ocdbt=True)),
    _orbax(
        "metadata-rich-types",
        metadata=_metadata([["a"]], zarr3=True, ocdbt=True)
        | {
            "value_metadata_tree": json.dumps(
                {"category": "namedtuple", "module": "os", "clazz": "system", "entries": []}
            )
        },
        may_load=True,
    ),
    _orbax("names-up", keys=["..", "..", "outside", "array"], ocdbt=False),
    _orbax("names-up-slash", keys=["../../outside/array"], ocdbt=False),
    _orbax("names-absolute", keys=["/etc"], ocdbt=False),
    _orbax("names-nul", keys=["a\0b"], ocdbt=False),
    _orbax("names-long", keys=["x" * 100_000], ocdbt=False),
    _orbax("names-up-database", keys=["../../outside/array"]),
    _orbax("strings-deep", extra={"state/_strings.json": _nested(200_000)}, may_load=True),
    _orbax("sharding-deep", extra={"state/_sharding": _nested(200_000)}, may_load=True),
    _orbax(
        "sharding-huge-mesh",
        extra={
            "state/_sharding": as_json(
                {
                    "YQ==": json.dumps(
                        {
                            "sharding_type": "NamedSharding",
                            "shape": [2**40],
                            "axis_names": ["x"],
                            "partition_spec": ["x"],
                        }
                    )
                }
            )
        },
        may_load=True,
    ),
    _orbax(
        "arrays-deep", extra={"state/array_metadatas/process_0": _nested(200_000)}, may_load=True
    ),
    _orbax(
        "key-implementation",
        extra={
            "state/array_metadatas/process_0": as_json(
                {
                    "array_metadatas": [
                        {
                            "array_metadata": {
                                "param_name": "a",
                                "write_shape": [3, 4],
                                "chunk_shape": [3, 4],
                                "ext_metadata": {"random_key_impl": "evil"},
                            }
                        }
                    ]
                }
            )
        },
        may_load=True,
    ),
    _orbax("step-metadata-deep", extra={"_CHECKPOINT_METADATA": _nested(200_000)}, may_load=True),
    _orbax("step-metadata-list", extra={"_CHECKPOINT_METADATA": b"[]"}, may_load=True),
    _orbax(
        "step-handlers-evil",
        extra={"_CHECKPOINT_METADATA": b'{"item_handlers": {"../../outside": "os.system"}}'},
        may_load=True,
    ),
    _orbax("manifest-garbage", extra={"state/manifest.ocdbt": b"\x0c\xdb:*" + b"\xff" * 200}),
    _orbax("manifest-empty", extra={"state/manifest.ocdbt": b""}),
    Case("orbax-reference-outside", _outside_reference),
    Case("orbax-index-loop", _index_loop),
]

CASES = [*RECORD_CASES, *DATABASE_CASES, *FILE_CASES, *ORBAX_CASES]

SAYS: dict[str, str] = {
    "record-shape-huge": "impossible shape",
    "record-shape-overflow-64": "impossible shape",
    "record-shape-beyond-64": "impossible shape",
    "record-shape-thousand-digits": "impossible shape",
    "record-shape-negative": "impossible shape",
    "record-shape-fraction": "impossible shape",
    "record-shape-text": "impossible shape",
    "record-shape-bool": "impossible shape",
    "record-shape-many-dimensions": "impossible shape",
    "record-shape-terabyte": "chunk a/c/0 is missing",
    "record-shape-terabyte-in-tiny-chunks": "chunks are missing from the index",
    "record-shape-zero-chunk": "impossible chunk shape",
    "record-shape-huge-chunk": "impossible chunk shape",
    "record-shape-hundred-million-chunks": "chunks are missing from the index",
    "record-shape-not-a-list": "'NoneType' object is not iterable",
    "record-shape-one-element-more": "has 48 bytes, not",
    "record-leaf-kind": "unknown kind of leaf 'evil'",
    "record-leaf-kind-list": "unhashable type: 'list'",
    "record-leaf-dtype": "dtype 'object' is not one that a checkpoint holds",
    "record-leaf-dtype-void": "dtype 'V",
    "record-leaf-dtype-text": "dtype 'U",
    "record-leaf-dtype-nothing": "dtype None is not one that a checkpoint holds",
    "record-leaf-dtype-number": "dtype 7 is not one that a checkpoint holds",
    "record-leaf-dtype-list": "unhashable type: 'list'",
    "record-leaf-dtype-wider": "has 48 bytes, not",
    "record-leaf-sharding-index": "a leaf refers to a sharding that is not there",
    "record-leaf-sharding-negative": "a leaf refers to a sharding that is not there",
    "record-leaf-sharding-text": "a leaf refers to a sharding that is not there",
    "record-item-form": "unknown form of an item 'evil'",
    "record-item-codec": "Options.compression must be None, 'zstd' or 'zstd:<level>' (",
    "record-item-process-count": "impossible number of processes",
    "record-item-process-count-negative": "impossible number of processes",
    "record-item-no-nodes": "the structure has fewer nodes than its root holds",
    "record-item-deep-nodes": "the structure is nested more than 300 levels deep",
    "record-item-endless-list": "impossible number of children",
    "record-item-negative-list": "impossible number of children",
    "record-item-unknown-kind": "unknown kind of container 'set'",
    "record-item-double-key": "4 leaves in the structure, 5 described",
    "record-item-float-key": "impossible key",
    "record-item-named-'../outside'": "impossible name of an item",
    "record-item-named-'/etc'": "impossible name of an item",
    "record-item-named-'a/../../outs'": "impossible name of an item",
    "record-item-named-'..'": "impossible name of an item",
    "record-item-named-'.'": "impossible name of an item",
    "record-item-named-''": "impossible name of an item",
    "record-item-named-'a\\x00b'": "impossible name of an item",
    "record-item-named-'state/'": "impossible name of an item",
    "record-item-named-'xxxxxxxxxxxx'": "impossible name of an item",
    "record-file-'../outside/canary'-[8, 0, 0]": "impossible name of a file",
    "record-file-'/etc/passwd'-[8, 0, 0]": "impossible name of a file",
    "record-file-'state/../../outside/'-[8, 0, 0]": "impossible name of a file",
    "record-file-''-[8, 0, 0]": "impossible name of a file",
    "record-file-'a\\x00b'-[8, 0, 0]": "impossible name of a file",
    "record-file-'..'-[8, 0, 0]": "impossible name of a file",
    "record-file-'state/_METADATA'-[-1, 0, 0]": "impossible size",
    "record-file-'state/_METADATA'-[nan, 0, 0]": "impossible size",
    "record-file-'state/_METADATA'-text": "too many values to unpack (expected 3)",
    "record-version-future": "format version 999 is not known to this version of ckpt (whi",
    "record-version-text": "format version '1' is not known to this version of ckpt (whi",
    "record-version-nothing": "format version None is not known to this version of ckpt (wh",
    "record-items-list": "'list' object has no attribute 'items'",
    "record-items-empty": "it names no item",
    "record-files-list": "'list' object has no attribute 'items'",
    "record-files-empty": "was never saved",
    "record-metrics-text": "dictionary update sequence element #0 has length 1; 2 is req",
    "record-a-list": "list indices must be integers or slices, not str",
    "record-a-number": "its fields do not fit: TypeError",
    "record-nothing": "'NoneType' object is not subscriptable",
    "record-empty-object": "'format_version'",
    "record-deep": "maximum recursion depth",
    "record-all-deep": "maximum recursion depth",
    "record-double-files": "was never saved",
    "record-long-number": "not valid JSON: Exceeds the limit (4300 digits) for integer",
    "record-not-utf8": "not valid JSON: 'utf-8' codec can't decode byte 0xff in posi",
    "checksums-block-bytes-zero": "state/checksums/process_0: not a checksum file: blocks of no",
    "checksums-block-bytes-one": "too few checksums for chunk a/c/0/0",
    "checksums-block-bytes-text": "state/checksums/process_0: not a checksum file: fields do no",
    "checksums-no-chunks": "no checksum for chunk a/c/0/0",
    "checksums-chunks-list": "state/checksums/process_0: not a checksum file: fields do no",
    "checksums-no-blocks": "no checksum for chunk a/c/0/0",
    "checksums-many-blocks": "its checksum differs",
    "checksums-wrong-blocks": "its checksum differs",
    "checksums-text-blocks": "no checksum for chunk a/c/0/0",
    "checksums-deep": "maximum recursion depth",
    "text-generator-deep": "maximum recursion depth",
    "text-generator-pool": "impossible pool of a",
    "text-bigint": "its text cannot be read: invalid literal for int() with base",
    "process-deep": "maximum recursion depth",
    "process-endless-list": "state/exact/process_0-of-1.json: not the state of a process:",
    "process-huge-array": "state/exact/process_0-of-1.json: not the state of a process:",
    "process-huge-count": "impossible number of processes",
    "database-chunk-short": "has 359999 bytes, not",
    "database-chunk-long": "has 720000 bytes, not",
    "database-chunk-long-zstd": "too many for",
    "database-zstd-bomb-zstd": "End of data expected",
    "database-garbage-zstd": "ZSTD_decompressStream() failed",
    "database-blosc-bomb-blosc": "claims to be",
    "database-other-values-zstd": "its checksum differs",
    "database-metadata-shape-zstd": "zarr.json says shape",
    "database-metadata-chunk-zstd": "impossible shape",
    "database-metadata-deep-zstd": "maximum recursion depth",
    "database-metadata-long-zstd": "impossible zarr",
    "database-metadata-inner-chunks-zstd": "Error reading shard entry",
    "database-terabyte-chunk-zstd": "no memory for",
    "database-terabyte-chunk": "has 360000 bytes, not",
    "index-node-of-40-gigabytes": "impossible node of",
    "index-node-of-40-gigabytes-orbax": "impossible node of",
    "index-node-beyond-the-end": "Requested byte range",
    "index-node-of-many-keys": "a node of 268435456 entries",
    "index-node-inflates-orbax": "it has more than 268435456 bytes",
    "index-too-many-keys": "more than the 10 keys",
    "pipe-ckpt.json": "no regular file",
    "pipe-state/manifest.ocdbt": "no regular file",
    "link-ckpt.json-zero": "no regular file",
    "link-ckpt.json-passwd": "its own checksum does not match: it is damaged or incomplete",
    "link-state/manifest.ocdbt-passwd": "at most: it is damaged, and not read",
    "directory-ckpt.json": "is missing, though",
    "directory-state/manifest.ocdbt": "manifest.ocdbt is missing",
    "link-data": "its checksum differs",
    "orbax-shape-2-50": "impossible shape",
    "orbax-shape-overflow": "Integer overflow",
    "orbax-shape-2-63": 'object member "shape',
    "orbax-shape-2-70": 'object member "shape',
    "orbax-zarr2-shape-2-50": "impossible shape",
    "orbax-zarr2-shape-overflow": "Product of chunk dimensions",
    "orbax-zarr2-shape-2-63": 'object member "shape',
    "orbax-zarr2-shape-2-70": 'object member "shape',
    "orbax-chunk-2-45": "impossible shape",
    "orbax-chunk-2-45-files": "impossible shape",
    "orbax-zarr2-chunk-2-45": "impossible shape",
    "orbax-terabyte-of-missing-chunks": "Unable to allocate",
    "orbax-gigabytes-of-missing-chunks": "Unable to allocate",
    "orbax-negative": 'object member "shape',
    "orbax-chunk-zero": 'object member "chunk_grid',
    "orbax-nan": "Invalid JSON",
    "orbax-text-shape": 'object member "shape',
    "orbax-shape-nothing": 'object member "shape',
    "orbax-many-dimensions": 'object member "shape',
    "orbax-dtype": 'object member "fill_value',
    "orbax-dtype-text": 'object member "data_type',
    "orbax-zarr2-dtype": "no such dtype: byte",
    "orbax-zarr2-structured": 'Must specify a "field"',
    "orbax-json-deep": "maximum recursion depth",
    "orbax-json-deep-files": "maximum recursion depth",
    "orbax-json-only-brackets": "maximum recursion depth",
    "orbax-json-large": "a/zarr.json has",
    "orbax-json-list": "Expected object",
    "orbax-json-empty": "a/zarr.json: not valid JSON: Expecting value: line 1 column",
    "orbax-sharding-nested-thousand": "Error reading shard entry",
    "orbax-codec-unknown": 'object member "codecs',
    "orbax-chunk-short": "Not enough data",
    "orbax-chunk-long": "End of data expected",
    "orbax-zstd-bomb": "End of data expected",
    "orbax-zstd-garbage": "ZSTD_decompressStream() failed",
    "orbax-metadata-deep": "maximum recursion depth",
    "orbax-metadata-list": "state/_METADATA: not a description of a tree: TypeError('lis",
    "orbax-metadata-tree-list": "state/_METADATA: not a description of a tree: AttributeError",
    "orbax-metadata-keys-text": "state/_METADATA: not a description of a tree: KeyError('valu",
    "orbax-metadata-keys-numbers": "state/_METADATA: not a description of a tree: KeyError('valu",
    "orbax-metadata-not-utf8": "state/_METADATA: not valid JSON: 'utf-8' codec can't decode",
    "orbax-metadata-deep-tree": "maximum recursion depth",
    "orbax-names-up": "its metadata zarr.json is missing",
    "orbax-names-up-slash": "Invalid file path",
    "orbax-names-absolute": "Invalid file path",
    "orbax-names-nul": "embedded null byte",
    "orbax-names-long": "File name too long",
    "orbax-names-up-database": "manifest.ocdbt is missing",
    "orbax-sharding-deep": "maximum recursion depth",
    "orbax-arrays-deep": "maximum recursion depth",
    "orbax-step-metadata-deep": "maximum recursion depth",
    "orbax-step-metadata-list": "_CHECKPOINT_METADATA: not an object",
    "orbax-manifest-garbage": "its length is not the one that it gives",
    "orbax-manifest-empty": "it begins with no bytes",
    "orbax-reference-outside": "outside the item",
    "orbax-index-loop": "refers to a node twice",
}
