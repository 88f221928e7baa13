"""Casts between floats happen block by block: the values of astype, and no second copy of the array."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import ckpt_core as ckpt
from tests.support.damage import turn_a_bit
from tests.support.meshes import explicit_mesh
from tests.support.units import KIB

SHAPE = (256, 520)
PAIRS = [
    (np.float32, ml_dtypes.bfloat16),
    (np.float32, np.float16),
    (ml_dtypes.bfloat16, np.float32),
    (np.float16, np.float32),
    (np.float32, ml_dtypes.float8_e4m3fn),
    (ml_dtypes.float8_e5m2, ml_dtypes.bfloat16),
]
FORMS = {
    "one chunk": ckpt.Options(),
    "many chunks": ckpt.Options(chunk_bytes=32 * KIB),
    "compressed": ckpt.Options(chunk_bytes=32 * KIB, compression="zstd"),
}


def values(dtype) -> np.ndarray:
    """Small and large ones, those that overflow, and the special ones."""
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(SHAPE) * 10.0 ** rng.integers(-9, 9, SHAPE)
    wide.flat[:6] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e30]
    with np.errstate(all="ignore"):
        return wide.astype(dtype)


def same_bytes(one, other) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.fixture(params=FORMS)
def saved(request, tmp_path):
    def save(dtype):
        ckpt.save(tmp_path / "c", {"w": jnp.asarray(values(dtype))}, options=FORMS[request.param])
        return tmp_path / "c"

    return save


@pytest.mark.parametrize("other", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_between_floats_of_which_numpy_casts_none_to_the_other(tmp_path, other):
    """A scale of a block (e8m0) has an exponent alone: numpy raised its own TypeError, without the leaf."""
    scale, one = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(getattr(ml_dtypes, other))
    for size in (8, 3 * KIB):
        powers = np.tile(np.float32([0.5, 1, 2, 4]), size // 4)
        for stored, wanted in ((scale, one), (one, scale)):
            path = tmp_path / f"{size} {stored}"
            ckpt.save(path, {"w": powers.astype(stored)}, options=FORMS["many chunks"])
            got = ckpt.load(path, {"w": np.empty(size, wanted)}, cast=True)
            assert same_bytes(got["w"], powers.astype(wanted))


@pytest.mark.parametrize(("stored", "wanted"), PAIRS)
def test_the_values_are_those_of_astype(saved, stored, wanted):
    path = saved(stored)
    with np.errstate(all="ignore"):
        expected = values(stored).astype(wanted)
    as_jax = ckpt.load(path, {"w": jnp.zeros(SHAPE, wanted)}, cast=True)
    assert same_bytes(as_jax["w"], expected)
    as_numpy = ckpt.load(path, {"w": np.zeros(SHAPE, wanted)}, cast=True)
    assert same_bytes(as_numpy["w"], expected)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P(), P("x", "y")])
def test_on_shards(saved, spec):
    path = saved(np.float32)
    mesh = explicit_mesh((4, 2), ("x", "y"))
    target = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    loaded = ckpt.load(path, {"w": target}, cast=True)["w"]
    assert loaded.sharding == target.sharding
    assert same_bytes(loaded, values(np.float32).astype(ml_dtypes.bfloat16))


def test_damage_is_found(tmp_path):
    ckpt.save(tmp_path / "c", {"w": jnp.asarray(values(np.float32))})
    turn_a_bit(tmp_path / "c")
    with pytest.raises(ckpt.CheckpointCorrupt):
        ckpt.load(tmp_path / "c", {"w": jnp.zeros(SHAPE, jnp.bfloat16)}, cast=True)
