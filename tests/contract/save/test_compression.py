"""Compression by pattern of paths: what is stored, what loads it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import ckpt_core as ckpt
from tests.contract.faults.crafted.signed import read_record, write_record
from tests.support.meshes import explicit_mesh
from tests.support.trees import assert_same

CODECS = ["zstd", "zstd:3", "blosc", "blosc:zstd", "blosc:blosclz:9", "blosc:lz4hc:1"]


def tree() -> dict[str, Any]:
    """Leaves that shrink well, large and small, of several widths."""
    return {
        "params": {
            "w": jnp.arange(200_000, dtype=jnp.float32) % 7,
            "bf": (jnp.arange(3_000) % 5).astype(jnp.bfloat16),
        },
        "opt": [{"mu": jnp.zeros((300, 400)), "mask": np.arange(90_001) % 3 == 0}, 7],
        "complex": np.ones(500, np.complex64),
        "none": jnp.zeros((0, 3)),
        "name": "text",
        "small_float": np.arange(600).astype(ml_dtypes.float8_e5m2),
    }


def stored_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*/ocdbt.process_0/d/*"))


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_brings_back_the_same_bits(tmp_path, codec):
    ckpt.save(tmp_path / "plain", tree())
    for name, compression in (("all", codec), ("some", {"**": codec})):
        ckpt.save(tmp_path / name, tree(), options=ckpt.Options(compression=compression))
        assert_same(ckpt.load(tmp_path / name), tree())
        assert_same(ckpt.load(tmp_path / name, as_numpy=True), tree(), numpy_as_jax=True)
        assert ckpt.verify(tmp_path / name).ok
        assert stored_bytes(tmp_path / name) < stored_bytes(tmp_path / "plain") / 3


def test_the_first_pattern_that_matches_counts(tmp_path):
    rules = {"opt/**/mask": "blosc:zstd:5", "params/bf": None, "state/params/**": "zstd:2"}
    ckpt.save(tmp_path / "x", tree(), options=ckpt.Options(compression=rules))
    item = read_record(tmp_path / "x")["items"]["state"]
    codecs = [item["leaf_types"][at][6] for at in item["leaves"]]
    assert [codec for codec in codecs if codec] == ["zstd:2", "blosc:zstd:5"]
    assert_same(ckpt.load(tmp_path / "x"), tree())
    assert ckpt.verify(tmp_path / "x").ok
    # a slice and a leaf on their own take the same way
    assert_same(
        ckpt.load(tmp_path / "x", only="params/w"), {"params": {"w": tree()["params"]["w"]}}
    )


def test_a_pattern_that_matches_nothing_is_refused(tmp_path):
    options = ckpt.Options(compression={"params/**": "zstd", "optt/**": "zstd"})
    with pytest.raises(ValueError, match=r"'optt/\*\*' matches no leaf; leaves are .*params/w"):
        ckpt.save(tmp_path / "x", tree(), options=options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "codec",
    ["gzip", "zstd:x", "zstd:23", "zstd:1:2", "blosc:nope", "blosc:lz4:10", "blosc:lz4:",
     "blosc:lz4:5:1", "", "zstd:-1", "zstd:²", 3],
)  # fmt: skip
def test_unknown_codecs_are_refused(codec):
    for compression in (codec, {"**": codec}):
        with pytest.raises(ValueError, match=r"Options\.compression must be None, 'zstd'"):
            ckpt.Options(compression=compression)


def test_damage_in_a_compressed_leaf_is_found(tmp_path):
    ckpt.save(tmp_path / "x", tree(), options=ckpt.Options(compression={"params/w": "blosc"}))
    (file,) = (tmp_path / "x").rglob("ocdbt.process_0/d/*")
    whole = file.read_bytes()
    for position in range(0, len(whole), len(whole) // 40):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        file.write_bytes(damaged)
        assert not ckpt.verify(tmp_path / "x").ok
    file.write_bytes(whole)
    assert ckpt.verify(tmp_path / "x").ok


def test_a_leaf_of_an_unknown_codec_is_damage(tmp_path):
    ckpt.save(tmp_path / "x", tree(), options=ckpt.Options(compression={"params/w": "zstd:4"}))
    body = json.dumps(read_record(tmp_path / "x"), separators=(",", ":"))
    assert "zstd:4" in body
    write_record(tmp_path / "x", json.loads(body.replace("zstd:4", "lzma:4")))
    with pytest.raises(ckpt.CheckpointCorrupt, match="lzma:4"):
        ckpt.load(tmp_path / "x")


@pytest.mark.parametrize(
    ("limit_bytes", "spec"),
    [(1024, ()), (40_000, ("x",)), (1024, (None, "x")), (40_000, ("x", "y"))],
)
def test_a_limit_that_is_smaller_than_an_array(tmp_path, limit_bytes, spec):
    """What is compressed is held until it is committed: it goes chunk by chunk then."""
    mesh = explicit_mesh((4, 2), ("x", "y"))
    values = np.arange(136 * 72, dtype=np.float32).reshape(136, 72) % 11
    saved = {"w": jax.device_put(values, NamedSharding(mesh, P(*spec))), "scalar": jnp.float32(3)}
    options = ckpt.Options(compression="zstd", chunk_bytes=3_000, max_host_bytes=limit_bytes)
    ckpt.save(tmp_path / "c", saved, options=options)
    assert_same(ckpt.load(tmp_path / "c"), saved)
    assert ckpt.verify(tmp_path / "c").ok
