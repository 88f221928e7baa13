"""A checkpoint from a stranger cannot crash, exhaust or hang the process, or leave its directory.

Every case is opened by all readers in a child with little memory and little time. A reader may
raise a `CheckpointError`, or load where nothing is wrong after all; anything else is a failure: an
untyped exception, a signal, a file changed or made outside, bytes from outside the directory.
Checksums are no defence here: who makes a hostile checkpoint makes its checksums too. Small files whose content
asks for much more than a gigabyte or ten seconds are refused with the message of their bound.
"""

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.faults import crafted
from tests.contract.faults.crafted import by_hand
from tests.contract.faults.crafted.by_hand import GIB, Case
from tests.contract.faults.crafted.databases import put_root
from tests.contract.faults.crafted.signed import read_record, sign, write_record
from tests.contract.faults.harness import Children, Outcome

ADDRESS_SPACE_BYTES = 8 * GIB
RESIDENT_BYTES = 1.5 * GIB
BATCH_TIMEOUT_SECS = 60
LOADERS = ("load", "as_numpy", "like")
LIMITS = {"RLIMIT_AS": ADDRESS_SPACE_BYTES}


@pytest.fixture(name="good", scope="module")
def make_good(plain_pool: Children, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "good"
    outcome = plain_pool.run("hostile:make", [str(path)])
    assert outcome.exit_code == 0, str(outcome)
    return path


@pytest.mark.parametrize(
    "cases",
    [crafted.RECORD_CASES, crafted.DATABASE_CASES, crafted.FILE_CASES, crafted.ORBAX_CASES],
    ids=["record", "database", "files", "orbax"],
)
def test_hostile(plain_pool, good, tmp_path, cases):
    names = [case.name for case in crafted.CASES]
    assert len(names) == len(set(names)) or pytest.fail(f"names twice in {sorted(names)}")
    outside = make_outside(tmp_path)
    paths = {
        case.name: make_case(case, good, tmp_path, number) for number, case in enumerate(cases)
    }
    before = _contents(outside)
    wrong = list(_open(plain_pool, cases, paths))
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong)
    assert _contents(outside) == before, "something outside was changed"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["outside", *(path.name for path in paths.values())]
    ), "something was made beside the checkpoints"


def test_hostile_step(plain_pool, good, tmp_path):
    """A trainer that finds only a hostile step does not start from scratch, nor die."""
    directory = tmp_path / "steps"
    shutil.copytree(f"{good}-steps", directory)
    record = read_record(directory / "0")
    record["items"]["state"]["leaf_types"][0][2:4] = [[2**40, 2**19], [2**40, 2**19]]
    write_record(directory / "0", record)
    outcome = plain_pool.run("hostile:open_steps", [str(directory)], limits=LIMITS)
    assert outcome.exit_code == 0, str(outcome)
    (results,) = outcome.reported("results")
    assert results["restore_latest"].startswith("CheckpointCorrupt: "), results
    assert "impossible shape" in results["restore_latest"], results


def make_outside(tmp_path: Path) -> Path:
    """What must stay as it is; the module in it would say when it is imported."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_bytes(by_hand.SECRET)
    (outside / "array").mkdir()
    (outside / "array" / "zarr.json").write_bytes(
        by_hand.as_json(by_hand.zarr3_json(shape=[250], chunk_grid=by_hand.grid(250)))
    )
    (outside / "array" / "c").mkdir()
    (outside / "array" / "c" / "0").write_bytes(by_hand.SECRET)
    return outside


def make_case(case: Case, good: Path, tmp_path: Path, number: int) -> Path:
    path = tmp_path / f"case-{number}"
    shutil.copytree(f"{good}{case.base}", path)
    case.make(path)
    return path


def _contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in sorted(files)}


def _open(pool: Children, cases: list[Case], paths: dict[str, Path]) -> Iterator[str]:
    """Opens all cases in as few children as possible; what is wrong, one line each."""
    by_name = {case.name: case for case in cases}
    left = list(by_name)
    while left:
        names = left.copy()
        outcome = pool.run(
            "hostile:open_all",
            [[(name, str(paths[name])) for name in left]],
            timeout_secs=BATCH_TIMEOUT_SECS,
            limits=LIMITS,
        )
        for event in outcome.events:
            if "opened" in event:
                left.remove(event["opened"])
                case = by_name[event["opened"]]
                yield from judge(case, event)
                # what the case is made for, and not something that came before
                told = event["results"].values()
                if case.says is not None and not any(case.says in text for text in told):
                    yield f"{case.name}: not refused with {case.says!r}, but {event['results']}"
        if outcome.max_rss_bytes > RESIDENT_BYTES:
            yield f"{outcome.max_rss_bytes / GIB:.1f} GiB resident, with {names}"
        if outcome.exit_code == 0:
            break
        died_at = outcome.reported("opening")
        if not died_at:
            yield f"the child did not start: {outcome}"
            return
        left.remove(died_at[-1])
        how = "hangs" if outcome.timed_out else f"ends the process ({outcome.exit_code})"
        yield f"{died_at[-1]}: {how}: {outcome.output[-600:]}"


def judge(case: Case, event: dict[str, Any]) -> Iterator[str]:
    for reader, result in event["results"].items():
        if result.startswith("untyped"):
            yield f"{case.name}: {reader}: {result}"
        elif reader in LOADERS and not case.may_load and result in ("ok", "good"):
            yield f"{case.name}: {reader} takes it"
    if case.found and event["results"]["verify"] == "ok":
        yield f"{case.name}: verify finds nothing"


# ---- grown files

GROWN_LIMITS = {"RLIMIT_AS": 6 * GIB}


@pytest.fixture(scope="module")
def steps(plain_pool: Children, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of two steps, of a run that has metadata and a local tier."""
    path = tmp_path_factory.mktemp("run") / "steps"
    outcome = plain_pool.run("hostile:make_run", [str(path)])
    assert outcome.exit_code == 0, str(outcome)
    return path


def grow(file: Path) -> None:
    assert file.is_file()
    os.truncate(file, 40 * GIB)


def test_what_lies_beside_the_steps(plain_pool, steps, tmp_path):
    for number, name in enumerate((".ckpt-owner", ".ckpt-run", "metadata/_ROOT_METADATA")):
        copy = tmp_path / str(number)
        shutil.copytree(steps, copy)
        if name == ".ckpt-owner":  # of a writer that was killed: one that is closed leaves none
            (copy / name).write_bytes(b"0")
        grow(copy / name)
        outcome = plain_pool.run("hostile:go_on", [str(copy)], timeout_secs=60, limits=GROWN_LIMITS)
        assert outcome.exit_code == 0, str(outcome)
        assert outcome.max_rss_bytes < GIB
        (event,) = outcome.events
        refused = [text for text in event["results"] if text.startswith("CheckpointCorrupt")]
        assert not [text for text in event["results"] if text.startswith("untyped")], event
        # the owner's file only says who was there: a claim replaces what it cannot read
        assert bool(refused) == (name != ".ckpt-owner"), event
        assert all(name.rpartition("/")[2] in text for text in refused), event


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA", "data"])
def test_orbax_checkpoints(plain_pool, steps, tmp_path, name):
    """Nothing there is listed by anybody: fixed limits, and sizes that the index gives."""
    copy = tmp_path / "copy"
    shutil.copytree(steps / "1", copy)
    outcome = plain_pool.run("hostile:without_record", [str(copy)])
    assert outcome.exit_code == 0, str(outcome)
    if name == "data":
        grow(next(copy.glob("state/ocdbt.process_0/d/*")))
    else:
        grow(copy / name if name.startswith("_CHECK") else copy / "state" / name)
    arguments = [[(name, str(copy))], ["inspect", "load", "as_numpy"]]
    outcome = plain_pool.run("hostile:open_all", arguments, timeout_secs=60, limits=GROWN_LIMITS)
    assert outcome.exit_code == 0, str(outcome)
    assert outcome.max_rss_bytes < GIB
    (results,) = outcome.reported("results")
    for result in results.values():
        # data: there is no size to hold it against, and what is wanted of it is there
        assert result == "ok" if name == "data" else result.startswith("CheckpointCorrupt"), results
        assert name == "data" or name in result


MOST_RESIDENT_BYTES = int(1.2 * GIB)
MOST_SECS = 10.0
COSTLY_ADDRESS_SPACE_BYTES = 12 * GIB
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
    (path / "state/_METADATA").write_bytes(by_hand.ONE_ARRAY)
    count = 2**20
    shared = by_hand.varint(2000) * count + by_hand.varint(3) * (count - 1)
    keys = b"k" * 2000 + b"".join(number.to_bytes(3, "big") for number in range(count - 1))
    put_root(
        path / "state",
        by_hand.node(b"\0\0" + by_hand.varint(count) + shared + keys + b"\0" * 2 * count),
    )


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
    limits = {"RLIMIT_AS": COSTLY_ADDRESS_SPACE_BYTES}
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
