"""Which arrays of a save share the files of the one before: those of files that stay mostly alive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_core._save.dedup_origins import LEAST_FILE_BYTES, worth_linking
from ckpt_core._storage import Extent
from tests.support.units import MIB


def extent(file: str, size: int) -> Extent:
    return Extent(file, 0, size)


def test_worth_linking():
    big = 10 * MIB
    sizes = {"d/a": big, "d/small": LEAST_FILE_BYTES - 1, "ocdbt.linked/0/d/b": big, "d/half": big}
    overheads = {"": 100, "ocdbt.linked/0": 100}
    arrays = {
        "most": [extent("d/a", 8 * MIB)],
        "tail": [extent("d/a", MIB)],
        "small": [extent("d/small", LEAST_FILE_BYTES - 1)],
        "old": [extent("ocdbt.linked/0/d/b", 9 * MIB)],
        "half": [extent("d/half", 5 * MIB)],
        "inline": [extent("", 4), extent("d/a", 10)],
        "both": [extent("d/a", 10), extent("ocdbt.linked/0/d/b", 10)],
    }
    assert sorted(worth_linking(arrays, dict.fromkeys(arrays), sizes, overheads)) == [
        "most",
        "old",
        "tail",
    ]
    assert worth_linking(arrays, dict.fromkeys(arrays), sizes, {"": 100}) == ["most", "tail"]
    heavy = {"": 3 * MIB, "ocdbt.linked/0": 100}  # an index as large as much of the data
    assert worth_linking(arrays, dict.fromkeys(arrays), sizes, heavy) == ["old"]


@given(
    st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 2), st.integers(1, 3 * MIB)), max_size=60
    ),
    st.integers(0, MIB),
)
def test_whatever_is_linked_is_mostly_alive(parts, overhead):
    def name(origin: int, file: int) -> str:
        return f"ocdbt.linked/{origin}/d/{file}" if origin else f"d/{file}"

    sizes = {name(o, f): 4 * MIB for o in range(12) for f in range(3)}
    arrays = {
        str(i): [extent(name(origin, file), size)] for i, (origin, file, size) in enumerate(parts)
    }
    overheads = {f"ocdbt.linked/{o}" if o else "": overhead for o in range(12)}
    chosen = worth_linking(arrays, dict.fromkeys(arrays), sizes, overheads)
    alive: dict[str, int] = {}
    for array in chosen:
        (part,) = arrays[array]
        alive[part.file] = alive.get(part.file, 0) + part.size_bytes
    assert all(alive[file] >= 0.8 * sizes[file] for file in alive)
    assert len({file.rpartition("/d/")[0] for file in alive}) <= 8
