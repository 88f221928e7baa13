"""A crafted directory or file costs about a gigabyte and ten seconds at most, whatever it says of itself.

Each case is a small file whose content asks for much more. It must be refused with the message of the bound that it
is made for.
"""

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.faults.crafted.by_hand import as_json, node, tree_metadata, varint
from tests.contract.faults.crafted.databases import put_root
from tests.contract.faults.crafted.signed import read_record, sign, write_record
from tests.contract.faults.fixtures import make_plain_pool  # noqa: F401 (fixture)
from tests.contract.faults.harness import Outcome

GIB = 2**30
MOST_RESIDENT_BYTES = int(1.2 * GIB)
MOST_SECS = 10.0
ADDRESS_SPACE_BYTES = 12 * GIB
_STOP_SECS = 60
ONE_HASH = 2**61 - 1
"""Python's integers hash by their rest modulo this number."""


@dataclass(frozen=True)
class Cost:
    """A crafted directory or file.

    Attributes:
        make: writes it; given the path of a good checkpoint, or of nothing.
        calls: what is tried.
        says: part of the message of the bound.
    """

    name: str
    make: Callable[[Path], None]
    calls: tuple[str, ...]
    says: str


def _record(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        ckpt.save(path, {"a": np.arange(3)}, options=ckpt.Options(durable=False))
        record = read_record(path)
        replaced = change(record)
        write_record(path, record if replaced is None else replaced)

    return make


def _packed(record: Any) -> None:
    """Zeros for a thousand files that the record says are of 8 MiB each."""
    files = {f"state/x{number}": [8 * 2**20, 0, 0] for number in range(1000)}
    sizes = json.dumps({name: 8 * 2**20 for name in files}).encode() + b"\n"
    line = len(sizes) << 3  # a block that is not compressed
    head = b"\x28\xb5\x2f\xfd\x00\x58"
    blocks = line.to_bytes(3, "little") + sizes
    zeros = b"".join([(2**17 << 3 | 2).to_bytes(3, "little") + b"\0"] * (8000 * 2**20 // 2**17))
    end = (1).to_bytes(3, "little")
    record["files"] |= files
    record["small_files"] = base64.b64encode(head + blocks + zeros + end).decode()


NUMBER = ["int", "int64", [], [], "", None, None]
TEXT = ["str", "", [], [], "", None, None]


def _leaves(item: Any, kind: list[Any], count: int) -> None:
    item |= {"leaf_types": [kind], "leaves": [0] * count}


def _deep_and_wide(leaves: int) -> Callable[[Any], bytes]:
    """Four million leaves, 290 levels deep, of which so many are described."""

    def change(record: Any) -> bytes:
        item = record["items"]["state"]
        count = 4_000_000
        item["nodes"] = [*[["list", "", 1]] * 289, ["list", "", count], "@"]
        _leaves(item, NUMBER, leaves)
        text = json.dumps(record, separators=(",", ":")).encode()
        return text.replace(b'"@"', b"0," * (count - 1) + b"0")

    return change


def _long_key(record: Any) -> None:
    item = record["items"]["state"]
    item["nodes"] = [["dict", "", ["k" * (4 * 2**20)]], ["list", "", 2000], *[0] * 2000]
    _leaves(item, NUMBER, 2000)


def _of_texts(nodes: list[Any], names: list[str]) -> Callable[[Path], None]:
    """A sound checkpoint of texts, but for the keys of its containers."""

    def change(record: Any) -> None:
        record["items"]["state"]["nodes"] = nodes
        _leaves(record["items"]["state"], TEXT, len(names))

    def make(path: Path) -> None:
        _record(change)(path)
        (path / "state/_strings.json").write_text(json.dumps(dict.fromkeys(names, "")))
        sign(path)

    return make


_COUNT = 60_000
_ALIKE = [ONE_HASH * n for n in range(_COUNT)]
_CASES_OF_ONE_HASH = {
    "keys": _of_texts([["dict", "", _ALIKE], *[0] * _COUNT], [str(key) for key in _ALIKE]),
    "tuples": _of_texts(
        [["dict", "", [[1, key] for key in _ALIKE]], *[0] * _COUNT],
        [f"(1, {key})" for key in _ALIKE],
    ),
}


def _statics_of_one_hash(record: Any) -> None:
    record["items"]["state"]["statics"] = [[ONE_HASH * n, {"fields": {}}] for n in range(60_000)]


def _shardings_of_one_hash(record: Any) -> None:
    count = 60_000
    item = record["items"]["state"]
    item["nodes"] = [["list", "", count], *[0] * count]
    item["leaf_types"] = [[*NUMBER[:5], ONE_HASH * n, None] for n in range(count)]
    item["leaves"] = [*range(count)]


def _objects(opening: bytes) -> Callable[[Any], bytes]:
    """Metadata of values that take thirty times their text."""

    def change(record: Any) -> bytes:
        record["metadata"] = "@"
        text = json.dumps(record, separators=(",", ":")).encode()
        return text.replace(b'"@"', b"[" + (opening + b",") * 24_000_000 + b"0]")

    return change


def _containers(record: Any) -> bytes:
    count = 3_000_000
    record["items"]["state"]["nodes"] = "@"
    text = json.dumps(record, separators=(",", ":")).encode()
    return text.replace(
        b'"@"', b'[["list","",%d],' % count + b'["list","",0],' * (count - 1) + b"0]"
    )


def _orbax(nodes: Callable[[], bytes]) -> Callable[[Path], None]:
    """A checkpoint as Orbax writes it, with another index."""

    def make(path: Path) -> None:
        item = path / "state"
        item.mkdir(parents=True)
        (item / "_METADATA").write_bytes(as_json(tree_metadata([["a"]], zarr3=True, ocdbt=True)))
        (path / "_CHECKPOINT_METADATA").write_text("{}")
        put_root(item, nodes())

    return make


def _orbax_metadata(text: Callable[[], bytes]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        (path / "state").mkdir(parents=True)
        (path / "_CHECKPOINT_METADATA").write_text("{}")
        (path / "state/_METADATA").write_bytes(text())

    return make


def _keys_of_64_kib() -> bytes:
    """A leaf node whose keys share nearly all of 2,000 bytes with the one before: 2 GiB of them."""
    count = 2**20
    return node(
        b"\0\0"
        + varint(count)
        + varint(2000) * (count - 1)
        + varint(2000)
        + varint(3) * (count - 1)
        + b"k" * 2000
        + b"".join(number.to_bytes(3, "big") for number in range(count - 1))
        + varint(0) * count
        + b"\0" * count
    )


COSTS = [
    Cost("packed-declares-itself", _record(_packed), ("load", "verify"), "it has more than"),
    Cost(
        "deep-and-wide",
        _record(_deep_and_wide(1)),
        ("inspect", "load"),
        "leaves in the structure, 1 described",
    ),
    Cost(
        "wide",
        _record(_deep_and_wide(4_000_000)),
        ("inspect", "load"),
        "more than 1500000 leaves",
    ),
    Cost(
        "long-key",
        _record(_long_key),
        ("inspect", "load"),
        "the paths of its leaves have more than",
    ),
    Cost(
        "keys-of-one-hash",
        _CASES_OF_ONE_HASH["keys"],
        ("load", "inspect"),
        "keys with the same hash",
    ),
    Cost(
        "tuples-of-one-hash",
        _CASES_OF_ONE_HASH["tuples"],
        ("load", "inspect"),
        "keys with the same hash",
    ),
    Cost(
        "statics-of-one-hash",
        _record(_statics_of_one_hash),
        ("inspect",),
        "which is no registered class",
    ),
    Cost(
        "shardings-of-one-hash",
        _record(_shardings_of_one_hash),
        ("inspect",),
        "refers to a sharding that is not",
    ),
    Cost("metadata-of-objects", _record(_objects(b'{"a":0}')), ("inspect",), "bytes of memory"),
    Cost("metadata-of-lists", _record(_objects(b"[]")), ("inspect",), "bytes of memory"),
    Cost("containers", _record(_containers), ("inspect",), "more than 1048576 containers"),
    Cost(
        "orbax-objects",
        _orbax_metadata(lambda: b"[" + b"{}," * 24_000_000 + b"0]"),
        ("inspect",),
        "bytes of memory",
    ),
    Cost("orbax-keys", _orbax(_keys_of_64_kib), ("load",), "its keys are too long"),
]


def _too_much(outcome: Outcome) -> Iterator[str]:
    if outcome.exit_code < 0 or outcome.timed_out or "MemoryError" in outcome.output:
        yield f"ends with {outcome.exit_code}{' (time)' * outcome.timed_out}: {outcome.output[-500:]}"
    if outcome.max_rss_bytes > MOST_RESIDENT_BYTES:
        yield f"takes {outcome.max_rss_bytes / GIB:.2f} GiB"
    if max(outcome.reported("secs"), default=0) > MOST_SECS:
        yield f"takes {outcome.reported('secs')} s"


@pytest.mark.parametrize(
    "case",
    COSTS,
    ids=lambda case: case.name,
)
def test_it_is_refused_for_little(plain_pool, tmp_path, case):
    path = tmp_path / case.name
    case.make(path)
    limits = {"RLIMIT_AS": ADDRESS_SPACE_BYTES}
    for call in case.calls:
        outcome = plain_pool.run(
            "hostile:opened", [call, str(path)], timeout_secs=_STOP_SECS, limits=limits
        )
        assert not [*_too_much(outcome)], f"{call}: {[*_too_much(outcome)]}"
        assert outcome.exit_code == 0, str(outcome)
        (said,) = outcome.reported("said")
        assert case.says in said and not said.startswith("untyped"), f"{call}: {said}"
