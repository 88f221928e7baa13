"""The fast paths and the ordinary ones write and read the same bits.

Small arrays are copied before they are written, others are not; regions are read by the index
from local files, through TensorStore's key-values as from an object store, or by its zarr driver.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import ckpt_core as ckpt
from ckpt_core import Options
from ckpt_core._devices.shardings import local_regions
from ckpt_core._layout.regions import Region, region_shape
from ckpt_core._read import extents
from ckpt_core._read.pipeline import read_leaves
from ckpt_core._read.wants import Want
from ckpt_core._saved.checkpoint import Checkpoint, SavedItem
from ckpt_core._saved.opening import open_checkpoint
from ckpt_core._storage import Location, new_context, open_array, read_region
from ckpt_core._storage.writer import ArrayWriter
from ckpt_core._tree.leaves import TEXT_KINDS
from ckpt_core.testing import assert_same, strategies

ARRAYS = st.one_of(
    strategies.sharded_arrays(),
    strategies.numpy_arrays(),
    strategies.numpy_arrays(shape=st.sampled_from([(33, 40), (1200,), (2, 3, 700)])),
    strategies.keys(),
)
SETTINGS = st.builds(
    Options,
    durable=st.just(False),
    chunk_bytes=st.sampled_from([1024, 3000, 64 * 2**20]),
    compression=st.sampled_from([None, None, "zstd"]),
)


def wants_of(item: SavedItem, data: st.DataObject) -> list[Want]:
    """For every array what one of several processes may hold: some regions of some sharding."""
    found: list[Want] = []
    for position, spec in enumerate(item.specs):
        if spec.kind not in TEXT_KINDS:
            sharding = data.draw(strategies.shardings(spec.stored_shape))
            regions = local_regions(sharding, spec.stored_shape)
            some = st.lists(st.sampled_from(regions), min_size=1, unique=True)
            found.append(Want(position, data.draw(st.one_of(st.just(regions), some))))
    return found


Read = tuple[int, Region, np.ndarray[Any, Any]]


def by_reader(
    opened: Checkpoint, item: SavedItem, wants: list[Want], checksums: bool
) -> Iterator[Read]:
    options = Options(checksums=checksums)
    for want, parts in read_leaves(opened, item, wants, options, new_context()):
        assert list(parts) == want.regions
        for region, part in parts.items():
            yield want.leaf, region, part


def by_driver(opened: Checkpoint, item: SavedItem, wants: list[Want]) -> Iterator[Read]:
    context = new_context()
    for want in wants:
        name = item.name_of(want.leaf)
        array = open_array(opened.location / item.directory, name, context)
        for region in want.regions:
            empty = not math.prod(region_shape(region))
            shape, dtype = region_shape(region), item.specs[want.leaf].numpy_dtype
            yield (
                want.leaf,
                region,
                np.empty(shape, dtype) if empty else read_region(array, region, name),
            )


def same(one: Iterator[Read], other: Iterator[Read]) -> None:
    for (leaf, region, array), (leaf_2, region_2, array_2) in zip(one, other, strict=True):
        assert (leaf, region) == (leaf_2, region_2)
        assert array.dtype == array_2.dtype and array.shape == array_2.shape
        assert array.tobytes() == array_2.tobytes()


@given(
    strategies.pytrees(ARRAYS, max_leaves=6),
    SETTINGS,
    st.sampled_from([0, 2**14, 2**30]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=90)
def test_all_paths_agree(tmp_path_factory, tree, chosen, copied_bytes, checksums, data):
    path = tmp_path_factory.mktemp("paths") / "step"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArrayWriter.put, "__defaults__", (copied_bytes,))
        ckpt.save(path, tree, options=chosen)
    opened = open_checkpoint(path)
    remote = replace(opened, location=Location(f"file://{path}", False))
    (item,) = opened.items.values()
    wants = wants_of(item, data)
    if wants:
        same(by_reader(opened, item, wants, checksums), by_driver(opened, item, wants))
        same(by_reader(opened, item, wants, checksums), by_reader(remote, item, wants, checksums))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(extents, "_SMALL_BYTES", -1)  # no joined reads
            same(by_reader(opened, item, wants, checksums), by_driver(opened, item, wants))
    assert_same(ckpt.load(path, tree), tree)
    shutil.rmtree(path)
