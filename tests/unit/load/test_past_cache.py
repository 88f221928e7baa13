"""A large load reads from a local disk past the page cache, and gives what a load through it gives."""

import errno
import fcntl
import gc
import mmap
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import ckpt_core as ckpt
from ckpt_core import CheckpointCorrupt
from ckpt_core._directory import is_local_disk
from ckpt_core._platform import DIRECT
from ckpt_core._read import pipeline
from ckpt_core._storage import PastCache, files
from ckpt_core.testing import assert_same
from tests.support import seams
from tests.support.units import KIB, MIB

pytestmark = pytest.mark.skipif(not DIRECT, reason="this system has no O_DIRECT or no RWF_NOWAIT")
PAST = ckpt.Options(page_cache=False)
THROUGH = ckpt.Options(page_cache=True)
SAVED_BYTES = 72 * MIB
"""More than the least for which the cache is passed by."""


def forget(path: Path) -> None:
    """Takes the files of a folder out of the page cache; Linux leaves pages there that it has in hand, so several times."""
    for _ in range(20):
        for file in filter(Path.is_file, path.rglob("*")):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not cached_bytes(path):
            break
        time.sleep(0.05)


def cached_bytes(path: Path) -> int:
    """How much of the data files of a folder is in the page cache: each place that is asked for stands for 64 KiB."""
    found = 0
    for file in (one for one in path.rglob("*") if one.is_file() and one.stat().st_size >= MIB):
        with file.open("rb") as opened:
            places = range(0, file.stat().st_size, 64 * KIB)
            found += sum(files._is_resident(opened.fileno(), place) for place in places)
    return found * 64 * KIB


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "large": jnp.asarray(rng.standard_normal((12 * MIB // 4096, 1024), np.float32)),
        "odd": jnp.asarray(rng.standard_normal((4099, 1021)), jnp.bfloat16),
        "more": [jnp.asarray(rng.standard_normal((2 * MIB,), np.float32)) for _ in range(7)],
        "small": [jnp.asarray(rng.standard_normal(n), np.float32) for n in range(1, 99)],
        "host": rng.standard_normal((1000, 1000)).astype(">f4"),
        "step": 7,
    }


@pytest.fixture(scope="module")
def saved(tree: Any) -> Iterator[Path]:
    """A checkpoint on a disk with direct reads."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # which is no memory
        if not is_local_disk(folder):
            pytest.skip("/var/tmp is on no local file system")
        ckpt.save(step := Path(folder, "step"), tree)
        try:
            os.close(os.open(largest(step), os.O_RDONLY | DIRECT))
        except OSError:
            pytest.skip("/var/tmp is on a file system without direct reads")
        yield step


def largest(path: Path) -> Path:
    return max(filter(Path.is_file, path.rglob("*")), key=lambda file: file.stat().st_size)


class Kernel:
    """Says what is in the page cache, in place of the system, which anybody fills and empties: what was read through it, and
    places of files that it ``has``, nothing at first. It notes the sizes of reads ``past`` the cache and ``through`` it, how often
    a read ``asked``, as for files of others, and the files in which the system would read on from what is read through.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.has: Callable[[str, int], bool] = lambda file, offset: False
        self.asked, self.past, self.through, self.read_on = 0, list[int](), list[int](), set[str]()
        self._plain, self._advised, self._pages = os.preadv, set[str](), set[tuple[str, int]]()
        patch.setattr(os, "preadv", self._preadv)
        patch.setattr(files, "_is_resident", self._is_resident)
        seams.at(patch, (os, "posix_fadvise"), before=self._advise)

    def _advise(self, descriptor: int, *_: int) -> None:
        self._advised.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    def _is_resident(self, descriptor: int, offset: int) -> bool:
        file = os.readlink(f"/proc/self/fd/{descriptor}")
        return self.has(file, offset) or (file, offset // mmap.PAGESIZE) in self._pages

    def _preadv(self, descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:
            self.asked += 1
            if self._is_resident(descriptor, offset):
                return 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        found = self._plain(descriptor, buffers, offset)
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT:
            self.past.append(found)
            return found
        self.through.append(found)
        file = os.readlink(f"/proc/self/fd/{descriptor}")
        self.read_on |= {file} - self._advised
        pages = range(offset // mmap.PAGESIZE, -(-(offset + found) // mmap.PAGESIZE))
        self._pages |= {(file, page) for page in pages}
        return found


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def test_a_load_fills_no_page_cache(saved, tree):
    forget(saved)
    assert_same(ckpt.load(saved, options=PAST), tree)
    assert cached_bytes(saved) < 4 * MIB
    forget(saved)
    assert_same(ckpt.load(saved, options=THROUGH), tree)
    assert cached_bytes(saved) > SAVED_BYTES * 3 // 4


def test_each_byte_is_read_once_and_past_the_cache(saved, tree, kernel):
    """Asking what is cached reads nothing: Linux begins to read a page that it was asked for without waiting."""
    assert_same(ckpt.load(saved, options=PAST), tree)
    stored = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    assert stored * 0.9 < sum(kernel.past) < stored + len(kernel.past) * 8 * KIB
    assert len(kernel.past) < 200
    assert not kernel.through and not kernel.asked


def test_regions_casts_and_parts(saved, tree, monkeypatch, kernel):
    monkeypatch.setattr(pipeline, "_LEAST_BYTES_PAST_CACHE", 0)
    columns = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec(None, "x"))
    loaded = ckpt.load(saved, only="large", sharding=columns, options=PAST)
    assert_same(jax.device_get(loaded["large"]), jax.device_get(tree["large"]))
    assert kernel.past
    like = {
        "large": jax.ShapeDtypeStruct(tree["large"].shape, jnp.bfloat16),
        "odd": jax.ShapeDtypeStruct(tree["odd"].shape, jnp.float32),
    }
    cast = ckpt.load(saved, like, cast=True, only=("large", "odd"), options=PAST)
    assert_same(cast["large"], tree["large"].astype(jnp.bfloat16))
    assert_same(cast["odd"], tree["odd"].astype(jnp.float32))
    unverified = ckpt.Options(page_cache=False, checksums=False)
    assert_same(ckpt.load(saved, options=unverified), tree)
    assert not kernel.through
    assert_same(ckpt.load(saved, as_numpy=True, options=PAST)["host"], tree["host"])


def test_tensors_of_a_file(saved, monkeypatch, kernel):
    """The header is read through the cache, and so is the tensor behind it; each shares a page with the one after it."""
    monkeypatch.setattr(pipeline, "_MOST_THREADS", 1)  # reads a tensor when the one before is there
    folder = saved.parent / "tensors"
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(1)
    tensors = {f"t{n}": rng.standard_normal((3 * MIB + n,), np.float32) for n in range(7)}
    save_file(tensors, folder / "model.safetensors")
    loaded = ckpt.load(folder / "model.safetensors", options=PAST)
    assert_same(jax.tree.map(np.asarray, loaded), tensors)
    assert sum(kernel.through) < 13 * MIB and sum(kernel.past) > 6 * 12 * MIB


@pytest.mark.parametrize(
    "refused",
    [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT],
    ids=["no direct reads", "not supported", "no proc"],
)
def test_a_file_system_without_it(saved, tree, monkeypatch, kernel, refused):
    """Opening fails where a file system has no direct reads; then all goes through the cache."""
    plain = os.open
    asked: list[str] = []

    def refusing(path: Any, *flags: Any, **named: Any) -> int:
        if str(path).startswith("/proc/self/fd/"):
            asked.append(path)
            raise OSError(refused, os.strerror(refused))
        return plain(path, *flags, **named)

    monkeypatch.setattr(os, "open", refusing)
    assert_same(ckpt.load(saved, options=PAST), tree)
    assert asked and not kernel.past


def test_files_of_somebody_else(saved, tree, monkeypatch, kernel):
    """The system does not say what is cached of them."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert_same(ckpt.load(saved, options=PAST), tree)
    assert kernel.asked and kernel.past and not kernel.through
    kernel.past.clear()
    kernel.has = lambda file, offset: True
    assert_same(ckpt.load(saved, options=PAST), tree)
    assert kernel.through and not kernel.past


def descriptors() -> int:
    gc.collect()  # what earlier tests dropped
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("damage", ["flipped", "truncated", "none"])
def test_damage_is_found_and_every_file_closed(saved, tree, tmp_path, kernel, damage):
    path = tmp_path / "step"
    ckpt.save(path, tree)
    part = largest(path)
    if damage == "flipped":
        with part.open("r+b") as file:
            file.seek(part.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
    elif damage == "truncated":
        os.truncate(part, part.stat().st_size // 3)
    before = descriptors()
    if damage == "none":
        ckpt.load(path, options=PAST)
    else:
        with pytest.raises(CheckpointCorrupt, match=r"large|odd|more|host"):
            ckpt.load(path, options=PAST)
    assert descriptors() == before
    assert kernel.past or damage == "truncated"


def test_by_default_only_a_load_of_much_of_the_memory(saved, monkeypatch):
    made: list[PastCache] = []
    seams.at(monkeypatch, (PastCache, "__init__"), before=lambda made_one: made.append(made_one))
    ckpt.load(saved)
    assert not made
    monkeypatch.setattr(pipeline, "memory_bytes", lambda: 16 * 64 * MIB)
    ckpt.load(saved, options=THROUGH)
    ckpt.load(saved, only="large")
    assert not made
    ckpt.load(saved)
    assert len(made) == 1
    ckpt.load(saved, as_numpy=True)  # which maps them
    assert len(made) == 1
    # one process of several of a host: others may want the same bytes
    monkeypatch.setattr(pipeline, "coordination", lambda: SimpleNamespace(client="a client"))
    ckpt.load(saved)
    assert len(made) == 1


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_range_in_any_order(saved, data):
    """The window gives what the file has, whatever was read before."""
    file = largest(saved)
    content = np.fromfile(file, np.uint8)
    descriptor, cache = os.open(file, os.O_RDONLY), PastCache()
    cache.opened("file", descriptor, local=True)
    cached = data.draw(st.sets(st.integers(0, 99)))  # of the MiB
    patch = pytest.MonkeyPatch()
    Kernel(patch).has = lambda file, offset: offset // MIB in cached
    try:
        for _ in range(data.draw(st.integers(1, 8))):
            offset = data.draw(st.integers(0, content.size + 5000))
            size = data.draw(st.integers(1, 300 * KIB))
            end = offset + data.draw(st.integers(size, 9 * MIB))
            target = np.zeros(size, np.uint8)
            got = cache.read("file", descriptor, offset, target, end)
            assert 0 <= got <= size
            assert (target[:got] == content[offset : offset + got]).all()
            assert not target[got:].any()
    finally:
        patch.undo()
        os.close(descriptor)


@pytest.mark.parametrize("options", [PAST, THROUGH], ids=["past", "through"])
def test_more_files_than_a_process_may_open(tmp_path, monkeypatch, kernel, options):
    """A quarter of them stays open; in several batches, of which each would open further ones."""
    tree = {f"leaf{n:03}": jnp.full((256, 1024), n, jnp.float32) for n in range(120)}
    small = ckpt.Options(target_data_file_bytes=MIB, chunk_bytes=MIB, durable=False)
    ckpt.save(tmp_path / "step", tree, options=small)
    assert sum(1 for _ in tmp_path.rglob("ocdbt.process_0/d/*")) > 100
    monkeypatch.setattr(pipeline, "_BATCH_BYTES", 8 * MIB)
    ckpt.load(tmp_path / "step", only="leaf000")  # what is opened once and stays
    before, limits = descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 70, limits[1]))
    try:
        assert_same(ckpt.load(tmp_path / "step", options=options), tree)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert descriptors() == before
    mapped = ckpt.load(tmp_path / "step", as_numpy=True, options=options)
    assert_same(mapped["leaf119"], np.asarray(tree["leaf119"]))
