"""Parts of NNX models: abstract ones that stay abstract, and states that Flax keys by tuples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from ckpt_flax_nnx import abstract


class Base(nnx.Module):
    def __init__(self):
        self.base = nnx.Linear(2, 3, rngs=nnx.Rngs(0))


class WithLoRA(Base):
    def __init__(self):
        super().__init__()
        self.lora = nnx.LoRA(2, 2, 3, rngs=nnx.Rngs(1))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(2))


@pytest.mark.parametrize("missing", ["error", "keep"])
def test_what_an_abstract_model_lacks_is_never_advised_to_be_kept(tmp_path, missing):
    ckpt.save(tmp_path / "a", model=Base())
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", model=abstract(WithLoRA), missing=missing)
    assert {entry.path for entry in caught.value.mismatches} == {
        "dropout/rngs/count", "dropout/rngs/key", "lora/lora_a", "lora/lora_b"
    }  # fmt: skip
    assert all("(abstract)" in entry.wanted for entry in caught.value.mismatches)
    assert 'missing="keep"' not in str(caught.value)
    assert "pass a target with values" in str(caught.value) and "only=" in str(caught.value)


def test_nothing_is_said_of_models_that_were_made_and_of_pytrees(tmp_path):
    ckpt.save(tmp_path / "a", model=WithLoRA())
    ckpt.restore(tmp_path / "a", model=WithLoRA(), only=nnx.Param)
    like = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(WithLoRA())))
    part = ckpt.load(tmp_path / "a", like, item="model", only="base/**")
    assert isinstance(part["base"]["kernel"], jax.Array)
    assert isinstance(part["lora"]["lora_a"], jax.ShapeDtypeStruct)
    ckpt.restore(tmp_path / "a", model=abstract(WithLoRA), only="**")


def spectral(seed):
    model = nnx.SpectralNorm(
        nnx.Linear(2, 3, rngs=nnx.Rngs(seed)), rngs=nnx.Rngs(seed + 1), n_steps=1
    )
    model(jnp.ones((1, 2)) * (seed + 1), update_stats=True)
    return model


def weight(seed):
    return nnx.WeightNorm(
        nnx.Linear(2, 3, rngs=nnx.Rngs(seed)), rngs=nnx.Rngs(seed), use_scale=True
    )


def values(obj):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
        for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.state(obj))[0]
    }


@pytest.mark.parametrize("make", [spectral, weight])
def test_states_that_flax_keys_by_tuples(tmp_path, make):
    saved, fresh = make(0), make(5)
    assert values(saved) != values(fresh)
    ckpt.save(tmp_path / "a", model=saved)
    ckpt.restore(tmp_path / "a", model=fresh)
    assert values(fresh) == values(saved)
    assert values(ckpt.load(tmp_path / "a", make(5), item="model")) == values(saved)
    assert ckpt.verify(tmp_path / "a").ok
    like = nnx.state(make(5))
    assert values(ocp_v1.load(tmp_path / "a", like, checkpointable_name="model")) == values(saved)
    ocp_v1.save(tmp_path / "orbax", nnx.state(saved))
    again = make(5)
    ckpt.restore(tmp_path / "orbax", state=again)
    assert values(again) == values(saved)


def test_tuples_as_keys_come_back_as_they_were(tmp_path):
    tree = {
        ("a", 1): jnp.arange(3),
        ("a", ("b/c", -2)): {(): 1, 0: 2, "0": {"x": 3}},
        "(1, 2)~": {(1, 2): np.arange(2)},
    }
    ckpt.save(tmp_path / "a", {key: tree[key] for key in tree if key != ("a", ("b/c", -2))})
    ckpt.save(tmp_path / "b", {("a", ("b/c", -2)): {(): 1, 0: 2}})
    loaded = ckpt.load(tmp_path / "a")
    assert list(loaded) == [("a", 1), "(1, 2)~"] and list(loaded["(1, 2)~"]) == [(1, 2)]
    assert ckpt.load(tmp_path / "b") == {("a", ("b/c", -2)): {(): 1, 0: 2}}
    paths = [leaf.path for leaf in ckpt.inspect(tmp_path / "b").items["state"].leaves]
    assert paths == ["('a', ('b~1c', -2))/()", "('a', ('b~1c', -2))/0"]
    for only in (paths[0], "('a', ('b~1c', -2))/*"):
        part = ckpt.load(tmp_path / "b", only=only)
        assert part[("a", ("b/c", -2))][()] == 1
    like = {("a", ("b/c", -2)): {(): 0, 0: 0}}
    assert ckpt.load(tmp_path / "b", like) == {("a", ("b/c", -2)): {(): 1, 0: 2}}
    with pytest.raises(ckpt.UnsupportedLeaf, match="distinguish them"):
        ckpt.save(tmp_path / "c", {(1, 2): 1, "(1, 2)": 2})
