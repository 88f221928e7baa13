"""Which bytes of a safetensors file a load reads: those of its regions, in few reads."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, strategies as st

import ckpt_core as ckpt
from ckpt_core._layout.regions import Region, pieces, region_shape, region_slices
from ckpt_core._options import Options
from ckpt_core._read.pipeline import read_leaves
from ckpt_core._read.wants import PIECE_BYTES, ReadsOf, Want, fill
from ckpt_core._saved.opening import open_checkpoint
from ckpt_core._storage import new_context
from tests.unit.load.test_bytes_read import make_counted  # noqa: F401 (fixture)

ROWS, COLUMNS = 64, 64 * 1024
VALUES = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("ranges") / "a.safetensors"
    small = {f"s{n:03}": np.full(5, n, np.int32) for n in range(200)}
    cube = VALUES.reshape(4, 16, COLUMNS)
    safetensors.numpy.save_file({"w": VALUES, "cube": cube, **small}, file)
    return file


def read(path: Path, name: str, regions: list[Region], counted: list[int]) -> list[Any]:
    opened = open_checkpoint(path)
    counted.clear()
    item = opened.items["state"]
    wants = [Want(item.paths.index((name,)), regions)]
    ((_, parts),) = read_leaves(opened, item, wants, Options(), new_context())
    return [parts[region] for region in regions]


def eighth(size: int, number: int = 1) -> tuple[int, int]:
    return (size // 8 * number, size // 8 * (number + 1))


@pytest.mark.parametrize(
    ("name", "region"),
    [
        ("w", (eighth(ROWS), (0, COLUMNS))),
        ("w", ((0, ROWS), eighth(COLUMNS))),
        ("cube", ((0, 4), eighth(16), (0, COLUMNS))),
        ("cube", ((0, 4), (0, 16), eighth(COLUMNS))),
    ],
)
def test_an_eighth_reads_an_eighth(path, counted, name, region):
    (found,) = read(path, name, [region], counted)
    array = VALUES if name == "w" else VALUES.reshape(4, 16, COLUMNS)
    assert np.array_equal(found, array[region_slices(region)])
    assert sum(counted) == VALUES.nbytes // 8


def test_regions_of_one_process_are_read_once(path, counted):
    regions: list[Region] = [((0, ROWS), eighth(COLUMNS, n)) for n in range(8)]
    found = read(path, "w", regions, counted)
    assert sum(counted) == VALUES.nbytes
    assert len(counted) == VALUES.nbytes // PIECE_BYTES
    assert np.array_equal(np.concatenate(found, axis=1), VALUES)


def test_small_tensors_are_read_together(path, counted):
    loaded = ckpt.load(path, only="s*", as_numpy=True)
    assert all((loaded[f"s{n:03}"] == n).all() for n in range(200))
    assert len(counted) <= 3  # the header, in one or two, and all of them


def test_rows_that_lie_close_are_read_at_once(tmp_path, counted):
    values = np.arange(1 << 18, dtype=np.float32).reshape(1024, 256)
    safetensors.numpy.save_file({"w": values}, tmp_path / "a.safetensors")
    (found,) = read(tmp_path / "a.safetensors", "w", [((0, 1024), (32, 64))], counted)
    assert np.array_equal(found, values[:, 32:64])
    assert len(counted) == 1  # 1024 reads of 128 bytes would take longer


@st.composite
def wanted(draw: Any) -> tuple[tuple[int, ...], list[Region], int]:
    """An array's shape, a grid of regions of it, some of them, and the size of pieces."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    cuts = [sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=2))}) for size in shape]
    grid: list[Region] = [()]
    for edges in cuts:
        steps = list(itertools.pairwise(edges)) or [(0, 0)]
        grid = [(*region, step) for region in grid for step in steps]
    chosen = draw(st.sets(st.sampled_from(grid), min_size=1))
    return shape, sorted(chosen), draw(st.integers(1, 64))


@given(wanted(), st.integers(0, 40))
def test_any_regions_in_pieces_of_any_size(told, gap_bytes):
    shape, regions, piece_bytes = told
    array = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    data = array.tobytes()
    buffers = [np.full(region_shape(region), -1, np.int16) for region in regions]
    read: list[tuple[int, int]] = []

    def fake_read(offset: int, target: Any) -> None:
        read.append((offset, offset + target.size))
        target[:] = np.frombuffer(data[offset : offset + target.size], np.uint8)

    reads = ReadsOf(fake_read, array.dtype, gap_bytes)
    for piece in pieces(shape, 2, regions, piece_bytes):
        assert math.prod(piece.shape) * 2 <= max(piece_bytes, 2)
        shares = [(one.part, buffers[one.number][(*one.place, ...)]) for one in piece.takers]
        fill(reads, piece.offset_bytes, piece.shape, shares)
    for region, buffer in zip(regions, buffers, strict=True):
        assert np.array_equal(buffer, array[(*region_slices(region), ...)])
    read.sort()
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(read))
