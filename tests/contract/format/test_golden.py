"""A checkpoint in each version of the format, which an earlier ckpt wrote: every later one must load it, bit for bit."""

import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.testing import assert_same

GOLDEN = Path(__file__).parent / "golden"
METADATA = {"run": "golden", "numbers": [1, 2.5, None]}


class Moments(NamedTuple):
    mu: Any
    nu: Any


# The checkpoint names the class by the module that it was in when it was written.
sys.modules.setdefault("test_golden", sys.modules[__name__])


def tree() -> dict[str, Any]:
    """What was saved: integers and their bits only, so that every platform makes the same."""
    count = np.arange(24)
    signed = (count % 16 - 8).reshape(4, 6)
    return {
        "params": {
            "f32": jnp.asarray((count - 7.5).reshape(4, 6), jnp.float32),
            "bf16": jnp.asarray(count / 8, jnp.bfloat16),
            "int4": jnp.asarray(signed, jnp.int4),
            "flags": jnp.asarray(count % 3 == 0),
            "special": jnp.asarray([np.nan, np.inf, -np.inf, -0.0], jnp.float32),
            "empty": jnp.zeros((0, 3), jnp.float16),
            "long": jnp.arange(60, dtype=jnp.int32),
        },
        "optimizer": (
            Moments([jnp.float32(1.5)], {0: jnp.int32(3), 10: jnp.uint8(4)}),
            (),
            None,
            {},
        ),
        "key": jax.random.key(5, impl="threefry2x32"),
        "keys": jax.random.split(jax.random.key(6, impl="rbg"), 3),
        "numpy": {
            "f64": np.array([[1 / 3, -1e300]]),
            "e4m3": np.arange(5).astype(ml_dtypes.float8_e4m3fn),
            "complex": np.array([1 + 2j], np.complex64),
            "scalar": np.int16(-3),
            "generator": np.random.Generator(np.random.PCG64(7)),
        },
        "plain": [7, -(2**70), 1 / 3, True, "text ~/ü\n", b"\x00\xff", 1 - 2j],
        "a/b": {"~": 1},
    }


@pytest.fixture(name="lying", params=["v1", "v2"])
def where_it_lies(request: pytest.FixtureRequest) -> Path:
    return GOLDEN / request.param


@pytest.fixture(params=["where it lies", "a read-only copy"])
def golden(request: pytest.FixtureRequest, lying: Path, tmp_path: Path) -> Path:
    if request.param == "where it lies":
        return lying
    copied = Path(shutil.copytree(lying, tmp_path / "copied"))
    for path in [*copied.rglob("*"), copied]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    return copied


def test_loads_without_a_target(golden):
    loaded = ckpt.load(golden)
    assert_same(loaded, tree())
    assert isinstance(loaded["optimizer"][0], Moments)


def test_loads_into_a_target(golden):
    fresh = jax.tree.map(lambda leaf: leaf, tree())
    assert_same(ckpt.load(golden, fresh), tree())
    abstract = jax.eval_shape(lambda: tree()["params"])
    loaded = ckpt.load(golden, {"params": abstract}, unexpected="ignore")
    assert_same(loaded, {"params": tree()["params"]})
    restored = ckpt.restore(golden, state=fresh)
    assert_same(restored["state"], tree())
    assert restored.metadata == METADATA


def test_verifies(golden):
    report = ckpt.verify(golden)
    assert report.ok and report.problems == () and report.checked_bytes > 0


def test_inspects(golden, lying):
    info = ckpt.inspect(golden)
    assert (
        f"v{info.format_version}" == lying.name
        and info.metadata == METADATA
        and list(info.items) == ["state"]
    )
    leaves = {leaf.path: leaf for leaf in info.items["state"].leaves}
    assert leaves["params/int4"].dtype == "int4" and leaves["params/f32"].shape == (4, 6)
    assert "a~1b/~0" in leaves


def test_every_file_is_here(lying):
    """Git and packagers drop files that they take for rubbish, and what is empty."""
    recorded = ckpt.inspect(lying).files
    for name, size in recorded.items():
        assert (lying / name).stat().st_size == size, name
    there = {str(path.relative_to(lying)) for path in lying.rglob("*") if path.is_file()}
    assert there == {*recorded, "ckpt.json"}
    assert sum(path.stat().st_size for path in lying.rglob("*") if path.is_file()) < 50_000
