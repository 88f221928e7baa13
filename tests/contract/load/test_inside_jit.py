"""A save or a load in a function that jax is tracing: values are values, random keys too, and what is traced is refused by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.meshes import explicit_mesh

STATE = {
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(4), 8),
    "x": jnp.arange(8.0),
}


def traced(work: Any) -> Any:
    """What ``work`` gives while a function is traced."""
    found: list[Any] = []

    def step(x: Any) -> Any:
        found.append(work())
        return x + 1

    jax.jit(step)(1.0)
    return found[0]


def same(one: Any, other: Any) -> bool:
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(one))
    bits = [
        jax.tree.map(
            lambda x: np.asarray(
                jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            ),
            tree,
        )
        for tree in (one, other)
    ]
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, *bits)))


@pytest.mark.parametrize("how", ["load", "target", "restore", "load_async", "sharding"])
def test_random_keys_are_values(tmp_path, how):
    """They came back as tracers, which nothing outside can use."""
    ckpt.save(tmp_path / "a", STATE)
    mesh = explicit_mesh((8,), ("x",))
    on_mesh = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    ways = {
        "load": lambda: ckpt.load(tmp_path / "a"),
        "target": lambda: ckpt.load(tmp_path / "a", STATE),
        "restore": lambda: ckpt.restore(tmp_path / "a", STATE).state,
        "load_async": lambda: ckpt.load_async(tmp_path / "a").result(),
        "sharding": lambda: ckpt.load(tmp_path / "a", only=["keys", "x"], sharding=on_mesh),
    }
    loaded = traced(ways[how])
    assert same(loaded, {name: STATE[name] for name in loaded})
    if how == "sharding":
        assert loaded["keys"].sharding.is_equivalent_to(on_mesh, 1)


@pytest.mark.parametrize("save", [ckpt.save, lambda *of: ckpt.save_async(*of).result()])
def test_random_keys_are_saved(tmp_path, save):
    traced(lambda: save(tmp_path / "a", STATE))
    assert same(ckpt.load(tmp_path / "a"), STATE)


def test_a_target_that_is_traced_is_refused_by_name(tmp_path):
    ckpt.save(tmp_path / "a", {"x": jnp.arange(4.0)})
    for load in (ckpt.load, ckpt.restore):
        with pytest.raises(
            ckpt.UnsupportedLeaf, match=r"x: it is being traced: load outside of jit"
        ):
            jax.jit(lambda x, load=load: load(tmp_path / "a", {"x": x}))(jnp.zeros(4))
