"""Two processes load one safetensors file: each reads its own half of the bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy

from tests.support.launch import launch, reports

CODE = """
from ckpt_core._storage import arrays
read = []
plain = arrays.os.preadv
def counting(descriptor, buffers, offset):
    read.append(plain(descriptor, buffers, offset))
    return read[-1]
arrays.os.preadv = counting
mesh = Mesh(np.array(jax.devices()), ("data",))
told = []
for spec in (P("data"), P(None, "data")):
    like = {"w": jax.ShapeDtypeStruct((64, 65536), np.float32, sharding=NamedSharding(mesh, spec))}
    read.clear()
    loaded = ckpt.load(f"{directory}/a.safetensors", like, options=options)["w"]
    whole = np.arange(64 * 65536, dtype=np.float32).reshape(64, 65536)
    right = all((np.asarray(s.data) == whole[s.index]).all() for s in loaded.addressable_shards)
    told.append([right, sum(sorted(read)[1:] if min(read) < 4096 else read)])
report(told=told)
"""


def test_each_reads_its_half(tmp_path: Path):
    directory = tmp_path / "run"
    directory.mkdir()
    values = np.arange(64 * 65536, dtype=np.float32).reshape(64, 65536)
    safetensors.numpy.save_file({"w": values}, directory / "a.safetensors")
    for report in reports(launch(CODE, directory)):
        for right, read_bytes in report["told"]:
            assert right
            assert values.nbytes // 2 <= read_bytes < values.nbytes // 2 + 300_000
