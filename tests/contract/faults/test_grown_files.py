"""A file that was grown to 40 GiB is found out by its size: nobody reads it, and older steps serve.

Grown files are sparse, so they cost nothing to make; whoever read one would be stopped by the limit
of the child's memory, or by its time. Each file of a checkpoint in turn, and what lies beside steps.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.contract.faults.crafted.case import GIB
from tests.contract.faults.fixtures import make_plain_pool  # noqa: F401 (fixture)
from tests.contract.faults.harness import Children

GROWN_BYTES = 40 * GIB
LIMITS = {"RLIMIT_AS": 6 * GIB}
RESIDENT_BYTES = GIB
"""Of our checkpoints only Orbax reads these; `verify` reads them all."""
BESIDE = (".ckpt-owner", ".ckpt-run", "metadata/_ROOT_METADATA")


@pytest.fixture(scope="module")
def steps(plain_pool: Children, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of two steps, of a run that has metadata and a local tier."""
    path = tmp_path_factory.mktemp("run") / "steps"
    outcome = plain_pool.run("hostile:make_run", [str(path)])
    assert outcome.exit_code == 0, str(outcome)
    return path


def files_of(step: Path) -> list[str]:
    return sorted(str(file.relative_to(step)) for file in step.rglob("*") if file.is_file())


def grow(file: Path) -> None:
    assert file.is_file()
    os.truncate(file, GROWN_BYTES)


@pytest.fixture(scope="module")
def outcomes(
    plain_pool: Children, steps: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What all readers make of a directory in which a file of the newest step was grown, by file."""
    root = tmp_path_factory.mktemp("grown")
    jobs: list[tuple[str, str]] = []
    for number, name in enumerate(files_of(steps / "1")):
        copy = root / str(number)
        shutil.copytree(steps, copy)
        grow(copy / "1" / name)
        jobs.append((name, str(copy)))
    outcome = plain_pool.run("hostile:open_grown", [jobs], timeout_secs=110, limits=LIMITS)
    assert outcome.exit_code == 0, str(outcome)
    assert outcome.max_rss_bytes < RESIDENT_BYTES
    for event in outcome.events:
        assert event["read_bytes"] < GIB, event
    return {event["file"]: event["results"] for event in outcome.events}


def test_every_file_was_grown(steps, outcomes):
    assert list(outcomes) == files_of(steps / "1")
    bases = {name.rpartition("/")[2] for name in outcomes}
    assert {"ckpt.json", "manifest.ocdbt", "process_0", "process_0-of-1.json"} <= bases
    assert any("/d/" in name for name in outcomes)


def test_verify_names_the_file(outcomes):
    for name, results in outcomes.items():
        assert results["verify"].startswith("problems"), (name, results["verify"])
        assert name.rpartition("/")[2] in results["verify"], (name, results["verify"])


def test_readers_name_the_file_or_do_without_it(outcomes):
    for name, results in outcomes.items():
        for reader in ("inspect", "load", "as_numpy", "step_metadata"):
            result = results[reader]
            assert result == "ok" or result.startswith("CheckpointCorrupt"), (name, reader, result)
            if result != "ok":
                assert name.rpartition("/")[2] in result, (name, reader, result)
    for name in ("ckpt.json", "state/manifest.ocdbt", "state/checksums/process_0"):
        for reader in ("load", "as_numpy"):
            assert outcomes[name][reader].startswith("CheckpointCorrupt"), (name, reader)


def test_a_grown_data_file_is_refused_though_what_was_saved_is_there(steps, outcomes):
    data = [name for name in outcomes if name.startswith("state/") and "/d/" in name]
    described = [name for name in data if (steps / "1" / name).stat().st_size < 1000]
    assert len(described) < len(data)
    for name in {*data} - {*described}:  # what describes arrays is for Orbax
        for reader in ("load", "as_numpy"):
            assert f"has {GROWN_BYTES} bytes" in outcomes[name][reader], outcomes[name]


def test_restore_latest_goes_back(outcomes):
    for name, results in outcomes.items():
        harmless = results["load"] == "ok"
        assert results["restore_latest"] == ("step 1" if harmless else "step 0"), (name, results)
        assert results["all_steps"] == "[0, 1]", (name, results)
        assert results["best_step"] == ("0" if name == "ckpt.json" else "1"), (name, results)


def test_what_lies_beside_the_steps(plain_pool, steps, tmp_path):
    for number, name in enumerate(BESIDE):
        copy = tmp_path / str(number)
        shutil.copytree(steps, copy)
        if name == ".ckpt-owner":  # of a writer that was killed: one that is closed leaves none
            (copy / name).write_bytes(b"0")
        grow(copy / name)
        outcome = plain_pool.run("hostile:go_on", [str(copy)], timeout_secs=60, limits=LIMITS)
        assert outcome.exit_code == 0, str(outcome)
        assert outcome.max_rss_bytes < RESIDENT_BYTES
        (event,) = outcome.events
        refused = [text for text in event["results"] if text.startswith("CheckpointCorrupt")]
        untyped = [text for text in event["results"] if text.startswith("untyped")]
        assert not untyped, event
        if (
            name == ".ckpt-owner"
        ):  # it only says who was there: a claim replaces what it cannot read
            assert not refused, event
        else:
            assert refused and all(name.rpartition("/")[2] in text for text in refused), event


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
    outcome = plain_pool.run("hostile:open_one", [str(copy)], timeout_secs=60, limits=LIMITS)
    assert outcome.exit_code == 0, str(outcome)
    assert outcome.max_rss_bytes < RESIDENT_BYTES
    (event,) = outcome.events
    for result in event["results"].values():
        # data: there is no size to hold it against, and what is wanted of it is there
        assert result == "ok" if name == "data" else result.startswith("CheckpointCorrupt"), event
        assert name == "data" or name in result
