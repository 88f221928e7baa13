"""What ``ckpt doctor`` makes of what it has measured."""

import dataclasses
from typing import Any

import pytest

from ckpt_core import _doctor
from ckpt_core._doctor import is_older

GOOD = _doctor.Disk(
    directory="/data",
    file_system="ext4",
    mounted_by=None,
    free_bytes=2**40,
    free_inodes=10**9,
    write_bytes_per_sec=1e9,
    read_bytes_per_sec=1e9,
    reads_cached=False,
    sync_secs=0.001,
    clock_ahead_secs=0.0,
    hard_links=True,
    exchanges=True,
    locks=True,
)


@pytest.mark.parametrize(
    ("change", "level", "reported"),
    [
        ({"free_bytes": 2**20}, "problem", "1.0 MiB are free"),
        ({"free_inodes": 3}, "problem", "3 more files"),
        ({"locks": False}, "problem", "two writers"),
        ({"clock_ahead_secs": 90.0}, "problem", "90 s ahead of"),
        ({"clock_ahead_secs": -90.0}, "problem", "90 s behind"),
        ({"file_system": "nfs4"}, "note", "over a network"),
        ({"file_system": "tmpfs"}, "note", "in memory"),
        ({"file_system": ""}, "note", "may be taken for a disk"),
        ({"mounted_by": "gcsfuse", "file_system": "fuse.gcsfuse"}, "note", "its URL"),
        ({"sync_secs": 0.5}, "note", "an fsync takes 0.50 s"),
        ({"write_bytes_per_sec": 1e6}, "note", "977 KiB/s"),
        ({"hard_links": False}, "note", "written again"),
        ({"exchanges": False}, "note", "renames twice"),
    ],
)
def test_what_is_made_of_a_disk(change: dict[str, Any], level: str, reported: str) -> None:
    assert [*_doctor.of_disk(GOOD, 2**30)] == []
    (finding,) = _doctor.of_disk(dataclasses.replace(GOOD, **change), 2**30)
    assert finding.level == level and reported in finding.text


def test_what_is_made_of_versions() -> None:
    floors = _doctor.floors()
    assert floors["flax"] == "0.12.5" and "jax" in floors and "rich" not in floors
    have = {"jax": "0.9.0", "jaxlib": "0.9.0", "flax": "0.12.5"}
    assert [*_doctor.of_versions(have, floors)] == []
    (old,) = _doctor.of_versions(have | {"flax": "0.12.4"}, floors)
    assert old.level == "problem" and "flax 0.12.4 is older than 0.12.5" in old.text
    (pair,) = _doctor.of_versions(have | {"jaxlib": "0.9.1"}, floors)
    assert "newer than jax" in pair.text
    (torch,) = _doctor.of_versions({"torch": "2.13.0", "torchax": "0.0.13"}, {})
    assert torch.level == "note" and "shim" in torch.text
    assert is_older("1.9", "1.10") and not is_older("2", "2.0") and not is_older("2.0rc1", "2.0")


def test_what_is_made_of_a_store() -> None:
    good = _doctor.Store("gs://b", 0.01, 0.01, 1e8, 1e8, True)
    assert [*_doctor.of_store(good)] == []
    for change, reported in (({"conditions": False}, "conditional"), ({"get_secs": 2.0}, "region")):
        (finding,) = _doctor.of_store(dataclasses.replace(good, **change))
        assert reported in finding.text
