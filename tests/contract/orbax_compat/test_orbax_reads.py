"""The installed Orbax loads the trees that we wrote, by every route that it has; and works in a directory of our steps:
metrics, names, items of Grain, of files and of values.

One checkpoint of each shape is written once; each route of Orbax v0 and v1 then reads it.
"""

import json
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from tests.support import orbax_routes as routes
from tests.support.orbax import eight_mesh, put
from tests.support.same_bits import bits
from tests.support.trees import abstract, assert_same


def plain_tree():
    return {
        "dense": {
            "w": jnp.arange(32.0).reshape(8, 4),
            "large": np.arange(2.0**17).reshape(512, 256),
        },
        "opt": [
            routes.Moments(jnp.full(3, 2.0), {"c": np.arange(6.0).reshape(2, 3)}),
            None,
            (1, 2.5, True),
        ],
        "ints": {0: jnp.ones(1), 10: jnp.full(1, 10.0), 2: np.arange(2, dtype=np.int16)},
        "empty": {"dict": {}, "list": [], "tuple": (), "none": None},
        "key.with.dots": {"a b": jnp.full(2, 3.0)},
        "slash/ed": {"": np.full(2, 4.0, np.float32)},
        "": jnp.arange(3),
        "uni é中": np.array([True, False]),
        "rbg": jax.random.split(jax.random.key(2, impl="rbg"), 4),
        "unsafe": jax.random.key(2, impl="unsafe_rbg"),
        "zero_size": jnp.zeros((0, 3)),
        "zero_size_numpy": np.zeros((2, 0), np.int8),
        "zero_dim": jnp.float32(7.0),
        "zero_dim_numpy": np.array(-7, np.int32),
        "step": 7,
        "negative": -(2**62),
        "rate": 1.5,
        "nan": float("nan"),
        "flag": False,
    }


def text_tree():
    # Orbax fails over a text whose name has a "~" that is followed by neither 0 nor 1, whoever
    # wrote it: it takes the name for a JSON pointer.
    return {
        "note": "hello",
        "nested": {"text": 'wörld \n " ~ / \\ \x00', "void": ""},
        "s/lash": "slashed",
        "til~0de": {"a~1b": "tilde"},
        "list": ["zero", jnp.ones(2)],
        "a": np.arange(3),
    }


TREES = {"sharded": routes.sharded_tree, "plain": plain_tree, "text": text_tree}


def v0_single_standard(root, step, _item, like):
    with ocp.CheckpointManager(root) as manager:
        return manager.restore(step, args=ocp.args.StandardRestore(like))


# StandardRestore knows no strings, whoever wrote them.
STRINGLESS = {routes.v0_composite_standard, v0_single_standard, routes.v0_standard_checkpointer}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A directory of steps by our Checkpointer: each tree as `state` and as `default`."""
    eight_mesh()
    root = tmp_path_factory.mktemp("ours")
    for item in ("state", "default"):
        for name, make in TREES.items():
            with ckpt.Checkpointer(root / item / name) as checkpointer:
                for step in (3, 4):
                    if item == "state":
                        checkpointer.save(step, make())
                    else:
                        checkpointer.save(step, default=make())
    return root


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("route", routes.named(routes.ROUTES))
def test_state(steps, route, tree):
    if tree == "text" and route in STRINGLESS:
        pytest.skip("StandardRestore takes no strings, whoever wrote them")
    routes.check_route(route, steps / "state" / tree, 4, "state", TREES[tree]())


@pytest.mark.parametrize("tree", ["sharded", "plain"])
@pytest.mark.parametrize("route", routes.named([v0_single_standard, *routes.ROUTES]))
def test_default(steps, route, tree):
    """An item named `default` is a manager's single item."""
    if route in (routes.v0_composite_standard, routes.v0_composite_pytree):
        pytest.skip("Orbax reads `default` without Composite only")
    routes.check_route(route, steps / "default" / tree, 4, "default", TREES[tree]())


@pytest.mark.parametrize("value", [jnp.arange(4.0), np.arange(3), 5, 2.5, True], ids=repr)
def test_bare_leaf(tmp_path, value):
    ckpt.save(tmp_path / "0", value)
    assert_same(routes.v0_pytree_checkpointer(tmp_path, 0, "state", None), value, numpy_as_jax=True)
    assert_same(routes.v0_no_args(tmp_path, 0, "state", None), value, numpy_as_jax=True)
    assert_same(ocp_v1.load(tmp_path / "0"), value)


# What Orbax reads as it is, and what it sees of the carrier of what its arrays cannot be.
CARRIED_AS_BYTES = ["uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"]
NOT_OF_XLA = ["float6_e2m3fn", "float6_e3m2fn"]
NATIVE = [
    "bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
    "uint64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "float8_e3m4", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn",
]  # fmt: skip


def some_of(name):
    """Twelve elements that every dtype holds, not all equal."""
    values = np.array([0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1])
    return values.astype(getattr(ml_dtypes, name, None) or name).reshape(3, 4)


@pytest.fixture(scope="module")
def dtypes(tmp_path_factory):
    root = tmp_path_factory.mktemp("dtypes")
    tree = {name: some_of(name) for name in NATIVE + CARRIED_AS_BYTES}
    jax.config.update("jax_enable_x64", True)  # for Orbax's threads too
    try:
        of_jax = {n: jnp.asarray(array) for n, array in tree.items() if n not in NOT_OF_XLA}
        ckpt.save(root / "0", {"numpy": tree, "jax": of_jax})
        return {
            "v0": routes.v0_no_args(root, 0, "state", None),
            "v1": ocp_v1.load(root / "0"),
            "single": routes.v0_standard_checkpointer(root, 0, "state", None),
        }
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("route", ["v0", "v1", "single"])
@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_each_dtype(dtypes, route, kind):
    got = dtypes[route][kind]
    wrong = [name for name in NATIVE if bits(got[name]) != bits(some_of(name))]
    for name in set(CARRIED_AS_BYTES) - set(NOT_OF_XLA if kind == "jax" else ()):
        wrong += [name] if bits(got[name]) != bits(some_of(name).view(np.uint8)) else []
    assert not wrong


@pytest.fixture(scope="module")
def carriers(tmp_path_factory):
    root = tmp_path_factory.mktemp("carriers")
    generator = np.random.default_rng(5)
    tree = {
        "bytes": b"\x00\xffab",
        "no_bytes": b"",
        "complex": 1.5 - 2.5j,
        "numpy_scalar": np.float32(1.25),
        "numpy_bool": np.True_,
        "numpy_bfloat16": ml_dtypes.bfloat16(3.0),
        "big": 2**200 + 1,
        "minus_big": -(2**64),
        "generator": generator,
        "random_state": np.random.RandomState(6),
        "random": random.Random(7),
        "big_endian": np.arange(3, dtype=">i4"),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }
    ckpt.save(root / "0", tree)
    return {
        "v0": routes.v0_no_args(root, 0, "state", None),
        "v1": ocp_v1.load(root / "0"),
        "pytree": routes.v0_pytree_checkpointer(root, 0, "state", None),
    }


@pytest.mark.parametrize("route", ["v0", "v1", "pytree"])
def test_carriers(carriers, route):
    """What Orbax sees of the leaves that its format lacks."""
    got = carriers[route]
    assert bits(got["bytes"]) == bits(np.frombuffer(b"\x00\xffab", np.uint8))
    assert bits(got["no_bytes"]) == bits(np.zeros(0, np.uint8))
    assert bits(got["complex"]) == bits(np.array(1.5 - 2.5j))
    assert bits(got["numpy_scalar"]) == bits(np.array(1.25, np.float32))
    assert bits(got["numpy_bool"]) == bits(np.array(True))
    assert bits(got["numpy_bfloat16"]) == bits(np.array(3.0, ml_dtypes.bfloat16))
    assert int(got["big"], 0) == 2**200 + 1
    assert int(got["minus_big"], 0) == -(2**64)
    assert json.loads(got["generator"])["state"]["bit_generator"] == "PCG64"
    assert json.loads(got["random_state"])["bit_generator"] == "MT19937"
    assert len(json.loads(got["random"])[1]) == 625
    np.testing.assert_array_equal(got["big_endian"], np.arange(3))
    assert bits(got["fortran"]) == bits(np.arange(6.0).reshape(2, 3))


@pytest.fixture
def with_metrics(tmp_path):
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        for step, loss in ((1, 0.5), (2, 0.125), (3, 0.25)):
            checkpointer.save(
                step, {"a": jnp.full(2, float(step))}, metrics={"loss": loss, "n": step}
            )
    return tmp_path


def test_v0_best_step(with_metrics):
    best = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}
    options = ocp.CheckpointManagerOptions(**best)
    with ocp.CheckpointManager(with_metrics, options=options) as manager:
        assert manager.best_step() == 2
        assert manager.metrics(3) == {"loss": 0.25, "n": 3}
        got = manager.restore(2)
        assert_same(got["state"], {"a": jnp.full(2, 2.0)}, numpy_as_jax=True)
        assert dict(got["metrics"]) == {"loss": 0.125, "n": 2}


def test_v1_metrics(with_metrics):
    checkpointer = ocp_v1.training.Checkpointer(with_metrics)
    assert checkpointer.latest.step == 3
    assert checkpointer.latest.metrics == {"loss": 0.25, "n": 3}
    assert [info.metrics["n"] for info in checkpointer.checkpoints] == [1, 2, 3]
    checkpointer.close()
    assert_same(ocp_v1.load(with_metrics / "3"), {"a": jnp.full(2, 3.0)})


@pytest.mark.parametrize(
    ("prefix", "length", "name"),
    [(None, None, "7"), ("ckpt", None, "ckpt_7"), (None, 4, "0007"), ("x_y", 3, "x_y_007"),
     ("step_", None, "step__7")],
)  # fmt: skip
def test_step_names(tmp_path, prefix, length, name):
    settings = {"step_prefix": prefix, "step_format_fixed_length": length}
    with ckpt.Checkpointer(tmp_path, **settings) as checkpointer:
        checkpointer.save(7, {"a": jnp.ones(2)})
    assert (tmp_path / name / "state" / "_METADATA").is_file()
    options = ocp.CheckpointManagerOptions(**settings)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.latest_step() == 7
        assert_same(manager.restore(7)["state"], {"a": jnp.ones(2)}, numpy_as_jax=True)


def test_orbax_continues_our_directory(tmp_path):
    """A manager of Orbax lists, restores, adds and deletes in our directory, and back."""
    tree = {"a": put(jnp.arange(8.0), "x")}
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        for step in (0, 1):
            checkpointer.save(step, state=jax.tree.map(lambda x, step=step: x + step, tree))
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    args = ocp.args.Composite
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        latest = manager.latest_step()
        got = manager.restore(latest, args=args(state=ocp.args.StandardRestore(abstract(tree))))
        manager.save(
            2, args=args(state=ocp.args.StandardSave(jax.tree.map(lambda x: x + 1, got["state"])))
        )
        manager.wait_until_finished()
        assert sorted(manager.all_steps()) == [1, 2]
    with ckpt.Checkpointer(tmp_path, max_to_keep=2) as checkpointer:
        assert list(checkpointer.all_steps()) == [1, 2]
        restored = checkpointer.restore_latest(state=tree)
        assert restored.step == 2
        assert_same(restored["state"], {"a": put(jnp.arange(8.0) + 2, "x")}, sharding=True)
        for step in (3, 4):  # retention deletes what Orbax wrote, too
            checkpointer.save(step, state=restored["state"])
    with ocp.CheckpointManager(tmp_path) as manager:
        assert sorted(manager.all_steps()) == [3, 4]
        assert_same(manager.restore(3)["state"], restored["state"], numpy_as_jax=True)


def test_orbax_ignores_unfinished_saves(tmp_path):
    """A directory that a killed save left behind is no step to Orbax, and Orbax leaves it alone."""
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, {"a": jnp.ones(2)})
    junk = tmp_path / ".ckpt-tmp.4.host-1-2.abcdefabcdefabcdefabcdef"
    shutil.copytree(tmp_path / "3", junk)
    options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.all_steps() == [3]
        assert manager.latest_step() == 3
        assert_same(manager.restore(3)["state"], {"a": jnp.ones(2)}, numpy_as_jax=True)
    checkpointer = ocp_v1.training.Checkpointer(tmp_path, cleanup_tmp_directories=True)
    assert [info.step for info in checkpointer.checkpoints] == [3]
    checkpointer.close()
    assert list(ocp.utils.checkpoint_steps(tmp_path)) == [3]
    assert junk.is_dir()


def grain_iterators(grain):
    dataset = grain.MapDataset.range(100).shuffle(seed=1).batch(4).to_iter_dataset()
    loader = grain.DataLoader(
        data_source=range(50),
        sampler=grain.samplers.IndexSampler(num_records=50, shuffle=True, seed=0),
    )
    return iter(dataset), iter(loader)


def ahead(iterator, count=3):
    return [np.asarray(next(iterator)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def with_grain(tmp_path_factory):
    """A step with a Dataset iterator and a DataLoader iterator beside the state."""
    grain = pytest.importorskip("grain")
    pytest.importorskip("ckpt_grain")
    root = tmp_path_factory.mktemp("grain")
    data, loader = grain_iterators(grain)
    ahead(data), ahead(loader)
    with ckpt.Checkpointer(root) as checkpointer:
        tree = {"a": put(jnp.arange(8.0), "x")}
        checkpointer.save(0, state=tree, data=data, loader=loader)
    return root, tree, (ahead(data), ahead(loader))


def test_grain_restores_from_ours(with_grain):
    grain = pytest.importorskip("grain")
    root, tree, want = with_grain
    data, loader = grain_iterators(grain)
    args = ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract(tree)),
        data=grain.checkpoint.CheckpointRestore(data),
        loader=grain.checkpoint.CheckpointRestore(loader),
    )
    with ocp.CheckpointManager(root) as manager:
        got = manager.restore(0, args=args)
    assert_same(got["state"], tree, sharding=True)
    assert (ahead(got["data"]), ahead(got["loader"])) == want

    data, loader = grain_iterators(grain)
    like = {"state": abstract(tree), "data": data, "loader": loader}
    got = ocp_v1.load_checkpointables(root / "0", like)
    assert_same(got["state"], tree, sharding=True)
    assert (ahead(data), ahead(loader)) == want


def test_same_description_of_the_tree_as_orbax(tmp_path):
    tree = {
        "nested": {"list": [jnp.ones(2), {"x": np.ones(3)}], "tuple": (1, 2.0)},
        "moments": routes.Moments(jnp.ones(2), None),
        "empty": {"d": {}, "l": [], "t": ()},
        "ints": {1: jnp.ones(1)},
        "k": jax.random.key(0),
        "s": "text",
    }
    ckpt.save(tmp_path / "ours", tree)
    ocp_v1.save(tmp_path / "theirs", tree)
    ours, theirs = (
        json.loads((tmp_path / side / "state" / "_METADATA").read_text())["tree_metadata"]
        for side in ("ours", "theirs")
    )
    for entry in (*ours.values(), *theirs.values()):
        entry["value_metadata"].pop("write_shape", None)
    assert ours == theirs


TREE = {"a": jnp.arange(4.0), "b": {"c": jnp.ones((2, 2))}}
CONFIG = {"layers": [1, None, "ü"], "rate": 0.5}


@pytest.fixture(name="root")
def make_root(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "vocabulary.txt").write_text("a b c")
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        files = ckpt.Files(tmp_path / "source")
        checkpointer.save(7, state=TREE, assets=files, config=ckpt.Json(CONFIG))
    return tmp_path / "run"


@pytest.mark.parametrize("route", routes.named(routes.ROUTES))
def test_the_tree_beside_them(route, root):
    if route not in (routes.v0_no_args, routes.v1_load_checkpointables):
        assert_same(route(root, 7, "state", abstract(TREE)), TREE, sharding=True)
    got = route(root, 7, "state", None)
    assert_same(got, TREE, numpy_as_jax=route.__name__.startswith("v0"))


def test_orbax_reads_the_values(root):
    with ocp.CheckpointManager(root) as manager:
        everything = manager.restore(7)
        assert everything["config"] == CONFIG
        assert everything["assets"]["files"] == {"vocabulary.txt": 5}
        args = ocp.args.Composite(config=ocp.args.JsonRestore())
        assert manager.restore(7, args=args)["config"] == CONFIG
    for target in (None, {"config": None}):
        assert ocp_v1.load_checkpointables(root / "7", target)["config"] == CONFIG


def test_a_directory_that_a_handler_of_someone_wrote_is_files(tmp_path):
    """Orbax's step with an item of an unknown handler, which wrote files of its own."""
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, args=ocp.args.Composite(state=ocp.args.StandardSave(TREE)))
    step = tmp_path / "run" / "0"
    (step / "assets" / "deep").mkdir(parents=True)
    (step / "assets" / "deep" / "stats").write_bytes(b"1 2")
    described = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    described["item_handlers"]["assets"] = "somebody.CallbackHandler"
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(described))
    found = ckpt.load(step)
    assert found["assets"].names() == ["deep/stats"]
    assert found["assets"].read("deep/stats") == b"1 2"
    assert ckpt.inspect(step).items["assets"].files == {"deep/stats": 3}
    copied = found["assets"].copy_to(tmp_path / "out")
    assert (copied / "deep" / "stats").read_bytes() == b"1 2"
