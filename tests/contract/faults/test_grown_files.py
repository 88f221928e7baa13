"""A file that was grown to 40 GiB is found out by its size, and nobody reads it: beside steps, and of Orbax.

Grown files are sparse, so they cost nothing to make; whoever read one would be stopped by the limit
of the child's memory, or by its time.
"""

import os
import shutil
from pathlib import Path

import pytest

from tests.contract.faults.crafted.case import GIB
from tests.contract.faults.fixtures import make_plain_pool  # noqa: F401 (fixture)
from tests.contract.faults.harness import Children

GROWN_BYTES = 40 * GIB
LIMITS = {"RLIMIT_AS": 6 * GIB}
RESIDENT_BYTES = GIB
BESIDE = (".ckpt-owner", ".ckpt-run", "metadata/_ROOT_METADATA")


@pytest.fixture(scope="module")
def steps(plain_pool: Children, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of two steps, of a run that has metadata and a local tier."""
    path = tmp_path_factory.mktemp("run") / "steps"
    outcome = plain_pool.run("hostile:make_run", [str(path)])
    assert outcome.exit_code == 0, str(outcome)
    return path


def grow(file: Path) -> None:
    assert file.is_file()
    os.truncate(file, GROWN_BYTES)


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
