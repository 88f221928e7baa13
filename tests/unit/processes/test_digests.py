"""Each process digests what it wrote; a load opens the checksums of the writers that it needs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core._save.digests import digest_all
from ckpt_core._saved.checkpoint import NativeCheckpoint, NativeItem
from tests.support.launch import launch, reports

SAVE = """
from ckpt_core._directory import posix
from ckpt_core._saved.checkpoint import NativeCheckpoint
from tests.support import seams
touched = {"read": [], "listed": [], "checksums": []}
def noting(cls, method, name, what):
    seams.at(None, (cls, method), before=lambda _, *rest, **__: touched[name].append(what(rest)))
noting(posix.LocalAttempt, "read", "read", lambda arguments: arguments[0])
noting(posix.LocalAttempt, "files", "listed", lambda arguments: arguments[0] if arguments else "")
noting(NativeCheckpoint, "read_file", "checksums", lambda arguments: arguments[0])

mesh = Mesh(np.array(jax.devices()), ("a",))
rows = NamedSharding(mesh, P("a"))
def put(values, sharding):
    return jax.make_array_from_callback(values.shape, sharding, lambda where: values[where])
tree = {
    # each process writes more than is digested whole
    "large": put(np.arange(2 * 36 * 2**18, dtype=np.float32).reshape(2, -1), rows),
    "scalar": put(np.float32(3).reshape(()), NamedSharding(mesh, P())),
    "tiny": put(np.arange(4.0), NamedSharding(mesh, P())),
}
events = []
chosen = ckpt.Options(
    timeout_secs=40, chunk_bytes=1 << 30, target_data_file_bytes=1 << 30, on_event=events.append
)
ckpt.save(f"{directory}/one", tree, options=chosen)
saved = {name: list(seen) for name, seen in touched.items()}
for name in touched:
    touched[name].clear()
loaded = ckpt.load(f"{directory}/one", tree, options=options)
same = np.array_equal(*[np.asarray(one["large"].addressable_data(0)) for one in (loaded, tree)])
everything = [name for name in touched["checksums"] if "checksums/" in name]
touched["checksums"].clear()
ckpt.load(f"{directory}/one", {"large": tree["large"]}, unexpected="ignore", options=options)
large = [name for name in touched["checksums"] if "checksums/" in name]
report(saved=saved, everything=everything, large=large, same=same)
"""


def test_each_digests_its_own(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    told = reports(launch(SAVE, directory, devices=1))
    assert all(one["same"] for one in told)
    for index, one in enumerate(told):
        other = f"process_{1 - index}"
        assert not [name for name in one["saved"]["read"] if other in name]
        # the whole directory is listed once, by process 0; progress looks at a process's own files
        assert one["saved"]["listed"].count("") == (1 if index == 0 else 0)
        assert not [name for name in one["saved"]["listed"] if other in name]
    first, second = "state/checksums/process_0", "state/checksums/process_1"
    # "tiny" and "scalar" stand in the index, and were written by the first process
    assert [sorted(one["everything"]) for one in told] == [[first], [first, second]]
    assert [one["large"] for one in told] == [[first], [second]]
    record = json.loads((directory / "one/ckpt.json").read_text())["record"]
    large = [name for name, entry in record["files"].items() if entry[0] > 32 << 20]
    assert len(large) == 2, record["files"]
    assert ckpt.verify(directory / "one").ok
    # what no block checksum covers of such a file is digested all the same
    for name in large:
        with (directory / "one" / name).open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))
        report = ckpt.verify(directory / "one")
        assert not report.ok and name in str(report.problems)
        with (directory / "one" / name).open("r+b") as file:
            file.seek(-1, 2)
            file.write(last)


def test_what_process_0_does_not_see_is_no_checkpoint(tmp_path: Path) -> None:
    attempt = PosixBackend().begin(str(tmp_path / "one"), overwrite=False, durable=False, token="t")
    attempt.write("state/a", b"1234")
    attempt.write("state/b", b"12")
    told = json.dumps([["state/a", 4, 7, 0]])
    found = digest_all(attempt, [], [told], {}, True, None)
    assert (found["state/a"].crc32, found["state/b"].size_bytes) == (7, 2)
    for size, name, text in ((5, "state/a", "sees 4 bytes"), (4, "state/c", "does not see it")):
        wrong = json.dumps([[name, size, 7, 0]])
        with pytest.raises(ckpt.CheckpointError, match=text):
            digest_all(attempt, [], [told, wrong], {}, True, None)
    attempt.abort()


def test_in_a_store_what_was_reported_is_not_fetched() -> None:
    from ckpt_core._directory.object_store import StoreAttempt

    class Keys:
        def put(self, key: str, value: bytes) -> None:
            raise AssertionError("process 0 keeps small files for the record")

    attempt = StoreAttempt("memory://one", Keys(), "one", b"")  # pyright: ignore[reportArgumentType]
    attempt.write("s/t", b"12")
    x, y = "s/d/one.x", "s/d/one.y"
    assert attempt.files("s/d", {x: 3}) == {x: 3}
    assert attempt.files(known_bytes={x: 3, y: 1}) == {x: 3, y: 1, "s/t": 2}
    assert attempt.read("s/t") == b"12" and attempt.small_files() == {"s/t": b"12"}


def test_checksums_of_an_older_save_are_found_wherever_they_are(tmp_path: Path) -> None:
    """Before, any process could have written what stands in the index."""
    from ckpt_core._read.extents import StoredChunks
    from ckpt_core._read.wants import Want
    from ckpt_core._saved.opening import open_checkpoint
    from ckpt_core._storage import Extent, new_context

    ckpt.save(tmp_path / "one", {"a": np.arange(4.0), "b": np.arange(400.0)})
    opened = open_checkpoint(tmp_path / "one")
    item = opened.items["state"]
    assert isinstance(opened, NativeCheckpoint) and isinstance(item, NativeItem)
    wants = [Want(0, []), Want(1, [])]
    known = StoredChunks(opened, item, wants, ckpt.Options(), new_context(), None)
    for writer in ("", "ocdbt.process_0/d/x", "ocdbt.process_7/d/x", "d/x"):
        _, crcs = known.checksums(0, "a/c/0", Extent(writer, 0, 32))
        assert crcs is not None and len(crcs) == 1
    with pytest.raises(ckpt.CheckpointCorrupt, match="no checksum for chunk c/c/0"):
        known.checksums(0, "c/c/0", Extent("", 0, 32))
    known.files.close()
