"""NNX models that do not fit what was saved: refused with every leaf named, or taken in part."""

from typing import Any

import pytest

import ckpt_core as ckpt

pytest.importorskip("flax")
pytest.importorskip("ckpt_flax_nnx")
import jax.numpy as jnp
import optax
from flax import nnx

from tests.support.compiling import make_quick_compilation  # noqa: F401 (fixture)
from tests.support.nnx_models import MLP, Holder, X, host, same, state_of, train_step


def test_wrong_shape_and_dtype_change_nothing(tmp_path):
    ckpt.save(tmp_path / "a", model=MLP(0))
    wider = MLP(1, width=16)
    wider.norm.scale.set_value(wider.norm.scale.get_value().astype(jnp.bfloat16))
    before = state_of(wider)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", model=wider)
    found = {(m.path, m.kind) for m in caught.value.mismatches}
    assert found == {("out/kernel", "shape"), ("out/bias", "shape"), ("norm/scale", "dtype")}
    for text in ("out/kernel", "4,8", "4,16", "float32", "bfloat16"):
        assert text in str(caught.value)
    assert same(state_of(wider), before)


def test_missing_and_extra_leaves_are_listed_and_can_be_kept(tmp_path):
    model = MLP(0)
    ckpt.save(tmp_path / "a", model=model)
    other = MLP(1, layers=3)
    other.norm = None
    before = state_of(other.layers[2])
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", model=other)
    kinds = {
        kind: {m.path for m in caught.value.mismatches if m.kind == kind}
        for kind in ("missing", "unexpected")
    }
    assert kinds["missing"] == {"layers/2/kernel", "layers/2/bias"}
    assert kinds["unexpected"] == {f"norm/{name}" for name in ("bias", "mean", "scale", "var")}
    restored = ckpt.restore(tmp_path / "a", model=other, missing="keep", unexpected="ignore")
    assert same(state_of(other.layers[2]), before)
    assert same(state_of(other.layers[1]), state_of(model.layers[1]))
    assert len(restored.report.missing) == 2
    assert len(restored.report.unexpected) == 4


def test_only_the_parameters(tmp_path):
    model, other = MLP(0), MLP(1)
    model(X + 3)
    ckpt.save(tmp_path / "a", model=model)
    before = state_of(nnx.state(other, nnx.Not(nnx.Param)))
    restored = ckpt.restore(tmp_path / "a", model=other, only=nnx.Param)
    assert same(state_of(nnx.state(other, nnx.Param)), state_of(nnx.state(model, nnx.Param)))
    assert same(state_of(nnx.state(other, nnx.Not(nnx.Param))), before)
    assert "model/norm/scale" in restored.report.loaded
    assert "model/norm/mean" not in restored.report.loaded


@pytest.mark.parametrize(
    ("only", "loaded"),
    [
        (nnx.BatchStat, {"norm/mean", "norm/var"}),
        (nnx.Any(nnx.BatchStat, nnx.PathContains("bias")), {"norm/mean", "norm/var", "norm/bias"}),
        (nnx.All(nnx.Param, nnx.PathContains("norm")), {"norm/scale", "norm/bias"}),
        (nnx.Not(nnx.Param), {"norm/mean", "dropout/rngs/key"}),
    ],
)
def test_filters_of_nnx(only, loaded, tmp_path):
    model, other = MLP(0), MLP(1)
    ckpt.save(tmp_path / "a", model=model)
    restored = ckpt.restore(tmp_path / "a", model=other, only=only)
    found = {path.removeprefix("model/") for path in restored.report.loaded}
    assert loaded <= found
    assert ("out/kernel" in found) is False
    expected = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, only))}
    assert found == expected


def test_a_filter_with_an_optimizer_beside(tmp_path):
    def make(seed: int) -> dict[str, Any]:
        model = MLP(seed)
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1.0), wrt=nnx.Param)}

    saved, live = make(0), make(1)
    train_step(saved["model"], saved["optimizer"], X)
    ckpt.save(tmp_path / "a", **saved)
    before = state_of(live["optimizer"])
    ckpt.restore(tmp_path / "a", **live, only=nnx.Param)
    assert same(state_of(live["optimizer"]), before)
    params = [nnx.state(each["model"], nnx.Param) for each in (live, saved)]
    assert same(*map(state_of, params))


def test_renamed_attributes(tmp_path):
    class Renamed(MLP):
        def __init__(self, seed: int):
            super().__init__(seed)
            self.blocks, self.layers = self.layers, None

    saved, live = MLP(0), Renamed(1)
    ckpt.save(tmp_path / "a", model=saved)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "a", model=live)
    nearest = {m.path: m.nearest for m in caught.value.mismatches if m.kind == "missing"}
    assert nearest["blocks/0/kernel"] == "layers/0/kernel"
    ckpt.restore(tmp_path / "a", model=live, rename={"layers": "blocks"})
    assert same(state_of(live.blocks), state_of(saved.layers))


def test_lora_added_after_the_save(tmp_path):
    base = Holder(linear=nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    ckpt.save(tmp_path / "base", model=base)
    tuned = Holder(linear=nnx.LoRALinear(4, 4, lora_rank=2, rngs=nnx.Rngs(1)))
    with pytest.raises(ckpt.StructureMismatch, match="lora_a"):
        ckpt.restore(tmp_path / "base", model=tuned)
    restored = ckpt.restore(tmp_path / "base", model=tuned, missing="keep")
    assert {path.rpartition("/")[2] for path in restored.report.missing} == {"lora_a", "lora_b"}
    assert host(tuned.linear.kernel.get_value()) == host(base.linear.kernel.get_value())
    optimizer = nnx.Optimizer(tuned, optax.adam(1e-2), wrt=nnx.LoRAParam)
    ckpt.save(tmp_path / "tuned", model=tuned, optimizer=optimizer)
    again = Holder(linear=nnx.LoRALinear(4, 4, lora_rank=2, rngs=nnx.Rngs(2)))
    other = nnx.Optimizer(again, optax.adam(1e-2), wrt=nnx.LoRAParam)
    ckpt.restore(tmp_path / "tuned", model=again, optimizer=other)
    assert same(state_of(again), state_of(tuned))
