"""Rules between saved and wanted names: what they make is what numpy makes, whichever part a device needs."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core import Rule
from tests.support.same_bits import bits

LAYERS, HEADS, SIZE, WIDTH = 4, 4, 8, 16
RULES = [
    Rule("l.{n}.q.weight", "scanned/q", reshape=((0, 1), 2), transpose=(2, 0, 1), stack=("n",)),
    Rule("l.{n}.o.weight", "layers/{n}/o", reshape=(0, (1, 2)), transpose=(1, 2, 0)),
    Rule("l.{n}.norm", "scanned/norm", stack=("n",)),
    Rule(("l.{n}.gate", "l.{n}.up"), "layers/{n}/gate_up", axis=0, transpose=(1, 0)),
    Rule("l.{n}.kv", ("layers/{n}/k", "layers/{n}/v"), axis=0, transpose=(1, 0)),
    Rule("l.{n}.e.{m}.w", "experts", stack=("n", "m"), transpose=(1, 0)),
    Rule("embed.weight", "embed/table"),
]


def saved() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def made(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    tensors = {"embed.weight": made(32, WIDTH), "left.alone": made(3)}
    for n in range(LAYERS):
        tensors |= {
            f"l.{n}.q.weight": made(HEADS * SIZE, WIDTH),
            f"l.{n}.o.weight": made(WIDTH, HEADS * SIZE),
            f"l.{n}.norm": made(WIDTH),
            f"l.{n}.gate": made(24, WIDTH),
            f"l.{n}.up": made(8, WIDTH),
            f"l.{n}.kv": made(24, WIDTH),
        }
        tensors |= {f"l.{n}.e.{m}.w": made(8, WIDTH) for m in range(2)}
    return tensors


def by_hand(t: dict[str, Any]) -> dict[str, Any]:
    def stacked(name: str, make: Any = lambda one: one) -> Any:
        return np.stack([make(t[name.format(n)]) for n in range(LAYERS)])

    return {
        "embed": {"table": t["embed.weight"]},
        "left": {"alone": t["left.alone"]},
        "scanned": {
            "q": stacked("l.{}.q.weight", lambda w: w.T.reshape(WIDTH, HEADS, SIZE)),
            "norm": stacked("l.{}.norm"),
        },
        "layers": [
            {
                "o": t[f"l.{n}.o.weight"].T.reshape(HEADS, SIZE, WIDTH),
                "gate_up": np.concatenate([t[f"l.{n}.gate"], t[f"l.{n}.up"]]).T,
                "k": t[f"l.{n}.kv"][:16].T,
                "v": t[f"l.{n}.kv"][16:].T,
            }
            for n in range(LAYERS)
        ],
        "experts": np.stack(
            [np.stack([t[f"l.{n}.e.{m}.w"].T for m in range(2)]) for n in range(LAYERS)]
        ),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    safetensors.numpy.save_file(saved(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def shardings(mesh: Any, shape: tuple[int, ...], kind: str) -> Any:
    """Sharded by the first, the last, or each dimension that 4 or 2 divide."""
    spec: list[Any] = [None] * len(shape)
    if kind == "first":
        spec[0] = "data" if shape[0] % 4 == 0 else None
    elif kind == "last":
        spec[-1] = ("data", "model") if shape[-1] % 8 == 0 else None
    elif kind == "middle":
        axes = ["data", "model"]
        for axis in reversed(range(len(shape))):
            if axes and shape[axis] % 4 == 0 and axis != len(shape) - 1:
                spec[axis] = axes.pop()
    return NamedSharding(mesh, PartitionSpec(*spec))


@pytest.mark.parametrize("kind", ["replicated", "first", "last", "middle"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_as_by_hand(path, mesh, kind, dtype):
    expected = by_hand(saved())
    like = jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(
            one.shape, dtype, sharding=shardings(mesh, one.shape, kind)
        ),
        expected,
    )
    loaded = ckpt.load(path, like, rules=RULES, cast=dtype != jnp.float32)
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    for array, hand, asked in zip(
        jax.tree.leaves(loaded), jax.tree.leaves(expected), jax.tree.leaves(like), strict=True
    ):
        assert array.sharding == asked.sharding
        assert bits(array) == bits(hand.astype(dtype))


def test_a_live_model_and_a_background_load(tmp_path):
    weights = {f"layers.{n}.weight": np.full((8, 4), n, np.float32) for n in range(2)}
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    model: Any = nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(0))
    rules = [Rule("layers.1.weight", "kernel", transpose=(1, 0))]
    ckpt.restore(tmp_path, model=model, rules=rules, unexpected="ignore")
    assert (model.kernel[...] == jnp.ones((4, 8))).all()
    stacked = [Rule("layers.{n}.weight", "w", stack=("n",))]
    like = {"w": jnp.zeros((2, 8, 4))}
    loaded = ckpt.load_async(tmp_path, like, rules=stacked).result()["w"]
    assert (loaded == jnp.arange(2.0)[:, None, None]).all()


def test_rules_as_json(path):
    told = json.loads("""[
        {"saved": "l.{n}.q.weight", "wanted": "q", "reshape": [[0, 1], 2],
         "transpose": [2, 0, 1], "stack": ["n"]},
        {"saved": ["l.{n}.gate", "l.{n}.up"], "wanted": "up", "stack": "n"}
    ]""")
    like = {"q": np.zeros((LAYERS, WIDTH, HEADS, SIZE), np.float32)}
    loaded = ckpt.load(path, like, rules=told, unexpected="ignore")
    assert bits(loaded["q"]) == bits(by_hand(saved())["scanned"]["q"])


def test_what_is_left_over_on_either_side_is_named(path):
    like = {"scanned": {"norm": np.zeros((LAYERS, WIDTH), np.float32)}, "other": np.zeros(3)}
    rules = [Rule("l.{n}.norm", "scanned/norm", stack=("n",)), Rule("l.{n}.up", "ups/{n}")]
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.load(path, like, rules=rules)
    told = {(entry.kind, entry.path) for entry in caught.value.mismatches}
    assert ("missing", "other") in told
    assert ("unexpected", "ups/3") in told
    assert ("unexpected", "l/0/gate") in told


@pytest.mark.parametrize(
    ("rule", "shape", "told"),
    [
        (Rule("l.{n}.q.weight", "x", reshape=((0, 1), 2), stack=("n",)), (4, 4, 9, 16), "x: shape"),
        (Rule("l.{n}.q.weight", "x", transpose=(1, 0), stack=("n",)), (4, 32, 16), "x: shape"),
        (Rule("l.0.q.weight", "x", transpose=(0, 2, 1)), (32, 16), "3 dimensions, by its rule"),
        (Rule(("l.0.gate", "l.0.o.weight"), "x"), (40, 16), "one that fits l.0.gate"),
        (Rule(("l.0.gate", "l.0.up"), "x", axis=2), (40, 16), "dimensions, by its rule"),
        (Rule("l.0.kv", ("x", "y")), (25, 16), "x: shape differs"),
    ],
)
def test_what_does_not_fit_is_told(path, rule, shape, told):
    like = {"x": np.zeros(shape, np.float32), "y": np.zeros((8, 16), np.float32)}
    with pytest.raises(ckpt.StructureMismatch, match=told):
        ckpt.load(path, like, rules=[rule], unexpected="ignore", missing="keep")


def test_a_layer_that_is_missing_is_told(tmp_path):
    tensors = saved()
    del tensors["l.1.norm"]
    safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors")
    like = {"norm": np.zeros((LAYERS, WIDTH), np.float32)}
    rule = Rule("l.{n}.norm", "norm", stack=("n",))
    with pytest.raises(ckpt.StructureMismatch, match=r"norm: wanted 1 more tensors l\.\{n\}\.norm"):
        ckpt.load(tmp_path / "a.safetensors", like, rules=[rule], unexpected="ignore")


def test_a_forged_number_of_a_layer_is_told(tmp_path):
    tensors = {"l.0.e.999999999.w": np.zeros(1), "l.999999999.e.0.w": np.zeros(1)}
    safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors")
    rule = Rule("l.{n}.e.{m}.w", "w", stack=("n", "m"))
    with pytest.raises(ckpt.StructureMismatch, match="w: wanted 999999999999999998 more tensors"):
        ckpt.load(tmp_path / "a.safetensors", {"w": np.zeros((1, 1, 1))}, rules=[rule])


def test_wrong_calls(path):
    rules = [Rule("a", "b")]
    with pytest.raises(TypeError, match="needs a target"):
        ckpt.load(path, rules=rules)
    with pytest.raises(TypeError, match="rename="):
        ckpt.load(path, {}, rules=rules, rename={"a": "b"})
    with pytest.raises(TypeError, match="select="):
        ckpt.load(path, {}, rules=rules, select={"a": 0})
    with pytest.raises(TypeError, match=r"list of ckpt\.Rule"):
        ckpt.load(path, {}, rules={"a": "b"})  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="a rule needs saved and wanted"):
        ckpt.load(path, {}, rules=[{"saved": "a", "want": "b"}])
    with pytest.raises(ckpt.StructureMismatch, match="by which its rule cuts"):
        ckpt.load(path, {"x": ..., "y": ...}, rules=[Rule("l.0.kv", ("x", "y"))])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"saved": ("a", "b"), "wanted": ("c", "d")}, "on one side only"),
        ({"saved": "a.{n}", "wanted": "b"}, "must have the places"),
        ({"saved": "a", "wanted": "b/{n}"}, "must have the places"),
        ({"saved": ("a.{n}", "b"), "wanted": "c/{n}"}, "the same places"),
        ({"saved": "a.{n}.{n}", "wanted": "b/{n}"}, "each once"),
        ({"saved": "a", "wanted": "b", "stack": ("n",)}, "in no saved name"),
        ({"saved": "a", "wanted": "b", "stack": "n"}, "in no saved name"),
        ({"saved": "a/{n}", "wanted": "b/{n}", "stack": ("n", "m")}, "all places of stack= or"),
        ({"saved": "a/{n}", "wanted": "b/{n}", "stack_axis": 1}, "stack_axis= needs it"),
        ({"saved": "a/{n}", "wanted": "b", "stack": "n", "stack_axis": -1}, "counted from 0"),
        ({"saved": "a", "wanted": "b", "reshape": ((1, 0),)}, "count dimensions"),
        ({"saved": "a", "wanted": "b", "transpose": (0, 0)}, "each of 2 dimensions once"),
        ({"saved": "a", "wanted": "b", "reshape": ((0, 1),), "transpose": (0,)}, "each of 2"),
    ],
)
def test_impossible_rules(arguments, told):
    with pytest.raises(ValueError, match=told):
        Rule(**arguments)


@pytest.mark.parametrize(
    "entry",
    [
        {"axis": -1},
        {"axis": "1"},
        {"sizes": [-2, 14]},
        {"sizes": ["a", 4]},
        {"sizes": 3},
        {"reshape": 5},
        {"reshape": [[0, "x"], 2]},
        {"transpose": 1},
        {"transpose": [True, False]},
        {"saved": []},
        {"wanted": []},
        {"saved": "a", "wanted": ["z", "z"]},
        {"saved": "{1}", "wanted": "{1}"},
    ],
    ids=str,
)
def test_rules_with_impossible_entries_are_refused_when_they_are_made(entry):
    """A negative axis made files whose header did not fit their tensors."""
    arguments: dict[str, Any] = {"saved": ["a", "b"], "wanted": "z", **entry}
    with pytest.raises(ValueError, match="Rule"):
        Rule(**arguments)


@pytest.mark.parametrize(
    ("rules", "path"),
    [
        ([Rule("a.{x}.{y}", "{x}{y}")], "112"),
        ([Rule("b", "c")], "c"),
        ([Rule("b", "z"), Rule("c", "z")], "z"),
    ],
    ids=str,
)
def test_two_tensors_for_one_place_are_told(tmp_path, rules, path):
    names = ("a.1.12", "a.11.2", "b", "c")
    file = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({name: np.ones(2, np.float32) for name in names}, file)
    like = {path: jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(ckpt.StructureMismatch, match=f"{path}: .* 2 tensors"):
        ckpt.load(file, like, rules=rules, unexpected="ignore")


def test_a_number_too_long_for_a_stack_is_a_name_like_others(tmp_path):
    file = tmp_path / "a.safetensors"
    long = f"l.{'9' * 5000}"
    safetensors.numpy.save_file({name: np.ones(2, np.float32) for name in ("l.0", long)}, file)
    like = {"z": jax.ShapeDtypeStruct((1, 2), jnp.float32)}
    loaded = ckpt.load(file, like, rules=[Rule("l.{n}", "z", stack=("n",))], unexpected="ignore")
    assert loaded["z"].shape == (1, 2)
