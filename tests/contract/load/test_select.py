"""Parts of leaves: the values and the shape are those of numpy's index, from any checkpoint, onto any devices."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core import Options
from tests.contract.load.test_rules import shardings
from tests.contract.load.test_rules_of_checkpoints import WRITERS
from tests.support.same_bits import bits
from tests.support.stores import make_s3_url, make_server, url_of_kind  # noqa: F401 (fixtures)

TABLE = np.arange(32 * 8 * 16, dtype=np.float32).reshape(32, 8, 16)
INDICES = [
    *(np.s_[:10], np.s_[8:16], np.s_[3], np.s_[-1], np.s_[5:2], np.s_[:1000]),
    *(np.s_[...], np.s_[..., 2], np.s_[:, -4:], np.s_[2:30, 1:, :5], np.s_[4, ..., 1:]),
    *(np.s_[np.int64(2), 3, 4], np.s_[:, 5], np.s_[24:, ..., 8:16], np.s_[::1]),
]


def as_file(path: Any, tree: Any, mesh: Any) -> None:
    path.mkdir()
    safetensors.numpy.save_file(tree, path / "model.safetensors")


def saved(tmp_path: Any, mesh: Any, writer: str) -> Any:
    tree = {"table": TABLE, "other": np.ones(3, np.float32)}
    {**WRITERS, "file": as_file}[writer](tmp_path / "a", tree, mesh)
    return tmp_path / "a"


@pytest.mark.parametrize("writer", [*WRITERS, "file"])
def test_as_numpy_selects(tmp_path, mesh, writer):
    path = saved(tmp_path, mesh, writer)
    for index in INDICES:
        found = ckpt.load(path, select={"tab*": index}, as_numpy=True)
        assert bits(found["table"]) == bits(np.array(TABLE[index])), index
        assert isinstance(found["table"], np.ndarray) and found["other"].tolist() == [1, 1, 1]
    placed = ckpt.load(path, select={"tab*": np.s_[5, :3]}, only="table")["table"]
    assert bits(placed) == bits(np.array(TABLE[5, :3]))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", ["replicated", "first", "last", "middle"])
@pytest.mark.parametrize("writer", ["chunks", "zstd", "orbax", "file"])
def test_each_device_has_its_part_of_the_selection(tmp_path, mesh, writer, kind, dtype):
    path = saved(tmp_path, mesh, writer)
    for index in (np.s_[8:24], np.s_[:8, :, :8], np.s_[5], np.s_[..., 3], np.s_[:, 1:5, :8]):
        expected = TABLE[index].astype(dtype)
        sharding = shardings(mesh, expected.shape, kind)
        wanted = jax.ShapeDtypeStruct(expected.shape, dtype, sharding=sharding)
        like = {"rows": wanted}
        more: Any = {"rename": {"table": "rows"}, "unexpected": "ignore", "cast": True}
        found = ckpt.load_async(path, like, select={"table": index}, **more).result()["rows"]
        assert found.sharding == sharding
        assert bits(found) == bits(expected), index


@pytest.mark.parametrize("kind", ["memory", "gs", "s3"])
def test_from_a_bucket(request, kind):
    path = url_of_kind(request, kind)
    with ckpt.Checkpointer(path) as checkpointer:
        checkpointer.save(3, model={"table": TABLE}, note={"text": "x"})
        checkpointer.wait_until_finished()
        found = checkpointer.load(3, select={"model/table": np.s_[:5, 2]}, item="model")
        assert (found["table"] == TABLE[:5, 2]).all()


def test_it_stays_where_it_was(tmp_path, mesh):
    """Without a target, in the dimensions that are taken whole."""
    spread = NamedSharding(mesh, PartitionSpec("data", "model"))
    ckpt.save(tmp_path / "a", {"w": jax.device_put(TABLE, spread)})
    found = ckpt.load(tmp_path / "a", select={"w": np.s_[:10]})["w"]
    assert found.sharding.spec == PartitionSpec(None, "model", None)
    found = ckpt.load(tmp_path / "a", select={"w": np.s_[:, 3]})["w"]
    assert found.sharding == NamedSharding(mesh, PartitionSpec("data", None))
    chosen = NamedSharding(mesh, PartitionSpec(None, "data"))
    found = ckpt.load(tmp_path / "a", select={"w": np.s_[1]}, sharding=chosen)["w"]
    assert found.sharding == chosen and (found == TABLE[1]).all()


def test_arrays_of_other_dtypes(tmp_path):
    values = {
        "ints": np.arange(8, dtype=">i4"),
        "bits": np.arange(8).astype(ml_dtypes.uint4),
        "small": jnp.arange(8, dtype=jnp.float8_e4m3fn),
    }
    ckpt.save(tmp_path / "a", values)
    found = ckpt.load(tmp_path / "a", select={"**": np.s_[2:6]})
    for name, value in values.items():
        expected = np.asarray(value)[2:6]
        assert found[name].dtype == expected.dtype and bits(found[name]) == bits(expected)


@pytest.mark.parametrize(
    ("select", "told"),
    [
        (
            {"w": 20},
            "w: saved float32[3,4]; select=: index 20 is out of bounds for axis 0 with size 3",
        ),
        ({"w": np.s_[:, -5]}, "select=: index -5 is out of bounds for axis 1 with size 4"),
        ({"w": (0, 0, 0)}, "select=: too many indices for array"),
        ({"w": 0, "*": 0}, "select=: 'w' and '*' take parts of it"),
        ({"key": 0}, "saved key<threefry2x32>[2]; select=: only arrays have parts"),
        ({"step": 0}, "saved int; select=: only arrays have parts"),
        ({"name": 0}, "saved str; select=: only arrays have parts"),
    ],
)
def test_parts_that_are_not_there(tmp_path, select, told):
    tree = {"w": np.zeros((3, 4), np.float32), "step": 1, "name": "x"}
    ckpt.save(tmp_path / "a", tree | {"key": jax.random.split(jax.random.key(0))})
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.load(tmp_path / "a", select=select)
    assert told in str(caught.value)


def test_a_target_has_the_shape_of_the_part(tmp_path):
    ckpt.save(tmp_path / "a", {"w": TABLE})
    with pytest.raises(ckpt.StructureMismatch, match=r"saved float32\[10,8,16\], wanted"):
        ckpt.load(tmp_path / "a", {"w": TABLE}, select={"w": np.s_[:10]})
    with pytest.raises(ckpt.StructureMismatch, match=r"select= of load takes a part"):
        ckpt.load(tmp_path / "a", {"w": TABLE[:10]})


@pytest.mark.parametrize("select", [{"embed/**": 0}, {"w": 0, "**/x": 1}, {"other/v": 0}], ids=str)
def test_a_pattern_without_a_leaf(tmp_path, select):
    ckpt.save(tmp_path / "a", items={"model": {"w": TABLE}, "other": {"v": TABLE}})
    with pytest.raises(ckpt.CheckpointNotFound, match=r"select=.* matches no leaf"):
        ckpt.load(tmp_path / "a", item="model", select=select)


@pytest.mark.parametrize(
    "index", [None, True, [0, 1], 1.5, np.arange(2), np.s_[..., ...], np.s_[:1.5], "0"], ids=str
)
def test_what_is_no_index(tmp_path, index):
    with pytest.raises(TypeError, match="whole numbers, slices and at most one"):
        ckpt.load(tmp_path, select={"w": index})


@pytest.mark.parametrize("select", ["w", [0], {1: 0}, 3])
def test_what_is_no_dict_of_patterns(tmp_path, select):
    with pytest.raises(TypeError, match="select= is a dict from patterns"):
        ckpt.load(tmp_path, select=select)


@pytest.mark.parametrize("step", [-1, 0, 2])
def test_a_slice_has_no_step(tmp_path, step):
    with pytest.raises(ValueError, match="select= takes no steps"):
        ckpt.load(tmp_path, select={"w": np.s_[::step]})
    with pytest.raises(TypeError, match="select= is an argument of load"):
        ckpt.restore(tmp_path, select={"w": 0}, options=Options())


def test_what_only_leaves_out_is_not_indexed(tmp_path):
    ckpt.save(tmp_path / "a", {"params": {"w": TABLE}, "step": 1})
    found = ckpt.load(tmp_path / "a", only="params/**", select={"**": 2})
    assert (found["params"]["w"] == TABLE[2]).all()
    with pytest.raises(ckpt.CheckpointNotFound, match="'parms' matches no leaf"):
        ckpt.load(tmp_path / "a", {"params": {"w": TABLE[2]}, "step": 1}, select={"parms": 2})


def test_a_rule_that_renames_takes_any_leaf(tmp_path):
    ckpt.save(tmp_path / "a", {"up": TABLE, "at": 7, "key": jax.random.key(1), "text": "x"})
    like = {"down": TABLE, "step": 0, "rng": jax.random.key(0), "note": ""}
    names = {"up": "down", "at": "step", "key": "rng", "text": "note"}
    found = ckpt.load(tmp_path / "a", like, rules=[ckpt.Rule(*pair) for pair in names.items()])
    assert (found["step"], found["note"]) == (7, "x") and (found["down"] == TABLE).all()
    assert (jax.random.key_data(found["rng"]) == jax.random.key_data(jax.random.key(1))).all()
