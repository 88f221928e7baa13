"""Which arrays of a save share the files of the one before: those of files that stay mostly alive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_core._save.unchanged import LEAST_FILE_BYTES, worth_linking
from tests.support.units import MIB


def test_worth_linking():
    big = 10 * MIB
    sizes = {"d/a": big, "d/small": LEAST_FILE_BYTES - 1, "d/b": big, "d/half": big}
    arrays = {
        "most": [("d/a", 0, 8 * MIB)],
        "tail": [("d/a", 8 * MIB, MIB)],
        "small": [("d/small", 0, LEAST_FILE_BYTES - 1)],
        "old": [("d/b", 0, 9 * MIB)],
        "half": [("d/half", 0, 5 * MIB)],
        "both": [("d/half", 0, 10), ("d/b", 9 * MIB, 10)],
    }
    assert sorted(worth_linking(arrays, sizes.__getitem__)) == ["most", "old", "tail"]


@given(st.lists(st.tuples(st.integers(0, 35), st.integers(1, 3 * MIB)), max_size=60))
def test_whatever_is_linked_is_mostly_alive(parts):
    sizes = {f"d/{file}": 4 * MIB for file in range(36)}
    arrays = {str(i): [(f"d/{file}", 0, size)] for i, (file, size) in enumerate(parts)}
    alive: dict[str, int] = {}
    for array in worth_linking(arrays, sizes.__getitem__):
        ((path, _, size),) = arrays[array]
        alive[path] = alive.get(path, 0) + size
    assert all(alive[path] >= 0.8 * sizes[path] for path in alive)
