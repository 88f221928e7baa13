"""The installed Orbax loads what we wrote, by every route that it has.

One checkpoint of each shape is written once; each route of Orbax v0 and v1 then reads it with a
target and without. What Orbax cannot hold travels in a carrier: a case states what Orbax sees.
"""

import base64
import json
import random
import shutil
from collections import namedtuple

import absl.logging
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt

# Orbax's own reader warns about every load that is given no sharding; that is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

Moments = namedtuple("Moments", "mu nu")


@pytest.fixture(autouse=True, scope="module")
def _quiet_orbax():
    """Orbax logs a warning for each route that it prefers another one to."""
    before = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.FATAL)
    yield
    absl.logging.set_verbosity(before)


def eight_mesh():
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))


def move(value, sharding):
    """The array on that sharding; through the host, where nothing has to be compiled."""
    return jax.device_put(value if is_key(value) else np.asarray(value), sharding)


def put(value, *spec):
    return move(value, NamedSharding(eight_mesh(), P(*spec)))


# ------------------------------------------------------------------------------------ what is saved


def sharded_tree():
    return {
        "params": {
            "w": put(jnp.arange(32.0).reshape(8, 4), "x", "y"),
            "rows": put(jnp.arange(32, dtype=jnp.int32).reshape(8, 4), ("x", "y")),
            "half": put(jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8), None, "y"),
            "all": put(jnp.arange(16.0)),
            "large": put(jnp.arange(2**18, dtype=jnp.float32).reshape(512, 512), "y", "x"),
        },
        "key": jax.random.key(1),
        "sharded_keys": put(jax.random.split(jax.random.key(3), 8), "x"),
    }


def plain_tree():
    return {
        "dense": {
            "w": jnp.arange(32.0).reshape(8, 4),
            "large": np.arange(2.0**17).reshape(512, 256),
        },
        "opt": [
            Moments(jnp.full(3, 2.0), {"c": np.arange(6.0).reshape(2, 3)}),
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


TREES = {"sharded": sharded_tree, "plain": plain_tree, "text": text_tree}


def as_orbax_gives(tree):
    """The tree in the containers that Orbax restores without a target."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return {name: as_orbax_gives(getattr(tree, name)) for name in tree._fields}
    if isinstance(tree, dict):
        return {str(key): as_orbax_gives(value) for key, value in tree.items()}
    if isinstance(tree, list) or (isinstance(tree, tuple) and tree):
        return [as_orbax_gives(value) for value in tree]
    return tree


# ---------------------------------------------------------------------------------------- comparing


def is_key(value):
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def bits(value):
    if is_key(value):
        return str(jax.random.key_impl(value)), bits(jax.random.key_data(value))
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()


def assert_same(got, want, path="", *, sharding=False, numpy_as_jax=False):
    """Containers, leaf types and every bit are equal; shardings too where asked.

    `numpy_as_jax` allows a numpy array where a jax array was saved: v0 gives that without a target.
    """
    if isinstance(want, dict):
        assert isinstance(got, dict), (path, got)
        assert set(got) == set(want), path
        pairs = [(key, got[key], want[key]) for key in want]
    elif isinstance(want, list | tuple):
        assert type(got) is type(want), (path, type(got), type(want))
        assert len(got) == len(want), path
        pairs = [(index, *pair) for index, pair in enumerate(zip(got, want, strict=True))]
    elif isinstance(want, jax.Array | np.ndarray):
        if not numpy_as_jax:
            assert isinstance(got, jax.Array) == isinstance(want, jax.Array), (path, type(got))
        assert bits(got) == bits(want), path
        if sharding and isinstance(want, jax.Array):
            same = got.sharding.is_equivalent_to(want.sharding, want.ndim)
            assert same, (path, got.sharding, want.sharding)
        return
    else:
        assert type(got) is type(want), (path, type(got), type(want))
        assert got == want or (got != got and want != want), (path, got, want)
        return
    for key, one, other in pairs:
        assert_same(one, other, f"{path}/{key}", sharding=sharding, numpy_as_jax=numpy_as_jax)


def abstract(tree):
    def one(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(one, tree)


# ------------------------------------------------------------------------------------------- routes
# Each takes the directory of steps, the step, the item's name and a target (or None for none).


def restore_args_of(like):
    return ocp.checkpoint_utils.construct_restore_args(like)


def v0_no_args(root, step, item, _like):
    with ocp.CheckpointManager(root) as manager:
        got = manager.restore(step)
    return got if item == "default" else got[item]


def v0_composite_standard(root, step, item, like):
    with ocp.CheckpointManager(root) as manager:
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(like)})
        return manager.restore(step, args=args)[item]


def v0_composite_pytree(root, step, item, like):
    settings = {} if like is None else {"item": like, "restore_args": restore_args_of(like)}
    with ocp.CheckpointManager(root) as manager:
        args = ocp.args.Composite(**{item: ocp.args.PyTreeRestore(**settings)})
        return manager.restore(step, args=args)[item]


def v0_single_standard(root, step, _item, like):
    with ocp.CheckpointManager(root) as manager:
        return manager.restore(step, args=ocp.args.StandardRestore(like))


def v0_latest(root, _step, item, like):
    with ocp.CheckpointManager(root) as manager:
        latest = manager.latest_step()
        return manager.restore(
            latest, args=ocp.args.Composite(**{item: ocp.args.PyTreeRestore(like)})
        )[item]


def v0_standard_checkpointer(root, step, item, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(root / str(step) / item, like)


def v0_pytree_checkpointer(root, step, item, like):
    settings = {} if like is None else {"item": like, "restore_args": restore_args_of(like)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(
            root / str(step) / item, args=ocp.args.PyTreeRestore(**settings)
        )


def v1_load(root, step, _item, like):
    return ocp_v1.load(root / str(step), like)


def v1_load_item(root, step, item, like):
    return ocp_v1.load(root / str(step), like, checkpointable_name=item)


def v1_load_checkpointables(root, step, item, like):
    names = None if like is None else {item: like}
    return ocp_v1.load_checkpointables(root / str(step), names)[item]


def v1_training(root, step, item, like):
    checkpointer = ocp_v1.training.Checkpointer(root)
    try:
        return checkpointer.load(step, like, checkpointable_name=item)
    finally:
        checkpointer.close()


def v1_training_checkpointables(root, step, item, like):
    checkpointer = ocp_v1.training.Checkpointer(root)
    try:
        return checkpointer.load_checkpointables(step, None if like is None else {item: like})[item]
    finally:
        checkpointer.close()


ROUTES = [
    v0_no_args,
    v0_composite_standard,
    v0_composite_pytree,
    v0_standard_checkpointer,
    v0_pytree_checkpointer,
    v1_load,
    v1_load_item,
    v1_load_checkpointables,
    v1_training,
    v1_training_checkpointables,
]
# StandardRestore knows no strings, whoever wrote them.
STRINGLESS = {v0_composite_standard, v0_single_standard, v0_standard_checkpointer}


def named(routes):
    return [pytest.param(route, id=route.__name__) for route in routes]


def check_route(route, root, step, item, tree):
    """One route, with a target on the saved sharding and without a target."""
    if route is not v0_no_args:
        assert_same(route(root, step, item, abstract(tree)), tree, sharding=True)
    got = route(root, step, item, None)
    # Without a target v0 gives numpy for what has no sharding of several devices.
    assert_same(got, as_orbax_gives(tree), numpy_as_jax=route.__name__.startswith("v0"))


# ----------------------------------------------------------------------------- single and composite


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
@pytest.mark.parametrize("route", named(ROUTES))
def test_state(steps, route, tree):
    if tree == "text" and route in STRINGLESS:
        pytest.skip("StandardRestore takes no strings, whoever wrote them")
    check_route(route, steps / "state" / tree, 4, "state", TREES[tree]())


@pytest.mark.parametrize("tree", ["sharded", "plain"])
@pytest.mark.parametrize("route", named([v0_single_standard, *ROUTES]))
def test_default(steps, route, tree):
    """An item named `default` is a manager's single item."""
    if route in (v0_composite_standard, v0_composite_pytree):
        pytest.skip("Orbax reads `default` without Composite only")
    check_route(route, steps / "default" / tree, 4, "default", TREES[tree]())


def test_default_with_strings(steps):
    tree = text_tree()
    root = steps / "default" / "text"
    with ocp.CheckpointManager(root) as manager:
        got = manager.restore(3, args=ocp.args.PyTreeRestore(tree))
        assert_same(got, tree, numpy_as_jax=True)
        assert_same(manager.restore(3), as_orbax_gives(tree), numpy_as_jax=True)
    assert_same(ocp_v1.load(root / "3", abstract(tree)), tree)


def test_latest_of_ours(steps):
    for tree in TREES:
        with ocp.CheckpointManager(steps / "state" / tree) as manager:
            assert manager.all_steps() == [3, 4]
            assert manager.latest_step() == 4
            assert manager.item_metadata(4) is not None


def test_free_functions(tmp_path):
    """`save(path, tree)` is what v1 `load(path)` and `load_checkpointables(path)` read."""
    tree = sharded_tree() | {"note": "x"}
    ckpt.save(tmp_path / "one", tree, metadata={"lr": 0.5})
    assert_same(ocp_v1.load(tmp_path / "one"), tree, sharding=True)
    assert_same(ocp_v1.load(tmp_path / "one", abstract(tree)), tree, sharding=True)
    metadata = ocp_v1.metadata(tmp_path / "one")
    assert metadata.custom_metadata["lr"] == 0.5
    assert metadata.metadata["params"]["w"].shape == (8, 4)
    assert ocp_v1.is_orbax_checkpoint(tmp_path / "one")

    ckpt.save(tmp_path / "many", state=tree, extra={"x": np.arange(3)})
    got = ocp_v1.load_checkpointables(tmp_path / "many")
    assert_same(got["state"], tree, sharding=True)
    assert_same(got["extra"], {"x": np.arange(3)})
    got = ocp_v1.load_checkpointables(tmp_path / "many", {"extra": {"x": np.zeros(3, int)}})
    assert list(got) == ["extra"]


def test_metadata_as_target(tmp_path):
    """What Orbax reads from our metadata is good enough to be the target of its own load."""
    tree = sharded_tree()
    ckpt.save(tmp_path / "c", tree)
    like = ocp_v1.metadata(tmp_path / "c").metadata
    assert_same(ocp_v1.load(tmp_path / "c", like), tree, sharding=True)
    with ocp.StandardCheckpointer() as checkpointer:
        like = checkpointer.metadata(tmp_path / "c" / "state").item_metadata.tree
    assert like["params"]["half"].dtype == jnp.bfloat16
    assert like["params"]["half"].shape == (8, 8)
    assert like["params"]["half"].sharding.to_jax_sharding() == tree["params"]["half"].sharding


def test_items_of_any_name(tmp_path):
    items = {
        "model": {"w": jnp.ones(3)},
        "opt.state": {"m": jnp.zeros(3)},
        "ünï": {"k": np.ones(1)},
    }
    ckpt.save(tmp_path / "0", items=items)
    with ocp.CheckpointManager(tmp_path) as manager:
        got = manager.restore(0)
    for name, tree in items.items():
        assert_same(got[name], tree, numpy_as_jax=True)


@pytest.mark.parametrize("value", [jnp.arange(4.0), np.arange(3), 5, 2.5, True], ids=repr)
def test_bare_leaf(tmp_path, value):
    ckpt.save(tmp_path / "0", value)
    assert_same(v0_pytree_checkpointer(tmp_path, 0, "state", None), value, numpy_as_jax=True)
    assert_same(v0_no_args(tmp_path, 0, "state", None), value, numpy_as_jax=True)
    assert_same(ocp_v1.load(tmp_path / "0"), value)


@pytest.mark.parametrize("value", [{}, [], (), None], ids=repr)
def test_bare_empty(tmp_path, value):
    """An empty tree, which Orbax itself refuses to save, is there for Orbax to load."""
    ckpt.save(tmp_path / "0", value, metadata={})
    assert v0_pytree_checkpointer(tmp_path, 0, "state", None) == value


@pytest.mark.parametrize(
    "options",
    [
        ckpt.Options(compression="zstd"),
        ckpt.Options(compression={"*b*": "zstd:3", "**": "blosc:zstd"}),
        ckpt.Options(chunk_bytes=4096),
    ],
)
def test_other_options(tmp_path, options):
    tree = sharded_tree() | plain_tree()
    ckpt.save(tmp_path / "0", tree, options=options)
    for route in (v0_composite_pytree, v1_load):
        assert_same(route(tmp_path, 0, "state", abstract(tree)), tree, sharding=True)


def test_to_another_mesh(tmp_path):
    tree = sharded_tree()
    ckpt.save(tmp_path / "0", tree)
    mesh = Mesh(np.array(jax.devices()[:2]), ("z",))
    want = jax.tree.map(
        lambda leaf: move(leaf, NamedSharding(mesh, P("z") if leaf.ndim else P())), tree
    )
    for route in (v0_composite_standard, v0_composite_pytree, v1_load):
        assert_same(route(tmp_path, 0, "state", abstract(want)), want, sharding=True)


# ------------------------------------------------------------------------------------------- dtypes

# What Orbax reads as it is, and what it sees of the carrier of what its arrays cannot be.
CARRIED_AS_BYTES = ["uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"]
NOT_OF_XLA = ["float6_e2m3fn", "float6_e3m2fn"]
NATIVE = [
    "bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
    "uint64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "float8_e3m4", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn",
]  # fmt: skip


def dtype_named(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def some_of(name):
    """Twelve elements that every dtype holds, not all alike."""
    values = np.array([0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1]).astype(dtype_named(name))
    return values.reshape(3, 4)


@pytest.fixture(scope="module")
def dtypes(tmp_path_factory):
    root = tmp_path_factory.mktemp("dtypes")
    tree = {name: some_of(name) for name in NATIVE + CARRIED_AS_BYTES}
    jax.config.update("jax_enable_x64", True)  # for Orbax's threads too
    try:
        of_jax = {n: jnp.asarray(array) for n, array in tree.items() if n not in NOT_OF_XLA}
        ckpt.save(root / "0", {"numpy": tree, "jax": of_jax})
        return {
            "v0": v0_no_args(root, 0, "state", None),
            "v1": ocp_v1.load(root / "0"),
            "single": v0_standard_checkpointer(root, 0, "state", None),
        }
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("route", ["v0", "v1", "single"])
@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_native_dtypes(dtypes, route, kind):
    got = dtypes[route][kind]
    wrong = [name for name in NATIVE if bits(got[name]) != bits(some_of(name))]
    assert not wrong


@pytest.mark.parametrize("kind", ["numpy", "jax"])
@pytest.mark.parametrize("route", ["v0", "v1", "single"])
def test_carried_dtypes_are_bytes_to_orbax(dtypes, route, kind):
    got = dtypes[route][kind]
    for name in set(CARRIED_AS_BYTES) - set(NOT_OF_XLA if kind == "jax" else ()):
        assert bits(got[name]) == bits(some_of(name).view(np.uint8)), name


# ----------------------------------------------------------------------------------------- carriers


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
        "v0": v0_no_args(root, 0, "state", None),
        "v1": ocp_v1.load(root / "0"),
        "pytree": v0_pytree_checkpointer(root, 0, "state", None),
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


# ------------------------------------------------------------------------------------------ metrics


def best_options(**settings):
    return ocp.CheckpointManagerOptions(
        best_fn=lambda metrics: metrics["loss"], best_mode="min", **settings
    )


@pytest.fixture
def with_metrics(tmp_path):
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        for step, loss in ((1, 0.5), (2, 0.125), (3, 0.25)):
            checkpointer.save(
                step, {"a": jnp.full(2, float(step))}, metrics={"loss": loss, "n": step}
            )
    return tmp_path


def test_v0_best_step(with_metrics):
    with ocp.CheckpointManager(with_metrics, options=best_options()) as manager:
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


def test_v0_keeps_the_best_of_ours(with_metrics):
    """Orbax's retention counts our steps by our metrics."""
    with ocp.CheckpointManager(with_metrics, options=best_options(max_to_keep=2)) as manager:
        manager.save(4, args=ocp.args.Composite(state=ocp.args.StandardSave({"a": jnp.ones(2)})),
                     metrics={"loss": 0.375, "n": 4})  # fmt: skip
        manager.wait_until_finished()
        assert set(manager.all_steps()) == {2, 3}


# ----------------------------------------------------------------------------------- names of steps


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


# ------------------------------------------------------------------------------------- side by side


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
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert list(checkpointer.all_steps()) == [1, 2]
        restored = checkpointer.restore_latest(state=tree)
        assert restored.step == 2
        assert_same(restored["state"], {"a": put(jnp.arange(8.0) + 2, "x")}, sharding=True)
        checkpointer.save(3, state=restored["state"])
    with ocp.CheckpointManager(tmp_path) as manager:
        assert sorted(manager.all_steps()) == [1, 2, 3]
        assert_same(manager.restore(3)["state"], restored["state"], numpy_as_jax=True)


def test_v1_continues_our_directory(tmp_path):
    tree = {"a": jnp.arange(4.0)}
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, tree, metrics={"loss": 1.0})
    checkpointer = ocp_v1.training.Checkpointer(tmp_path)
    assert_same(checkpointer.load(), tree)
    checkpointer.save(1, {"a": jnp.ones(4)}, metrics={"loss": 2.0})
    checkpointer.close()
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert list(checkpointer.all_steps()) == [0, 1]
        assert_same(checkpointer.load(1), {"a": jnp.ones(4)})
        assert checkpointer.metrics(1) == {"loss": 2.0}


def test_orbax_ignores_unfinished_saves(tmp_path):
    """A directory that a killed save left behind is no step to Orbax, and Orbax leaves it alone."""
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, {"a": jnp.ones(2)})
    junk = tmp_path / ".ckpt-tmp.4.host-1-2.abcdef"
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


def test_the_temporary_directory_of_a_running_save_is_hidden(tmp_path):
    """While a save is running there is nothing that Orbax would take for a step."""
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": jnp.ones(2)})
        checkpointer.wait_until_finished()
        for step in range(2, 6):
            checkpointer.save(step, {"a": jnp.ones((512, 512))})
            names = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
            assert names <= {str(number) for number in range(1, step + 1)}


# -------------------------------------------------------------------------------------------- Grain


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


def test_grain_beside_the_state_without_args(with_grain):
    """No route stumbles over the data items; the state is there."""
    root, tree, _ = with_grain
    with ocp.CheckpointManager(root) as manager:
        got = manager.restore(0)
    assert set(got.keys()) == {"state", "data", "loader"}
    assert_same(got["state"], tree, numpy_as_jax=True)
    assert_same(ocp_v1.load(root / "0"), tree, sharding=True)
    got = ocp_v1.load_checkpointables(root / "0")
    assert set(got) == {"state", "data", "loader"}
    assert_same(got["state"], tree, sharding=True)


@pytest.mark.parametrize("route", named([r for r in ROUTES if r is not v0_no_args]))
def test_state_beside_grain(with_grain, route):
    root, tree, _ = with_grain
    check_route(route, root, 0, "state", tree)


def test_grain_restores_from_ours_through_v0(with_grain):
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


def test_grain_restores_from_ours_through_v1(with_grain):
    grain = pytest.importorskip("grain")
    root, tree, want = with_grain
    data, loader = grain_iterators(grain)
    like = {"state": abstract(tree), "data": data, "loader": loader}
    got = ocp_v1.load_checkpointables(root / "0", like)
    assert_same(got["state"], tree, sharding=True)
    assert (ahead(data), ahead(loader)) == want


# -------------------------------------------------------------------------------------- on the disk


def test_the_directory_is_as_documented(tmp_path):
    """Names that other tools and people rely on."""
    ckpt.save(tmp_path / "c", sharded_tree() | {"note": "x"})
    for name in (
        "_CHECKPOINT_METADATA", "commit_success.txt", "ckpt.json", "state/_METADATA",
        "state/_sharding", "state/_strings.json", "state/array_metadatas/process_0",
        "state/manifest.ocdbt", "state/checksums/process_0",
    ):  # fmt: skip
        assert (tmp_path / "c" / name).is_file(), name
    directories = sorted(path.name for path in (tmp_path / "c").iterdir() if path.is_dir())
    assert directories == ["state"], "another directory at this level would be an item to Orbax"
    metadata = json.loads((tmp_path / "c" / "state" / "_METADATA").read_text())
    assert metadata["store_array_data_equal_to_fill_value"] is True
    assert metadata["use_ocdbt"] is True
    assert metadata["use_zarr3"] is True
    step = json.loads((tmp_path / "c" / "_CHECKPOINT_METADATA").read_text())
    assert step["item_handlers"]["state"].startswith("orbax.checkpoint._src.handlers.")
    names = json.loads((tmp_path / "c" / "state" / "_sharding").read_text())
    assert base64.urlsafe_b64encode(b"params.w").decode() in names


def test_same_description_of_the_tree_as_orbax(tmp_path):
    """`_METADATA` describes a tree exactly as Orbax itself would."""
    tree = {
        "nested": {"list": [jnp.ones(2), {"x": np.ones(3)}], "tuple": (1, 2.0)},
        "moments": Moments(jnp.ones(2), None),
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


def test_orbax_deletes_ours(tmp_path):
    ckpt.save(tmp_path / "c", {"a": jnp.ones(2)})
    ocp_v1.delete(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_orbax_reads_a_copied_step(tmp_path):
    """Nothing in a checkpoint depends on where it stands."""
    tree = sharded_tree()
    ckpt.save(tmp_path / "a" / "3", tree)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    assert_same(ocp_v1.load(tmp_path / "b" / "3"), tree, sharding=True)
    assert_same(ckpt.load(tmp_path / "b" / "3"), tree, sharding=True)


def test_saved_asynchronously(tmp_path):
    tree = sharded_tree()
    ckpt.save_async(tmp_path / "0", tree).result()
    assert_same(v0_composite_standard(tmp_path, 0, "state", abstract(tree)), tree, sharding=True)
