"""Our record, checksums and texts, made to harm and signed again."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.contract.faults.crafted.by_hand import nested
from tests.contract.faults.crafted.case import Case
from tests.contract.faults.crafted.signed import read_record, sign, write_record

ONE_TEXT = {"leaf_types": [["str", "", [], [], "", None, None]], "leaves": [0]}


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
        record["items"]["state"]["leaf_types"][0][index] = value

    return _record(f"leaf-{name}", change, may_load=may_load)


def _position(value: Any) -> Case:
    """A case whose last leaf is of the type at another position."""

    def change(record: Any) -> None:
        record["items"]["state"]["leaves"][-1] = value

    return _record(f"position-{value}", change)


def _version_1(record: Any) -> None:
    record["format_version"] = 1
    item = record["items"]["state"]
    item["leaves"] = [item["leaf_types"][at] for at in item["leaves"]]
    item["leaves"][-1] = ["evil", *item["leaves"][-1][1:6]]


def _shape(name: str, shape: list[Any], chunk: list[Any]) -> Case:
    def change(record: Any) -> None:
        record["items"]["state"]["leaf_types"][0][2:4] = [shape, chunk]

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
    return re.sub(
        rb'"format_version": 2', b'"format_version": ' + b"9" * 100_000, json.dumps(record).encode()
    )


def _code_as_type(type_name: str, kind: str) -> Case:
    """A container whose class is code: resuming must not call what a stranger names."""
    nodes = [["dict", "", ["a"]], [kind, type_name, ["command"]], 0]

    def change(record: Any) -> None:
        item = record["items"]["state"]
        item["nodes"] = nodes
        item |= ONE_TEXT

    def make(path: Path) -> None:
        record = read_record(path)
        change(record)
        write_record(path, record)
        (path / "state/_strings.json").write_text('{"a.command": "touch outside/made"}')
        sign(path)

    return Case(f"class-{kind}-{type_name}", make, may_load=True)


def _checksums(name: str, change: Callable[[Any], Any], *, may_load: bool = False) -> Case:
    def make(path: Path) -> None:
        for file in path.glob("*/checksums/*"):
            value = json.loads(file.read_bytes())
            replaced = change(value)
            body = replaced if isinstance(replaced, bytes) else json.dumps(value).encode()
            file.write_bytes(body)
        sign(path)

    return Case(f"checksums-{name}", make, may_load)


def _text(name: str, kind: str, detail: str, text: str) -> Case:
    """A case whose one leaf is stored as text."""

    def make(path: Path) -> None:
        record = read_record(path)
        item = record["items"]["state"]
        item["nodes"] = [["dict", "", ["a"]], 0]
        item |= {"leaf_types": [[kind, "", [], [], detail, None, None]], "leaves": [0]}
        write_record(path, record)
        (path / "state/_strings.json").write_text(json.dumps({"a": text}))
        sign(path)

    return Case(f"text-{name}", make)


def _process(name: str, exact: bytes, count: int = 1) -> Case:
    """A case whose item is the state of a process."""

    def make(path: Path) -> None:
        record = read_record(path)
        item = record["items"]["state"]
        item |= {"form": "process", "process_count": count, "nodes": [0]} | ONE_TEXT
        write_record(path, record)
        (path / "state/exact").mkdir()
        (path / "state/exact/process_0-of-1.json").write_bytes(exact)
        sign(path)

    return Case(f"process-{name}", make)


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
    _leaf("codec", 6, "evil"),
    _item("process-count", "process_count", 10**15, may_load=True),
    _item("process-count-negative", "process_count", -1, may_load=True),
    _item("no-types", "leaf_types", []),
    _item("types-text", "leaf_types", "int"),
    _record("leaves-few", lambda record: record["items"]["state"]["leaves"].remove(0)),
    _item("leaves-number", "leaves", 3),
    *(_position(value) for value in (2**70, -1, True, 0.0, "0", [0], None)),
    _record("version-1-leaf", _version_1),
    _record("version-1-positions", lambda record: record.update(format_version=1)),
    _item("no-nodes", "nodes", []),
    _item("deep-nodes", "nodes", [["dict", "", ["a"]]] * 200_000 + [0]),
    _item("endless-list", "nodes", [["list", "", 2**59], 0, 0, 0]),
    _item("negative-list", "nodes", [["list", "", -3], 0, 0, 0]),
    _item("unknown-kind", "nodes", [["set", "", ["a"]], 0]),
    _item("double-key", "nodes", [["dict", "", ["a", "a", "b", "large"]], 0, 0, 0, 0]),
    _item("float-key", "nodes", [["dict", "", [1.5]], 0]),
    _item("many-shardings", "shardings", [{"sharding_type": "NamedSharding"}] * 100, may_load=True),
    _item("shardings-text", "shardings", "x", may_load=True),
    *map(_renamed_item, ("../outside", "/etc", "a/../../outside", "..", ".", "", "a\0b")),
    *map(_renamed_item, ("state/", "x" * 5000)),
    *(_listed_file(f"{up}outside/canary", [8, 0, 0]) for up in ("../", "state/../../")),
    *(_listed_file(name, [8, 0, 0]) for name in ("/etc/passwd", "", "a\0b", "..", "state")),
    _listed_file("state/_METADATA", [-1, 0, 0]),
    _listed_file("state/_METADATA", [2**59, 0, 0]),
    _listed_file("state/_METADATA", [float("nan"), 0, 0]),
    _listed_file("state/_METADATA", "text"),
    _listed_file("state/missing", [1, 1, 1]),
    _field("version-future", "format_version", 999),
    _field("version-text", "format_version", "1"),
    _field("version-nothing", "format_version", None),
    _field("token-path", "token", "../../x"),
    _field("token-number", "token", 7),
    _field("token-surrogate", "token", "\ud800"),
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
    _record("all-deep", lambda record: nested(200_000)),
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
    _checksums("deep", lambda value: nested(200_000)),
    _text("generator-deep", "generator", "PCG64", '{"state": ' + "[" * 10**5 + "]" * 10**5 + "}"),
    _text(
        "generator-pool",
        "generator",
        "PCG64",
        json.dumps({"state": {}, "seed": {"entropy": 1, "spawn_key": [], "pool_size": 2**40}}),
    ),
    _text("bigint", "bigint", "", "0x" + "z" * 1000),
    _process("deep", b'{"nodes": [0], "leaves": [' + nested(200_000) + b"]}"),
    _process("endless-list", b'{"nodes": [["list", "", 1099511627775], 0], "leaves": [1]}'),
    _process(
        "huge-array", b'{"nodes": [0], "leaves": [["numpy", "uint8", [1099511627776], "", ""]]}'
    ),
    _process("huge-count", b'{"nodes": [0], "leaves": [1]}', count=10**15),
]
