"""A crafted directory or file costs about a gigabyte and ten seconds at most, whatever it says of itself.

Each case is a small file whose content asks for much more. It must be refused with the message of the bound that it
is made for.
"""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.faults.crafted.by_hand import GIB, ONE_ARRAY, node, varint
from tests.contract.faults.crafted.databases import put_root
from tests.contract.faults.crafted.signed import read_record, sign, write_record
from tests.contract.faults.harness import Outcome

MOST_RESIDENT_BYTES = int(1.2 * GIB)
MOST_SECS = 10.0
ADDRESS_SPACE_BYTES = 12 * GIB
_STOP_SECS = 60
ONE_HASH = 2**61 - 1
"""Python's integers hash by their rest modulo this number."""


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


_COUNT = 60_000
_ALIKE = [ONE_HASH * n for n in range(_COUNT)]


def _of_texts(keys: list[Any], name: str) -> Callable[[Path], None]:
    """A sound checkpoint of texts, but for the keys of its dictionary, of numbers that are called so in files."""
    names = [name.format(key) for key in _ALIKE]

    def change(record: Any) -> None:
        record["items"]["state"]["nodes"] = [["dict", "", keys], *[0] * _COUNT]
        _leaves(record["items"]["state"], TEXT, _COUNT)

    def make(path: Path) -> None:
        _record(change)(path)
        (path / "state/_strings.json").write_text(json.dumps(dict.fromkeys(names, "")))
        sign(path)

    return make


def _statics_of_one_hash(record: Any) -> None:
    record["items"]["state"]["statics"] = [[key, {"fields": {}}] for key in _ALIKE]


def _shardings_of_one_hash(record: Any) -> None:
    item = record["items"]["state"]
    item["nodes"] = [["list", "", _COUNT], *[0] * _COUNT]
    item["leaf_types"] = [[*NUMBER[:5], key, None] for key in _ALIKE]
    item["leaves"] = [*range(_COUNT)]


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


def _orbax_objects(path: Path) -> None:
    (path / "state").mkdir(parents=True)
    (path / "_CHECKPOINT_METADATA").write_text("{}")
    (path / "state/_METADATA").write_bytes(b"[" + b"{}," * 24_000_000 + b"0]")


def _orbax_keys(path: Path) -> None:
    """A leaf node whose keys share nearly all of 2,000 bytes with the one before: 2 GiB of them."""
    (path / "state").mkdir(parents=True)
    (path / "_CHECKPOINT_METADATA").write_text("{}")
    (path / "state/_METADATA").write_bytes(ONE_ARRAY)
    count = 2**20
    shared = varint(2000) * count + varint(3) * (count - 1)
    keys = b"k" * 2000 + b"".join(number.to_bytes(3, "big") for number in range(count - 1))
    put_root(path / "state", node(b"\0\0" + varint(count) + shared + keys + b"\0" * 2 * count))


BOTH = "inspect as_numpy"
# name -> what writes it, the readers that are tried, and part of the message of the bound
COSTS = {
    "packed-declares-itself": (_record(_packed), "as_numpy verify", "it has more than"),
    "deep-and-wide": (_record(_deep_and_wide(1)), BOTH, "leaves in the structure, 1 described"),
    "wide": (_record(_deep_and_wide(4_000_000)), BOTH, "more than 1500000 leaves"),
    "long-key": (_record(_long_key), BOTH, "the paths of its leaves have more than"),
    "keys-of-one-hash": (_of_texts(_ALIKE, "{}"), BOTH, "keys with the same hash"),
    "tuples-of-one-hash": (
        _of_texts([[1, key] for key in _ALIKE], "(1, {})"),
        BOTH,
        "keys with the same hash",
    ),
    "statics-of-one-hash": (
        _record(_statics_of_one_hash),
        "inspect",
        "which is no registered class",
    ),
    "shardings-of-one-hash": (
        _record(_shardings_of_one_hash),
        "inspect",
        "refers to a sharding that is not",
    ),
    "metadata-of-objects": (_record(_objects(b'{"a":0}')), "inspect", "bytes of memory"),
    "metadata-of-lists": (_record(_objects(b"[]")), "inspect", "bytes of memory"),
    "containers": (_record(_containers), "inspect", "more than 1048576 containers"),
    "orbax-objects": (_orbax_objects, "inspect", "bytes of memory"),
    "orbax-keys": (_orbax_keys, "as_numpy", "its keys are too long"),
}


def _too_much(outcome: Outcome) -> Iterator[str]:
    if outcome.exit_code < 0 or outcome.timed_out or "MemoryError" in outcome.output:
        yield f"ends with {outcome.exit_code}{' (time)' * outcome.timed_out}: {outcome.output[-500:]}"
    if outcome.max_rss_bytes > MOST_RESIDENT_BYTES:
        yield f"takes {outcome.max_rss_bytes / GIB:.2f} GiB"
    if max(outcome.reported("secs"), default=0) > MOST_SECS:
        yield f"takes {outcome.reported('secs')} s"


@pytest.mark.parametrize("name", COSTS)
def test_it_is_refused_for_little(plain_pool, tmp_path, name):
    path = tmp_path / name
    make, readers, says = COSTS[name]
    make(path)
    limits = {"RLIMIT_AS": ADDRESS_SPACE_BYTES}
    for reader in readers.split():
        arguments = [[(name, str(path))], [reader]]
        outcome = plain_pool.run(
            "hostile:open_all", arguments, timeout_secs=_STOP_SECS, limits=limits
        )
        assert not [*_too_much(outcome)], f"{reader}: {[*_too_much(outcome)]}"
        assert outcome.exit_code == 0, str(outcome)
        (results,) = outcome.reported("results")
        said = results[reader]
        assert says in said and not said.startswith("untyped"), f"{reader}: {said[-3000:]}"
