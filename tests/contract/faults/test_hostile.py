"""A checkpoint from a stranger cannot crash, exhaust or hang the process, or leave its directory.

Every case is opened by all readers in a child with little memory and little time. A reader may
raise a `CheckpointError`, or load where nothing is wrong after all; anything else is a failure: an
untyped exception, a signal, a file changed or made outside, bytes from outside the directory.
Checksums are no defence here: who makes a hostile checkpoint makes its checksums too. A file that was
grown to 40 GiB is found out by its size, and nobody reads it; it is sparse, so it costs nothing to make.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.faults.crafted import (
    CASES,
    DATABASE_CASES,
    FILE_CASES,
    ORBAX_CASES,
    RECORD_CASES,
)
from tests.contract.faults.crafted.by_hand import GIB, SECRET, Case, as_json, grid, zarr3_json
from tests.contract.faults.crafted.signed import read_record, write_record
from tests.contract.faults.harness import Children

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
    [RECORD_CASES, DATABASE_CASES, FILE_CASES, ORBAX_CASES],
    ids=["record", "database", "files", "orbax"],
)
def test_hostile(plain_pool, good, tmp_path, cases):
    names = [case.name for case in CASES]
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
    (outside / "canary").write_bytes(SECRET)
    (outside / "array").mkdir()
    (outside / "array" / "zarr.json").write_bytes(
        as_json(zarr3_json(shape=[250], chunk_grid=grid(250)))
    )
    (outside / "array" / "c").mkdir()
    (outside / "array" / "c" / "0").write_bytes(SECRET)
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
                if not refused_by(case, event):
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


def refused_by(case: Case, event: dict[str, Any]) -> bool:
    """Whether a reader met what the case is made for, and not something that came before."""
    return case.says is None or any(case.says in text for text in event["results"].values())


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
