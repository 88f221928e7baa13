"""Our record, checksums and texts, made to harm and signed again; and files that are none."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.contract.faults.crafted.by_hand import DEEP, SECRET, Case, as_json, nested
from tests.contract.faults.crafted.signed import read_record, sign, write_record

Change = Callable[[Any], Any]
PROCESSES = "impossible number of processes"
ONE_TEXT = {"leaf_types": [["str", "", [], [], "", None, None]], "leaves": [0]}


def _record(name: str, change: Change, says: str | None = None, **more: Any) -> Case:
    """A case that changes the record, or replaces it by what `change` returns."""

    def make(path: Path) -> None:
        record = read_record(path)
        replaced = change(record)
        write_record(path, record if replaced is None else replaced)

    return Case(f"record-{name}", make, says=says, **more)


def _set(*path: Any, to: Any) -> Change:
    def change(record: Any) -> None:
        for key in path[:-1]:
            record = record[key]
        record[path[-1]] = to

    return change


OF_STATE = ("items", "state")
OF_LEAF = (*OF_STATE, "leaf_types", 0)


def _leaf(name: str, index: int, value: Any, says: str, **more: Any) -> Case:
    """A case that sets one field of the first leaf: kind, dtype, shape, chunk, detail, sharding."""
    return _record(f"leaf-{name}", _set(*OF_LEAF, index, to=value), says, **more)


def _position(value: Any) -> Case:
    """A case whose last leaf is of the type at another position."""
    change = _set(*OF_STATE, "leaves", -1, to=value)
    return _record(f"position-{value}", change, "a leaf of a type that is not there")


def _version_1(record: Any) -> None:
    record["format_version"] = 1
    item = record["items"]["state"]
    item["leaves"] = [item["leaf_types"][at] for at in item["leaves"]]
    item["leaves"][-1] = ["evil", *item["leaves"][-1][1:6]]


def _shape(name: str, shape: Any, chunk: Any, says: str = "impossible shape") -> Case:
    return _record(f"shape-{name}", _set(*OF_LEAF, slice(2, 4), to=[shape, chunk]), says)


def _item(name: str, field: str, value: Any, says: str | None = None, **more: Any) -> Case:
    return _record(f"item-{name}", _set(*OF_STATE, field, to=value), says, **more)


def _field(name: str, field: str, value: Any, says: str | None = None, **more: Any) -> Case:
    return _record(name, _set(field, to=value), says, **more)


def _renamed_item(new: str) -> Case:
    def change(record: Any) -> None:
        record["items"] = {new: record["items"]["state"]}

    return _record(f"item-named-{new[:12]!r}", change, "impossible name of an item")


def _listed_file(name: str, entry: Any = (8, 0, 0), says: str | None = None) -> Case:
    """A file in the list of files: a load may do without it, `verify` may not."""
    change = _set("files", name, to=entry)
    return _record(f"file-{name[:20]!r}-{entry}", change, says, may_load=True, found=True)


def _deep_record(record: Any) -> bytes:
    body = json.dumps(record).encode()
    return body.replace(b'"metadata": null', b'"metadata": ' + nested(200_000), 1)


def _doubled_record(record: Any) -> bytes:
    """The files again, under keys that stand there already, without any file in them."""
    return json.dumps(record).encode()[:-1] + b', "files": {}}'


def _not_a_number(record: Any) -> bytes:
    body = json.dumps(record).encode()
    return re.sub(rb'"created_unix_secs": [0-9.e+-]+', b'"created_unix_secs": NaN', body)


def _long_number(record: Any) -> bytes:
    return json.dumps(record).encode().replace(b'version": 2', b'version": ' + b"9" * 100_000)


def _code_as_type(type_name: str, kind: str) -> Case:
    """A container whose class is code: resuming must not call what a stranger names."""

    def make(path: Path) -> None:
        record = read_record(path)
        nodes = [["dict", "", ["a"]], [kind, type_name, ["command"]], 0]
        record["items"]["state"] |= {"nodes": nodes} | ONE_TEXT
        write_record(path, record)
        (path / "state/_strings.json").write_text('{"a.command": "touch outside/made"}')
        sign(path)

    return Case(f"class-{kind}-{type_name}", make, may_load=True)


def _checksums(name: str, change: Change, says: str | None = None, **more: Any) -> Case:
    def make(path: Path) -> None:
        for file in path.glob("*/checksums/*"):
            value = json.loads(file.read_bytes())
            replaced = change(value)
            file.write_bytes(replaced if isinstance(replaced, bytes) else as_json(value))
        sign(path)

    return Case(f"checksums-{name}", make, says=says, **more)


def _text(kind: str, detail: str, text: bytes, says: str) -> Case:
    def make(path: Path) -> None:
        record = read_record(path)
        item = record["items"]["state"]
        item["nodes"] = [["dict", "", ["a"]], 0]
        item |= {"leaf_types": [[kind, "", [], [], detail, None, None]], "leaves": [0]}
        write_record(path, record)
        (path / "state/_strings.json").write_text(json.dumps({"a": text.decode()}))
        sign(path)

    return Case(f"text-{kind}-{len(text)}", make, says=says)


def _of_leaf(leaf: bytes) -> bytes:
    return b'{"nodes": [0], "leaves": [' + leaf + b"]}"


def _process(
    name: str, exact: bytes, says: str = "not the state of a process:", count: int = 1
) -> Case:
    def make(path: Path) -> None:
        record = read_record(path)
        item = record["items"]["state"]
        item |= {"form": "process", "process_count": count, "nodes": [0]} | ONE_TEXT
        write_record(path, record)
        (path / "state/exact").mkdir()
        (path / "state/exact/process_0-of-1.json").write_bytes(exact)
        sign(path)

    return Case(f"process-{name}", make, says=says)


def _updated(**fields: Any) -> Change:
    return lambda value: value.update(fields)


def _blocks(blocks: Any) -> Change:
    return lambda value: value.update(chunks=dict.fromkeys(value["chunks"], blocks))


# ---- files that are not files: pipes, links, directories


def _instead(
    of: str, kind: str, put: Callable[[Path], object], says: str = "no regular file"
) -> Case:
    """Something else stands in the place of a file; a load needs two of them, the rest is for Orbax."""
    needed = of in ("ckpt.json", "state/manifest.ocdbt")

    def make(path: Path) -> None:
        (path / of).unlink()
        put(path / of)

    says_of = {"says": says} if needed else {"may_load": True}
    return Case(f"{kind}-{of}", make, found=True, **says_of)


def _item_link(path: Path) -> None:
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


_POOL = {"entropy": 1, "spawn_key": [], "pool_size": 2**40}
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
    _shape("terabyte", [2**38], [2**38], "chunk a/c/0 is missing"),
    _shape("terabyte-in-tiny-chunks", [2**38], [1], "chunks are missing from the index"),
    _shape("zero-chunk", [3, 4], [0, 0], "impossible chunk shape"),
    _shape("huge-chunk", [3, 4], [2**62, 2**62], "impossible chunk shape"),
    _shape("hundred-million-chunks", [10**8], [1], "chunks are missing from the index"),
    _shape("not-a-list", None, None, "'NoneType' object is not iterable"),
    _shape("one-element-more", [3, 5], [3, 5], "has 48 bytes, not"),
    _leaf("kind", 0, "evil", "unknown kind of leaf 'evil'"),
    _leaf("kind-list", 0, ["evil"], "impossible kind of a leaf"),
    _leaf("dtype", 1, "object", "dtype 'object' is not one that a checkpoint holds"),
    _leaf("dtype-void", 1, "V1000000000", "dtype 'V"),
    _leaf("dtype-text", 1, "U1000000000", "dtype 'U"),
    _leaf("dtype-nothing", 1, None, "dtype None is not one that a checkpoint holds"),
    _leaf("dtype-number", 1, 7, "dtype 7 is not one that a checkpoint holds"),
    _leaf("dtype-list", 1, [["a", "f4"]], "is not one that a checkpoint holds"),
    _leaf("dtype-wider", 1, "float64", "has 48 bytes, not"),
    _leaf("sharding-index", 5, 10**9, "a sharding that is not there"),
    _leaf("sharding-negative", 5, -1, may_load=True, says="a sharding that is not there"),
    _leaf("sharding-text", 5, "x", "a sharding that is not there"),
    _item("form", "form", "evil", "unknown form of an item 'evil'"),
    _leaf("codec", 6, "evil", "Options.compression must be None, 'zstd'"),
    *(
        _item(f"process-count-{count}", "process_count", count, PROCESSES, may_load=True)
        for count in (10**15, -1)
    ),
    _item("no-types", "leaf_types", [], "a leaf of a type that is not there"),
    _item("types-text", "leaf_types", "int", "not enough values to unpack"),
    _record(
        "leaves-few",
        lambda record: record["items"]["state"]["leaves"].remove(0),
        "5 leaves in the structure, 4 described",
    ),
    _item("leaves-number", "leaves", 3, "its fields do not fit: TypeError"),
    *(_position(value) for value in (2**70, -1, True, 0.0, "0", [0], None)),
    _record("version-1-leaf", _version_1, "unknown kind of leaf 'evil'"),
    _field("version-1-positions", "format_version", 1, "its fields do not fit: TypeError"),
    _item("no-nodes", "nodes", [], "the structure has fewer nodes than its root holds"),
    _item(
        "deep-nodes",
        "nodes",
        [["dict", "", ["a"]]] * 200_000 + [0],
        "nested more than 300 levels deep",
    ),
    _item("endless-list", "nodes", [["list", "", 2**59], 0, 0, 0], "impossible number of children"),
    _item("negative-list", "nodes", [["list", "", -3], 0, 0, 0], "impossible number of children"),
    _item("unknown-kind", "nodes", [["set", "", ["a"]], 0], "unknown kind of container 'set'"),
    _item(
        "double-key",
        "nodes",
        [["dict", "", ["a", "a", "b", "large"]], 0, 0, 0, 0],
        "4 leaves in the structure, 5 described",
    ),
    _item("float-key", "nodes", [["dict", "", [1.5]], 0], "impossible key"),
    _item("many-shardings", "shardings", [{"sharding_type": "NamedSharding"}] * 100, may_load=True),
    _item("shardings-text", "shardings", "x", may_load=True),
    *map(_renamed_item, ("../outside", "/etc", "a/../../outside", "..", ".", "", "a\0b")),
    *map(_renamed_item, ("state/", "x" * 5000)),
    *(
        _listed_file(name, says="impossible name of a file")
        for name in (
            *("../outside/canary", "state/../../outside/canary", "/etc/passwd", "", "a\0b", ".."),
        )
    ),
    _listed_file("state"),
    _listed_file("state/_METADATA", [-1, 0, 0], says="impossible size"),
    _listed_file("state/_METADATA", [2**59, 0, 0]),
    _listed_file("state/_METADATA", [float("nan"), 0, 0], says="impossible size"),
    _listed_file("state/_METADATA", "text", says="too many values to unpack (expected 3)"),
    _listed_file("state/missing", [1, 1, 1]),
    _field("version-future", "format_version", 999, "format version 999 is not known"),
    _field("version-text", "format_version", "1", "format version '1' is not known"),
    _field("version-nothing", "format_version", None, "format version None is not known"),
    _field("token-path", "token", "../../x"),
    _field("token-number", "token", 7),
    _field("token-surrogate", "token", "\ud800"),
    _field("items-list", "items", ["state"], "'list' object has no attribute 'items'"),
    _field("items-empty", "items", {}, may_load=True, says="it names no item"),
    _field("files-list", "files", ["a"], "'list' object has no attribute 'items'"),
    _field("files-empty", "files", {}, may_load=True, says="was never saved"),
    _field("metrics", "metrics", {"loss": [[]]}, may_load=True),
    _field("metrics-text", "metrics", "loss", "dictionary update sequence element #0"),
    _field("token", "token", {"a": [1]}, may_load=True),
    _field("single", "single", False, may_load=True),
    _record("a-list", lambda record: b"[]", "list indices must be integers or slices"),
    _record("a-number", lambda record: b"12", "its fields do not fit: TypeError"),
    _record("nothing", lambda record: b"null", "'NoneType' object is not subscriptable"),
    _record("empty-object", lambda record: b"{}", "'format_version'"),
    _record("deep", _deep_record, DEEP),
    _record("all-deep", lambda record: nested(200_000), DEEP),
    _record("double-files", _doubled_record, may_load=True, says="was never saved"),
    _record("nan-time", _not_a_number, may_load=True),
    _record("long-number", _long_number, "not valid JSON: Exceeds the limit"),
    _record(
        "not-utf8",
        lambda record: b'{"format_version": "\xff\xfe"}',
        "not valid JSON: 'utf-8' codec can't decode",
    ),
    _code_as_type("os.system", "namedtuple"),
    _code_as_type("os:system", "namedtuple"),
    _code_as_type("os.system", "dataclass"),
    _code_as_type("subprocess.Popen", "dataclass"),
    _code_as_type("subprocess:Popen", "custom"),
    _code_as_type("builtins.exec", "custom"),
    _code_as_type("trap_module.Trap", "namedtuple"),
    *(
        _checksums(f"{field}-{value}", _updated(**{field: value}), says, may_load=not says)
        for field, value, says in (
            ("block_bytes", 0, "not a checksum file: blocks of no"),
            ("block_bytes", 1, "too few checksums for chunk a/c/0/0"),
            (
                "block_bytes",
                2**80,
                None,
            ),  # one block all the same: nothing is wrong with what it says
            ("block_bytes", "4194304", "not a checksum file: fields do no"),
            ("chunks", {}, "no checksum for chunk a/c/0/0"),
            ("chunks", [], "not a checksum file: fields do no"),
        )
    ),
    _checksums("no-blocks", _blocks([]), "no checksum for chunk a/c/0/0"),
    _checksums("many-blocks", _blocks([0] * 1000), "its checksum differs"),
    _checksums("wrong-blocks", _blocks([0]), "its checksum differs"),
    _checksums("text-blocks", _blocks("x"), "no checksum for chunk a/c/0/0"),
    _checksums("deep", lambda value: nested(200_000), DEEP),
    _text("generator", "PCG64", b'{"state": ' + nested(10**5) + b"}", DEEP),
    _text("generator", "PCG64", as_json({"state": {}, "seed": _POOL}), "impossible pool of a"),
    _text("bigint", "", b"0x" + b"z" * 1000, "its text cannot be read: invalid literal for int()"),
    _process("deep", _of_leaf(nested(200_000)), DEEP),
    _process("endless-list", b'{"nodes": [["list", "", 1099511627775], 0], "leaves": [1]}'),
    _process("huge-array", _of_leaf(b'["numpy", "uint8", [1099511627776], "", ""]')),
    _process("huge-count", _of_leaf(b"1"), PROCESSES, count=10**15),
]
_NAMES = ("ckpt.json", "state/manifest.ocdbt", "_CHECKPOINT_METADATA", "state/_METADATA")
FILE_CASES = [
    *(_instead(name, "pipe", os.mkfifo) for name in _NAMES),  # to open one blocks for ever
    *(
        _instead(name, "zeros", lambda file: file.symlink_to("/dev/zero"))
        for name in ("ckpt.json", "_CHECKPOINT_METADATA", "state/_METADATA")
    ),
    *(
        _instead(name, "passwd", lambda file: file.symlink_to("/etc/passwd"), says)
        for name, says in (
            ("ckpt.json", "its own checksum does not match: it is damaged or incomplete"),
            ("state/_METADATA", ""),
            ("state/manifest.ocdbt", "at most: it is damaged, and not read"),
        )
    ),
    *(
        _instead(name, "directory", Path.mkdir, says)
        for name, says in (
            ("ckpt.json", "is missing, though"),
            ("_CHECKPOINT_METADATA", ""),
            ("state/manifest.ocdbt", "manifest.ocdbt is missing"),
        )
    ),
    Case("link-item", _item_link, may_load=True),
    Case("link-data", _data_link, says="its checksum differs"),
    Case("link-loop", _loop, may_load=True),
]
