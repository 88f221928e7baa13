"""A load reads what its regions need, once, and who loads one leaf of thousands reads little: counted in bytes and calls."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core import Options
from ckpt_core._directory import PosixBackend
from ckpt_core._layout.chunks import BLOCK_BYTES
from ckpt_core._layout.regions import Region, region_slices
from ckpt_core._read import extents
from ckpt_core._read.pipeline import read_leaves
from ckpt_core._read.wants import Want
from ckpt_core._saved.opening import open_checkpoint
from ckpt_core._storage import files
from ckpt_core.testing import assert_same
from tests.support import seams
from tests.support.units import KIB, MIB

ROWS, COLUMNS = 512, 4096
ROW_BYTES = COLUMNS * 4
ALL_BYTES = ROWS * ROW_BYTES
AN_EIGHTH_OF_ROWS: Region = ((ROWS // 8, ROWS // 4), (0, COLUMNS))
AN_EIGHTH_OF_COLUMNS: Region = ((0, ROWS), (COLUMNS // 8, COLUMNS // 4))


@pytest.fixture(name="counted")
def make_counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read from a data file."""
    found: list[int] = []
    plain = files.os.preadv

    def counting(descriptor: int, buffers: Any, offset: int) -> int:
        found.append(plain(descriptor, buffers, offset))
        return found[-1]

    monkeypatch.setattr(files.os, "preadv", counting)
    return found


@pytest.fixture(scope="module")
def values() -> np.ndarray[Any, Any]:
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


def read_region(path: Path, region: Region, **options: Any) -> np.ndarray[Any, Any]:
    """What a process reads of which a load wants one region of the only leaf."""
    opened = open_checkpoint(path)
    (item,) = opened.items.values()
    wants = [Want(0, [region])]
    ((_, parts),) = read_leaves(opened, item, wants, Options(**options))
    return parts[region]


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize(
    ("chunk_bytes", "region", "read_bytes"),
    [
        # a block of checksums is the least that can be verified; else rows are read alone
        (64 * MIB, AN_EIGHTH_OF_ROWS, BLOCK_BYTES),
        (64 * MIB, AN_EIGHTH_OF_COLUMNS, ALL_BYTES),
        (1 * MIB, AN_EIGHTH_OF_ROWS, ALL_BYTES // 8),
        (1 * MIB, AN_EIGHTH_OF_COLUMNS, ALL_BYTES),
        # chunks are cut through rows only where they are smaller than a row
        (ROW_BYTES // 8, AN_EIGHTH_OF_ROWS, ALL_BYTES // 8),
        (ROW_BYTES // 8, AN_EIGHTH_OF_COLUMNS, ALL_BYTES // 8),
    ],
)
def test_an_eighth_of_an_array(
    tmp_path, counted, values, chunk_bytes, region, read_bytes, checksums
):
    ckpt.save(tmp_path / "a", values, options=Options(chunk_bytes=chunk_bytes))
    found = read_region(tmp_path / "a", region, checksums=checksums)
    np.testing.assert_array_equal(found, values[region_slices(region)])
    rows_alone = not checksums and region == AN_EIGHTH_OF_ROWS
    assert sum(counted) == (ALL_BYTES // 8 if rows_alone else read_bytes)


@pytest.mark.parametrize(
    ("spec", "region"),
    [(PartitionSpec("x"), AN_EIGHTH_OF_ROWS), (PartitionSpec(None, "x"), AN_EIGHTH_OF_COLUMNS)],
)
def test_a_shard_as_it_was_saved_is_all_that_is_read(
    tmp_path, counted, values, devices, spec, region
):
    mesh = Mesh(np.array(devices), ("x",))
    ckpt.save(tmp_path / "a", jax.device_put(values, NamedSharding(mesh, spec)))
    found = read_region(tmp_path / "a", region)
    np.testing.assert_array_equal(found, values[region_slices(region)])
    assert sum(counted) == ALL_BYTES // 8


@pytest.mark.parametrize("saved", [None, PartitionSpec("x"), PartitionSpec(None, "x")])
@pytest.mark.parametrize(
    "wanted", [PartitionSpec("x"), PartitionSpec(None, "x"), PartitionSpec("x", "y")]
)
@pytest.mark.parametrize("chunk_bytes", [64 * MIB, 256 * KIB])
def test_resharding_reads_everything_once(
    tmp_path, counted, values, devices, saved, wanted, chunk_bytes
):
    mesh = Mesh(np.array(devices).reshape(2, 4), ("y", "x"))
    tree = (
        jnp.asarray(values) if saved is None else jax.device_put(values, NamedSharding(mesh, saved))
    )
    ckpt.save(tmp_path / "a", tree, options=Options(chunk_bytes=chunk_bytes))
    sharding = NamedSharding(mesh, wanted)
    found = ckpt.load(tmp_path / "a", sharding=sharding)
    assert found.sharding == sharding
    np.testing.assert_array_equal(np.asarray(found), values)
    assert sum(counted) == ALL_BYTES


@pytest.mark.parametrize(
    ("index", "whole_chunk", "small_chunks"),
    [
        # a block has 256 rows, a small chunk has 64
        (np.s_[:10], BLOCK_BYTES, MIB),
        (np.s_[-1], BLOCK_BYTES, MIB),
        (np.s_[60:70, 5], BLOCK_BYTES, 2 * MIB),
        (np.s_[5:5], 0, 0),
    ],
    ids=str,
)
def test_a_part_reads_the_blocks_that_hold_it(
    tmp_path, counted, values, index, whole_chunk, small_chunks
):
    for chunk_bytes, read_bytes in ((64 * MIB, whole_chunk), (MIB, small_chunks)):
        path = tmp_path / str(chunk_bytes)
        ckpt.save(path, {"w": values, "v": values}, options=Options(chunk_bytes=chunk_bytes))
        counted.clear()
        found = ckpt.load(path, select={"w": index}, only="w")["w"]
        assert_same(found, values[index].copy())
        assert sum(counted) == read_bytes, chunk_bytes


@pytest.mark.parametrize("stack_axis", [0, 1])
def test_rules_read_each_block_once(tmp_path, counted, values, stack_axis):
    """In whichever batch of 128 MiB, here of 1 MiB, a layer of the stack comes."""
    stacked = values.reshape((16, 32, COLUMNS) if stack_axis == 0 else (32, 16, COLUMNS))
    small = Options(max_host_bytes=MIB)
    ckpt.save(tmp_path / "a", {"w": stacked})
    counted.clear()
    like: Any = {"w": [np.zeros((32, COLUMNS), np.float32) for _ in range(16)]}
    rules = [ckpt.Rule("w", "w/{n}", stack="n", stack_axis=stack_axis)]
    listed = ckpt.load(tmp_path / "a", like, rules=rules, options=small)
    assert sum(counted) == ALL_BYTES
    ckpt.save(tmp_path / "b", listed)
    counted.clear()
    back = [ckpt.Rule("w/{n}", "w", stack="n", stack_axis=stack_axis)]
    assert_same(ckpt.load(tmp_path / "b", {"w": stacked}, rules=back)["w"], stacked)
    assert sum(counted) == ALL_BYTES


def test_a_compressed_chunk_is_decoded_once(tmp_path, values, devices, monkeypatch):
    decoded: list[str] = []
    decode = (extents, "decode_chunk")
    seams.at(monkeypatch, decode, before=lambda data, name, *_: decoded.append(name))
    ckpt.save(tmp_path / "a", values, options=Options(compression="zstd", chunk_bytes=4 * MIB))
    mesh = Mesh(np.array(devices), ("x",))
    like = jax.ShapeDtypeStruct(
        values.shape, values.dtype, sharding=NamedSharding(mesh, PartitionSpec(None, "x"))
    )
    assert_same(np.asarray(ckpt.load(tmp_path / "a", like)), values)
    assert len(decoded) == len(set(decoded)) == ALL_BYTES // (4 * MIB)


@pytest.mark.parametrize("size", [64, 2**20])
def test_a_leaf_that_another_process_reads_is_not_read(tmp_path, counted, size):
    """Of a leaf that all processes hold, ``broadcast=True`` wants no region of all but one of them."""
    ckpt.save(tmp_path / "a", {"mine": np.arange(size), "theirs": np.arange(size)})
    opened = open_checkpoint(tmp_path / "a")
    (item,) = opened.items.values()
    wants = [Want(0, [((0, size),)]), Want(1, [])]
    found = list(read_leaves(opened, item, wants, Options()))
    assert [list(parts) for _, parts in found] == [[((0, size),)], []]
    assert sum(counted) == 8 * size


@pytest.mark.parametrize("parts", [1, 8])
def test_a_small_array_is_read_once_for_all_its_regions(tmp_path, counted, parts):
    """Together with its neighbours, in a dtype that the load may ask for."""
    ckpt.save(tmp_path / "a", {name: np.arange(64.0) for name in "abc"})
    opened = open_checkpoint(tmp_path / "a")
    (item,) = opened.items.values()
    step = 64 // parts
    regions: list[Region] = [((start, start + step),) for start in range(0, 64, step)]
    wants = [Want(leaf, regions, dtype=np.dtype(np.float32)) for leaf in range(3)]
    for _, found in read_leaves(opened, item, wants, Options()):
        np.testing.assert_array_equal(np.concatenate([*found.values()]), np.arange(64.0))
    assert len(counted) == 1


LEAVES = 5000
LEAF_BYTES = 1 * KIB


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many") / "step"
    groups = {
        f"group{i:02}": {
            f"leaf{j:02}": np.full(LEAF_BYTES // 4, 100 * i + j, np.float32) for j in range(100)
        }
        for i in range(LEAVES // 100)
    }
    ckpt.save(path, groups)
    return path


class Counted:
    """Bytes that were read: of small files, of the index, and of data files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: list[int] = []
        self.data: list[int] = []
        self.index_bytes = 0
        plain_file, plain_data = PosixBackend.read, files.DataFiles.read
        plain_part = files.DataFiles.part

        def read_file(form: PosixBackend, path: str, name: str, *limit: int) -> bytes | None:
            found = plain_file(form, path, name, *limit)
            self.files.append(len(found or b""))
            return found

        def read_data(files: Any, *arguments: Any) -> int:
            self.data.append(plain_data(files, *arguments))
            return self.data[-1]

        def read_part(files: Any, *which: Any) -> bytes:
            found = plain_part(files, *which)
            self.index_bytes += len(found)
            return found

        monkeypatch.setattr(PosixBackend, "read", read_file)
        monkeypatch.setattr(files.DataFiles, "read", read_data)
        monkeypatch.setattr(files.DataFiles, "part", read_part)

    @property
    def all_bytes(self) -> float:
        return sum(self.files) + sum(self.data) + self.index_bytes


def test_one_leaf_of_thousands_takes_one_read_of_it(many, monkeypatch):
    counted = Counted(monkeypatch)
    loaded = ckpt.load(many, only="group31/leaf41")
    assert_same(loaded, {"group31": {"leaf41": np.full(LEAF_BYTES // 4, 3141, np.float32)}})
    assert counted.data == [LEAF_BYTES]
    assert counted.all_bytes < MIB
    assert 0 < counted.index_bytes < 16 * KIB  # of 30: some of its nodes


def test_all_leaves_are_read_in_few_pieces(many, monkeypatch):
    counted = Counted(monkeypatch)
    loaded = ckpt.load(many)
    assert len(loaded) == 50 and loaded["group49"]["leaf99"][0] == 4999
    # 3 or 4 after a save on a quiet machine, 11 on a busy one: TensorStore decides the order of the chunks
    assert len(counted.data) < 20
    assert sum(counted.data) < 1.5 * LEAVES * LEAF_BYTES
