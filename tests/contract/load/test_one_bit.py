"""One flipped bit in a file of each kind: no load gives other values, and verify names the file."""

import numpy as np
import pytest

import ckpt_core as ckpt

STATE = {"small": np.full(3000, 1.5), "large": np.full(2**20, 2.5)}


@pytest.mark.parametrize("where", ["small", "large", "state/checksums/process_0"])
def test_no_load_takes_it(tmp_path, where):
    ckpt.save(tmp_path, STATE, overwrite=True)
    values = STATE[where].tobytes() if where in STATE else b""
    files = tmp_path.rglob("d/*") if values else [tmp_path / where]
    (file,) = (file for file in files if values in file.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(values) + 77] ^= 1
    file.write_bytes(data)
    with pytest.raises(ckpt.CheckpointCorrupt) as caught:
        ckpt.load(tmp_path)
    assert where in (caught.value.leaf, caught.value.file)


def test_verify_finds_it_in_what_no_load_reads(tmp_path):
    ckpt.save(tmp_path, STATE, overwrite=True)
    file = tmp_path / "state" / "_METADATA"
    data = bytearray(file.read_bytes())
    data[77] ^= 1
    file.write_bytes(data)
    assert [problem.file for problem in ckpt.verify(tmp_path).problems] == ["state/_METADATA"]
