"""Who loads one leaf of thousands reads little: counted in bytes and calls, not in seconds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core._storage import files
from ckpt_core.testing import assert_same
from tests.support.units import KIB, MIB

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
