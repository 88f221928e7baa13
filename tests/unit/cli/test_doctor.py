"""``ckpt doctor``: what it measures, and what it makes of it."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import _doctor
from ckpt_core._directory import probe
from ckpt_core._directory.paths import mount_type
from ckpt_core._directory.probe import Disk, probe_directory
from ckpt_core._doctor.versions import is_older
from ckpt_core._storage import Location
from tests.support.command_line import LOADED, make_call, start  # noqa: F401 (fixture)
from tests.support.stores import tree

pytest.importorskip("typer")

GOOD = Disk(
    directory="/data",
    file_system="ext4",
    mounted_by=None,
    local=True,
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


def test_a_directory(call, tmp_path: Path) -> None:
    code, out, err = call("doctor", tmp_path, "--mib", 1)
    assert (code, err) == (0, "")
    assert "fsync" in out and "jax " in out and str(tmp_path) in out
    reported = json.loads(call("doctor", tmp_path / "not" / "yet", "--mib", 1, "--json")[1])
    assert reported["place"]["directory"] == str(tmp_path)
    assert reported["place"]["write_bytes_per_sec"] > 0 and reported["place"]["locks"] is True
    assert os.listdir(tmp_path) == []


def test_a_directory_that_does_not_exist(call, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    code, out, _ = call("doctor", tmp_path / "rusn", "--mib", 1)
    assert (
        code == 0 and f"{tmp_path}/rusn does not exist, so what was measured is {tmp_path}; " in out
    )
    assert f"beside it is {'runs'}" in out and "nothing wrong" not in out
    assert "does not exist" not in call("doctor", tmp_path / "runs", "--mib", 1)[1]


def test_a_store(call, store: str) -> None:
    from tests.support.stores import keys_at

    code, out, _ = call("doctor", store, "--mib", 1)
    assert code == 0 and "get" in out
    assert not [key for key in keys_at(store).list() if "doctor" in key]


def test_nothing_is_written_into_a_checkpoint_in_a_store(store: str, monkeypatch) -> None:
    from ckpt_core._doctor import store as probing

    ckpt.save(f"{store}/run/3", model=tree(1))
    written: list[str] = []

    class Noting(probing.KeyValues):
        def put(self, key: str, value: bytes) -> None:
            written.append(f"{self._path}/{key}")
            super().put(key, value)

    monkeypatch.setattr(probing, "KeyValues", Noting)
    for inside in ("", "/model", "/model/deeper"):
        found = probing.probe_store(Location(f"{store}/run/3{inside}", False), 1024)
        assert found.url == f"{store}/run"
    assert written and all(key.startswith(f"{store}/run/.ckpt-doctor") for key in written)
    assert probing.probe_store(Location(f"{store}/other", False), 1024).url == f"{store}/other"


def test_what_cannot_be_written_to(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(probe.os, "mkdir", refuse)
    code, out, _ = call("doctor", tmp_path)
    assert code == 1 and "problem" in out and "Permission denied" in out


def test_the_probe_leaves_nothing_when_it_fails(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(probe.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        probe_directory(str(tmp_path), 1000)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "level", "reported"),
    [
        ({"free_bytes": 2**20}, "problem", "1 MiB are free"),
        ({"free_inodes": 3}, "problem", "3 more files"),
        ({"locks": False}, "problem", "two writers"),
        ({"clock_ahead_secs": 90.0}, "problem", "90 s ahead of"),
        ({"clock_ahead_secs": -90.0}, "problem", "90 s behind"),
        ({"file_system": "nfs4", "local": False}, "note", "over a network"),
        ({"file_system": "tmpfs"}, "note", "in memory"),
        ({"file_system": "", "local": False}, "note", "may be taken for a disk"),
        ({"mounted_by": "gcsfuse", "file_system": "fuse.gcsfuse"}, "note", "its URL"),
        ({"sync_secs": 0.5}, "note", "an fsync takes 0.50 s"),
        ({"write_bytes_per_sec": 1e6}, "note", "1 MB/s"),
        ({"hard_links": False}, "note", "written again"),
        ({"exchanges": False}, "note", "renames twice"),
    ],
)
def test_what_is_made_of_a_disk(change: dict[str, Any], level: str, reported: str) -> None:
    assert _doctor.of_disk(GOOD) == []
    (finding,) = _doctor.of_disk(dataclasses.replace(GOOD, **change))
    assert finding.level == level and reported in finding.text


def test_what_is_made_of_versions() -> None:
    floors = _doctor.floors()
    assert floors["flax"] == "0.12.5" and "jax" in floors and "rich" not in floors
    have = {"jax": "0.9.0", "jaxlib": "0.9.0", "flax": "0.12.5"}
    assert _doctor.of_versions(have, floors) == []
    (old,) = _doctor.of_versions(have | {"flax": "0.12.4"}, floors)
    assert old.level == "problem" and "flax 0.12.4 is older than 0.12.5" in old.text
    (pair,) = _doctor.of_versions(have | {"jaxlib": "0.9.1"}, floors)
    assert "newer than jax" in pair.text
    (torch,) = _doctor.of_versions({"torch": "2.13.0", "torchax": "0.0.13"}, {})
    assert torch.level == "note" and "shim" in torch.text
    assert is_older("1.9", "1.10") and not is_older("2", "2.0") and not is_older("2.0rc1", "2.0")


def test_what_is_made_of_a_store() -> None:
    good = _doctor.Store("gs://b", 0.01, 0.01, 1e8, 1e8, True)
    assert _doctor.of_store(good) == []
    assert "conditional" in _doctor.of_store(dataclasses.replace(good, conditions=False))[0].text
    assert "region" in _doctor.of_store(dataclasses.replace(good, get_secs=2.0))[0].text


def test_a_writer_and_leftovers_are_reported(call, tmp_path: Path) -> None:
    import ckpt_core as ckpt

    with ckpt.Checkpointer(tmp_path) as run:
        run.save(1, tree(1))
        run.wait_until_finished()
        code, out, _ = call("doctor", tmp_path, "--mib", 1)
    assert code == 0 and "is writing to it" in out


def test_mounts() -> None:
    text = (
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 0:5 / /data rw - nfs4 host:/x rw\n"
        "3 1 0:6 / /with\\040space rw shared:1 - xfs /dev/b rw\n"
        "4 1 0:7 / /data rw - ceph host rw\n"
    )
    assert [mount_type(text, path) for path in ("/", "/data/a", "/database", "/with space/x")] == [
        *("ext4", "ceph", "ext4", "xfs")
    ]


def test_neither_jax_nor_a_framework_is_imported(tmp_path: Path) -> None:
    import subprocess

    from tests.support import children

    done = subprocess.run(
        [sys.executable, "-c", LOADED, "doctor", str(tmp_path), "--mib", "1"],
        env=children.environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code == 0 and not {"jax", "flax", "torch", "keras"} & set(modules)


def test_devices(call, tmp_path: Path) -> None:
    assert "cpu 0" in call("doctor", tmp_path, "--mib", 1, "--devices")[1]


def test_a_checkpoint_is_not_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.save(tmp_path / "1", {"w": np.ones(3)})
    seen: list[bool] = []
    write = probe._write

    def look(path: str, count: int) -> None:
        write(path, count)
        seen.append(ckpt.verify(tmp_path / "1").ok)

    monkeypatch.setattr(probe, "_write", look)
    for path in ("1", "1/state", "1/new/deep"):
        assert probe_directory(str(tmp_path / path), 1024).directory == str(tmp_path)
    assert seen and all(seen) and os.listdir(tmp_path) == ["1"]
