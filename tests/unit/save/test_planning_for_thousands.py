"""Planning a leaf does not look at every process again: what follows from its sharding and spec is computed once."""

from __future__ import annotations

import math
import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckpt_core._layout.chunks import chunk_parts
from ckpt_core._layout.regions import Region, Shape, region_shape
from ckpt_core._layout.writers import INLINE_BYTES, CutRegion, WriterTurns, cut_region
from ckpt_core._save.plan import LeafPlanner
from ckpt_core._tree.leaves import leaf_spec


class Counted(tuple[int, ...]):
    """Indices of processes that count how often all of them are hashed."""

    hashed = 0

    def __hash__(self) -> int:
        Counted.hashed += 1
        return super().__hash__()


def test_holders_are_hashed_once_for_all_leaves() -> None:
    Counted.hashed = 0
    holders, turns = Counted(range(1000)), WriterTurns()
    writers = [turns.writer(holders, 1000) for _ in range(2000)]
    assert writers == [*range(1000)] * 2
    assert Counted.hashed <= 2


def test_equal_holders_take_turns_together() -> None:
    """Of two shardings, or two shapes, that lie on the same processes."""
    turns = WriterTurns()
    first, second = (3, 5, 7), tuple(sorted({7, 5, 3}))
    assert first is not second
    assert [turns.writer((first, second)[n % 2], 1000) for n in range(6)] == [3, 5, 7, 3, 5, 7]


class Device:
    def __init__(self, process: int) -> None:
        self.process_index = process


class Cut:
    """A sharding over devices that do not exist: the first dimension in pieces, each held by several processes."""

    is_fully_addressable = False

    def __init__(self, processes: int, pieces: int) -> None:
        self._devices = [Device(process) for process in range(processes)]
        self._pieces = pieces

    def devices_indices_map(self, shape: Shape) -> dict[Device, Any]:
        step = shape[0] // self._pieces
        rest = (slice(None),) * (len(shape) - 1)
        cuts = [(slice(n * step, (n + 1) * step), *rest) for n in range(self._pieces)]
        return {device: cuts[n % self._pieces] for n, device in enumerate(self._devices)}


def calls_of(processes: int, leaves: int) -> int:
    """Python calls that planning so many leaves of two shardings and two shapes takes."""
    stored = [(Cut(processes, 2), True), (Cut(processes, 1), True)]
    specs = [leaf_spec("jax", "float32", shape) for shape in ((64, 8), (4096,))]
    planner, calls = LeafPlanner(1, 2**20, own=False), 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for leaf in range(leaves):
            planner.leaf(specs[leaf % 2], stored[leaf // 2 % 2], None)
    finally:
        sys.setprofile(before)
    return calls


def test_a_further_leaf_costs_the_same_whatever_the_number_of_processes() -> None:
    calls_of(4, 4)  # imports what is imported at the first use
    few, many = (calls_of(count, 1000) - calls_of(count, 500) for count in (4, 1024))
    assert 0 < many <= few + 50 <= 500 * 8  # a few calls depend on whose turn it is


def reference(
    turns: dict[Any, list[int]], region: Region, holders: tuple[int, ...], chunk: Shape, size: int
) -> dict[int, list[Region]]:
    """What each holder writes: chunk by chunk, always the one with the fewest bytes so far."""
    found: dict[int, list[Region]] = {process: [] for process in holders}
    loads = turns.setdefault(holders, [0] * len(holders))
    for part in chunk_parts(region, chunk):
        size_bytes = size * math.prod(region_shape(part.in_region))
        at = 0
        if len(holders) > 1 and size_bytes > INLINE_BYTES:
            at = loads.index(min(loads))
            loads[at] += size_bytes
        place = zip(part.in_region, region, strict=True)
        found[holders[at]].append(tuple((a + low, b + low) for (a, b), (low, _) in place))
    return found


@st.composite
def arrays(draw: st.DrawFn) -> tuple[Region, tuple[int, ...], Shape]:
    dimensions = draw(st.integers(0, 2))
    starts = [draw(st.integers(0, 5)) for _ in range(dimensions)]
    region = tuple((start, start + draw(st.integers(0, 12))) for start in starts)
    chunk = tuple(draw(st.integers(1, 7)) for _ in range(dimensions))
    holders = draw(st.sampled_from([(0,), (2,), (0, 1), (1, 2, 5)]))
    return region, holders, chunk


@given(st.lists(arrays(), min_size=1, max_size=8), st.sampled_from([1, 4, 80]))
def test_all_holders_write_what_one_after_the_other_would(
    wanted: list[tuple[Region, tuple[int, ...], Shape]], itemsize: int
) -> None:
    turns: dict[Any, list[int]] = {}
    each = {process: WriterTurns() for process in range(6)}
    for region, holders, chunk in wanted:
        expected = reference(turns, region, holders, chunk, itemsize)
        cut = cut_region(region, holders, chunk, itemsize)
        assert isinstance(cut, CutRegion)
        for process in holders:
            regions, size_bytes = each[process].regions(cut, process)
            total = sum(itemsize * math.prod(region_shape(one)) for one in regions)
            assert size_bytes == total
            if len(holders) == 1 or len(expected[process]) == len(cut.parts) > 0:
                assert regions == (region,)
            else:
                assert list(regions) == expected[process]
