"""What `load(as_numpy=True)` maps is what reading gives, is the caller's own, and is verified."""

import mmap
import shutil
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import ckpt_core as ckpt
from ckpt_core._directory import is_local_disk
from ckpt_core._read import extents, pipeline
from ckpt_core._storage import Extent, Location, files, new_context, read_index
from ckpt_core.testing import assert_same, strategies

UNVERIFIED = ckpt.Options(checksums=False)
SIDE = 256
"""An array of this many float32 to each side is too large to be read together with others."""


def is_mapped(array: Any) -> bool:
    """Whether an array is a view of a file."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, memoryview) and isinstance(array.obj, mmap.mmap)


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("state/ocdbt.process_0/d/*"))


@pytest.fixture
def local(tmp_path: Path) -> Path:
    if not is_local_disk(str(tmp_path)):
        pytest.skip("the temporary directory is on no local file system: nothing is mapped there")
    return tmp_path


@pytest.fixture
def saved(local: Path) -> tuple[Path, dict[str, Any]]:
    numbers = np.arange(SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE)
    tree = {
        "numpy": numbers,
        "jax": jnp.asarray(numbers + 1, jnp.bfloat16),
        "big_endian": numbers.astype(">f4"),
        "key": jax.random.split(jax.random.key(7), 5000),
        "bytes": b"x" * 100_000,
        "small": np.arange(3),
        "scalar": 3,
    }
    ckpt.save(local / "step", tree)
    return local / "step", tree


def preads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the bytes of every read from a data file."""
    found: list[int] = []
    plain = files.DataFiles.read

    def counting(self: Any, *arguments: Any) -> int:
        found.append(plain(self, *arguments))
        return found[-1]

    monkeypatch.setattr(files.DataFiles, "read", counting)
    return found


def test_large_arrays_are_mapped_and_nothing_else(saved, monkeypatch):
    path, tree = saved
    counted = preads(monkeypatch)
    loaded = ckpt.load(path, as_numpy=True)
    assert {name for name, leaf in loaded.items() if is_mapped(leaf)} == {"numpy", "jax"}
    assert loaded["jax"].dtype == jnp.bfloat16
    assert loaded["big_endian"].dtype == np.dtype(">f4")
    assert_same(loaded["key"], np.asarray(jax.random.key_data(tree["key"])))
    for name in ("numpy", "big_endian", "bytes", "small", "scalar"):
        assert_same(loaded[name], tree[name])
    assert_same(loaded["jax"], np.asarray(tree["jax"]))
    read_bytes = tree["big_endian"].nbytes + 5000 * 8 + 100_000
    assert read_bytes <= sum(counted) < read_bytes + 4096


def test_no_jax_array_is_mapped(saved, monkeypatch):
    path, tree = saved
    monkeypatch.setattr(files.DataFiles, "mapped", None)
    assert_same(ckpt.load(path)["jax"], tree["jax"])
    assert not is_mapped(ckpt.load(path)["numpy"])


def test_what_is_written_into_an_array_stays_there(saved):
    path, _ = saved
    before = {file: file.read_bytes() for file in data_files(path)}
    first, second = (ckpt.load(path, as_numpy=True)["numpy"] for _ in range(2))
    first[:] = -1
    assert (first == -1).all()
    assert (second != -1).all()
    assert {file: file.read_bytes() for file in data_files(path)} == before
    assert ckpt.verify(path).ok


def test_arrays_outlive_the_checkpoint(saved):
    path, tree = saved
    loaded = ckpt.load(path, as_numpy=True, options=UNVERIFIED)
    shutil.rmtree(path)
    assert_same(loaded["numpy"], tree["numpy"])


@pytest.mark.parametrize("name", ["numpy", "jax"])
def test_damage_is_found_by_default(saved, name):
    path, _ = saved
    index = read_index(Location(str(path / "state"), True), new_context())
    extent = Extent(*index[f"{name}/c/0/0"])
    with open(path / "state" / extent.file, "r+b") as file:
        file.seek(extent.offset + 1234)
        byte = file.read(1)[0]
        file.seek(extent.offset + 1234)
        file.write(bytes([byte ^ 8]))
    with pytest.raises(ckpt.CheckpointCorrupt, match="checksum differs") as caught:
        ckpt.load(path, as_numpy=True)
    assert caught.value.leaf == name
    assert is_mapped(ckpt.load(path, as_numpy=True, options=UNVERIFIED)[name])


CUT = """
import json, os, sys
import numpy as np
import ckpt_core as ckpt
path, kept, checksums = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
ckpt.save(path, {"a": np.ones((256, 256)), "b": np.ones((256, 256))})
folder = os.path.join(path, "state/ocdbt.process_0/d")
(name,) = os.listdir(folder)
os.truncate(os.path.join(folder, name), kept)
try:
    loaded = ckpt.load(path, as_numpy=True, options=ckpt.Options(checksums=checksums))
    print(json.dumps(float(loaded["b"].sum())))
except ckpt.CheckpointCorrupt as error:
    print(json.dumps([error.leaf, error.file, str(error)]))
"""


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize(("kept", "leaf"), [(0, "a"), (4096, "a"), (256 * 256 * 8 + 5000, "b")])
def test_a_file_cut_short_is_found_before_it_is_touched(run_python, local, kept, leaf, checksums):
    """In a child: whoever touches what a mapped file lacks is killed."""
    found = run_python(CUT, str(local / "step"), str(kept), str(checksums))
    assert found[0] == leaf
    assert found[1].startswith("state/ocdbt.process_0/d/")
    assert "truncated" in found[2]


@settings(max_examples=60)
@given(
    tree=strategies.pytrees(st.one_of(strategies.numpy_arrays(), strategies.jax_arrays())),
    verified=st.booleans(),
)
def test_mapped_and_read_are_the_same(tmp_path_factory, tree, verified):
    path = tmp_path_factory.mktemp("same") / "step"
    options = ckpt.Options(checksums=verified)
    ckpt.save(path, tree)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "is_local_disk", lambda _: False)
        plain = ckpt.load(path, as_numpy=True, options=options)
        patch.setattr(pipeline, "is_local_disk", lambda _: True)
        patch.setattr(extents, "_SMALL_BYTES", 0)  # every array is a large one
        mapped = ckpt.load(path, as_numpy=True, options=options)
    assert_same(mapped, plain)
    for leaf in jax.tree.leaves(mapped):
        assert leaf.flags.writeable
        assert leaf.flags.aligned
        # up to 100 bytes stand in the index itself
        assert is_mapped(leaf) == (leaf.nbytes > 100)
    shutil.rmtree(path)
