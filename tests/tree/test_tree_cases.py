"""Round trips of every kind of leaf, container, key and sharding; the rest is refused."""

import collections
import copy
import dataclasses
import decimal
import functools
import math
import random
import types
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ckpt_core as ckpt

QUICK = ckpt.Options(durable=False)


class Moments(NamedTuple):
    mu: Any
    nu: Any


class Empty(NamedTuple):
    pass


@dataclasses.dataclass
class Plain:
    """A dataclass that jax knows nothing of."""

    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    data: Any
    more: Any
    static: str = dataclasses.field(default="s", metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Keyless:
    """A registered node whose children have positions only."""

    def __init__(self, one, two):
        self.one, self.two = one, two

    def tree_flatten(self):
        return (self.one, self.two), "aux"

    @classmethod
    def tree_unflatten(cls, _aux, children):
        return cls(*children)


@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    """A registered node whose children have names."""

    def __init__(self, one, two):
        self.one, self.two = one, two

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("one"), self.one), (key("two"), self.two)), None

    @classmethod
    def tree_unflatten(cls, _aux, children):
        return cls(*children)


# ---------------------------------------------------------------------------------------- comparing


def is_key(value):
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def bits(value):
    if is_key(value):
        return str(jax.random.key_impl(value)), value.shape, bits(jax.random.key_data(value))
    array = np.asarray(value)
    return array.dtype.str, str(array.dtype), array.shape, array.tobytes()


def fields_of(value):
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return vars(value)


def assert_same(got, want, path="", *, sharding=False):
    """Types of containers and leaves, and every bit; shardings too where asked."""
    if isinstance(want, jax.Array):
        assert isinstance(got, jax.Array), (path, type(got))
        assert bits(got) == bits(want), path
        if sharding:
            same = got.sharding.is_equivalent_to(want.sharding, want.ndim)
            assert same, (path, got.sharding, want.sharding)
        return
    assert type(got) is type(want), (path, type(got), type(want))
    if isinstance(want, dict):
        assert {*got} == {*want}, path
        for key in want:
            assert_same(got[key], want[key], f"{path}/{key}", sharding=sharding)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), path
        for index, pair in enumerate(zip(got, want, strict=True)):
            assert_same(*pair, f"{path}/{index}", sharding=sharding)
    elif isinstance(want, Plain | Registered | Keyless | Keyed):
        assert_same(fields_of(got), fields_of(want), path, sharding=sharding)
    elif isinstance(want, np.ndarray | np.generic):
        assert bits(got) == bits(want), path
    elif isinstance(want, np.random.Generator):
        assert_same_state(got.bit_generator.state, want.bit_generator.state)
    elif isinstance(want, np.random.RandomState):
        assert_same_state(got.get_state(legacy=False), want.get_state(legacy=False))
    elif isinstance(want, random.Random):
        assert got.getstate() == want.getstate(), path
    elif isinstance(want, float | complex):
        assert bits(np.array(got)) == bits(np.array(want)), path
    else:
        assert got == want, path


def assert_same_state(got, want):
    np.testing.assert_equal(got, want)


def round_trip(tmp_path, tree, **load):
    ckpt.save(tmp_path / "c", tree, options=QUICK)
    report = ckpt.verify(tmp_path / "c")
    assert report.ok, report.problems
    return ckpt.load(tmp_path / "c", **load)


def with_shardings(tree):
    def one(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(one, tree)


def without_shardings(tree):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, tree
    )


# ------------------------------------------------------------------------------------------- dtypes

ML_DTYPES = [
    "int2", "uint2", "int4", "uint4", "bfloat16", "float4_e2m1fn", "float6_e2m3fn",
    "float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
NOT_OF_XLA = ["float6_e2m3fn", "float6_e3m2fn"]  # jax names them, its compiler lacks them
# Numpy has these from ml_dtypes, jax cannot hold them: they may be refused, by name.
NOT_OF_JAX = ["int1", "uint1", "complex32", "bcomplex32"]
NUMPY_DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
EVERY_DTYPE = [*ML_DTYPES, *NUMPY_DTYPES]


def test_the_list_of_dtypes_is_whole():
    """A dtype that a new jax or ml_dtypes brings must not be forgotten here."""
    known = {
        name
        for name, value in vars(ml_dtypes).items()
        if isinstance(value, type) and issubclass(value, np.generic)
    }
    assert known - set(NOT_OF_JAX) == set(ML_DTYPES)
    assert {str(np.dtype(code)) for code in "?bhilBHILefdFD"} - set(NUMPY_DTYPES) == set()


def every_bit_pattern(name, shape=(16, 16)):
    """All bit patterns of a narrow dtype, NaNs and subnormals included; random bits of a wide."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    count = math.prod(shape)
    if name == "bool":
        return (np.arange(count) % 3 == 0).reshape(shape)
    widths = {"int2": 4, "uint2": 4, "int4": 16, "uint4": 16, "float4_e2m1fn": 16}
    widths |= {"float6_e2m3fn": 64, "float6_e3m2fn": 64}
    if dtype.itemsize == 1:
        patterns = (np.arange(count) % widths.get(name, 256)).astype(np.uint8)
        if name in ("int2", "int4"):  # stored sign-extended
            return patterns.astype(np.int8).astype(dtype).reshape(shape)
        return patterns.view(dtype).reshape(shape)
    random_bytes = np.random.default_rng(0).bytes(count * dtype.itemsize)
    return np.frombuffer(random_bytes, dtype).reshape(shape)


def to_jax(array):
    """The array in jax with the same bits; None where jax lacks the dtype."""
    return None if str(array.dtype) in NOT_OF_XLA else jnp.asarray(array)


@pytest.mark.parametrize("shape", [(16, 16), (), (0, 3), (1, 257)], ids=str)
def test_every_dtype(tmp_path, shape):
    with jax.enable_x64(True):
        arrays = {name: np.array(every_bit_pattern(name, shape)) for name in EVERY_DTYPE}
        in_jax = {name: to_jax(array) for name, array in arrays.items()}
        in_jax = {name: array for name, array in in_jax.items() if array is not None}
        tree = {"numpy": arrays, "jax": in_jax}
        assert_same(round_trip(tmp_path, tree), tree)
        assert_same(ckpt.load(tmp_path / "c", tree), tree)
        assert_same(ckpt.load(tmp_path / "c", without_shardings(tree)), tree)


def test_every_dtype_large_and_sharded(tmp_path, mesh):
    """Above the size where another way of writing begins."""
    with jax.enable_x64(True):
        arrays = {name: np.array(every_bit_pattern(name, (1024, 512))) for name in EVERY_DTYPE}
        sharding = NamedSharding(mesh, P("data", "model"))
        of_jax = {name: array for name, array in arrays.items() if name not in NOT_OF_XLA}
        tree = {"numpy": arrays, "jax": jax.device_put(of_jax, sharding)}
        assert_same(round_trip(tmp_path, tree), tree, sharding=True)


@pytest.mark.parametrize("name", NOT_OF_JAX)
def test_dtypes_that_jax_lacks(tmp_path, name):
    if not hasattr(ml_dtypes, name):
        pytest.skip("ml_dtypes has no such dtype")
    tree = {"a": np.array([0, 1, 0], getattr(ml_dtypes, name))}
    try:
        got = round_trip(tmp_path, tree)
    except ckpt.UnsupportedLeaf as error:
        assert name in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert_same(got, tree)


def test_wide_dtypes_are_not_narrowed(tmp_path):
    """Saved with x64 and loaded without: the same values, or an error; never float32 in silence."""
    with jax.enable_x64(True):
        tree = {"d": jnp.array([1e300, 1 / 3]), "i": jnp.array([2**62 + 1]), "n": np.float64(1e300)}
        ckpt.save(tmp_path / "c", tree)
    try:
        got = ckpt.load(tmp_path / "c")
    except ckpt.CheckpointError as error:
        assert "x64" in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert_same(got, tree)
    got = ckpt.load(tmp_path / "c", as_numpy=True)
    assert bits(got["d"]) == bits(tree["d"])


# ---------------------------------------------------------------------------------------- PRNG keys


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys(tmp_path, mesh, impl):
    key = jax.random.key(7, impl=impl)
    tree = {
        "one": key,
        "batch": jax.random.split(key, 6).reshape(2, 3),
        "none": jax.random.split(key, 4)[:0],
        "sharded": jax.device_put(jax.random.split(key, 8), NamedSharding(mesh, P("data"))),
        "raw": jax.random.key_data(key),
    }
    got = round_trip(tmp_path, tree)
    assert_same(got, tree, sharding=True)
    assert bits(jax.random.normal(got["one"], 3)) == bits(jax.random.normal(key, 3))
    assert_same(ckpt.load(tmp_path / "c", with_shardings(tree)), tree, sharding=True)
    moved = jax.device_put(tree["sharded"], NamedSharding(mesh, P("model")))
    got = ckpt.load(tmp_path / "c", with_shardings(tree | {"sharded": moved}))
    assert_same(got, tree | {"sharded": moved}, sharding=True)


def test_keys_of_another_implementation_are_refused(tmp_path):
    ckpt.save(tmp_path / "c", {"k": jax.random.key(0, impl="rbg")})
    with pytest.raises(ckpt.StructureMismatch, match="k"):
        ckpt.load(tmp_path / "c", {"k": jax.random.key(0)})
    with pytest.raises(ckpt.StructureMismatch, match="k"):
        ckpt.load(tmp_path / "c", {"k": jax.random.key_data(jax.random.key(0, impl="rbg"))})


# --------------------------------------------------------------------------------- numpy and Python


def test_numpy(tmp_path):
    base = np.arange(24.0).reshape(4, 6)
    read_only = base.copy()
    read_only.flags.writeable = False
    tree = {
        "scalar": np.float32(1.5),
        "scalar_bool": np.True_,
        "scalar_bfloat16": ml_dtypes.bfloat16(3),
        "scalar_complex": np.complex64(1 - 2j),
        "scalar_wide": np.uint64(2**64 - 1),
        "zero_dim": np.array(1.5),
        "strided": base[::2, ::3],
        "reversed": base[::-1],
        "fortran": np.asfortranarray(base),
        "transposed": base.T,
        "broadcast": np.broadcast_to(np.float32(2), (3, 5)),
        "read_only": read_only,
        "many_dims": np.arange(2**12).reshape((2,) * 12),
    }
    assert_same(round_trip(tmp_path, tree), tree)
    assert_same(ckpt.load(tmp_path / "c", tree), tree)


def test_big_endian_values(tmp_path):
    tree = {"a": np.arange(6, dtype=">i4").reshape(2, 3), "b": np.array([1.5], ">f8")}
    got = round_trip(tmp_path, tree)
    for name, array in tree.items():
        np.testing.assert_array_equal(got[name], array)
        assert got[name].dtype == array.dtype


def test_memory_map_is_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "file", np.float32, "w+", shape=(4, 4))
    mapped[:] = 3
    np.testing.assert_array_equal(round_trip(tmp_path, {"m": mapped})["m"], np.full((4, 4), 3))


def test_what_was_loaded_is_the_callers(tmp_path):
    """Loaded numpy arrays can be written, and writing them changes no file."""
    ckpt.save(tmp_path / "c", {"a": np.zeros(3), "b": np.zeros(10**6)})
    got = ckpt.load(tmp_path / "c")
    got["a"][0] = 5
    got["b"][0] = 5
    assert ckpt.verify(tmp_path / "c").ok
    assert ckpt.load(tmp_path / "c")["b"][0] == 0


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_numpy_generators(tmp_path, kind):
    generator = np.random.Generator(getattr(np.random, kind)(3))
    generator.standard_normal(5)
    generator.integers(10, dtype=np.int32)  # leaves half of a word behind
    want = copy.deepcopy(generator)
    got = round_trip(tmp_path, {"g": generator})["g"]
    assert_same(got, want)
    assert got.standard_normal(7).tolist() == want.standard_normal(7).tolist()
    got = ckpt.load(tmp_path / "c", {"g": np.random.Generator(getattr(np.random, kind)(0))})["g"]
    assert got.integers(10**6) == copy.deepcopy(generator).integers(10**6)


def test_other_random_states(tmp_path):
    state, python = np.random.RandomState(5), random.Random(6)
    state.normal(), python.gauss(0, 1)  # both keep a second normal number back
    got = round_trip(tmp_path, {"numpy": state, "python": python})
    assert got["numpy"].normal() == state.normal()
    assert got["python"].gauss(0, 1) == python.gauss(0, 1)
    assert got["python"].random() == python.random()


def test_python_numbers(tmp_path):
    tree = {
        "ints": [0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64, -(2**63) - 1],
        "huge": [10**400, -(10**400), 3**20_000],
        "floats": [0.0, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan],
        "bools": [True, False],
        "complex": [1 - 2j, complex(math.nan, math.inf), complex(-0.0, 0.0)],
    }
    assert_same(round_trip(tmp_path, tree), tree)
    assert_same(ckpt.load(tmp_path / "c", tree), tree)


def test_text_and_bytes(tmp_path):
    tree = {
        "text": [
            "",
            "a",
            "é中\U0001f600",
            "line\nline\r\n",
            "\x00\x1f",
            '"\\/~',
            "\ud800",
            "x" * 10**5,
        ],
        "bytes": [b"", b"\x00", bytes(range(256)), b"y" * 10**6],
    }
    assert_same(round_trip(tmp_path, tree), tree)
    assert_same(ckpt.load(tmp_path / "c", tree), tree)


# --------------------------------------------------------------------------------------- containers


def container_tree():
    return {
        "dict": {"b": jnp.ones(1), "a": 2},
        "ints": {3: jnp.ones(1), -1: 2, 0: {5: "x"}},
        "list": [jnp.ones(1), [2, [3]], ()],
        "tuple": (1, (2, (3,)), []),
        "named": Moments(jnp.ones(2), Moments(None, {"x": 1})),
        "plain": Plain(jnp.ones(2), [1]),
        "none": None,
        "empty": {"dict": {}, "list": [], "tuple": (), "named": Empty(), "nested": [[], {"x": {}}]},
        "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
        "optional": Moments(None, None),
    }


def test_containers(tmp_path):
    tree = container_tree()
    assert_same(round_trip(tmp_path, tree), tree)
    assert_same(ckpt.load(tmp_path / "c", tree), tree)


def test_the_order_of_keys_is_kept(tmp_path):
    got = round_trip(tmp_path, container_tree())
    assert [*got] == [*container_tree()]
    assert [*got["ints"]] == [3, -1, 0]
    assert [*got["ordered"]] == ["z", "a"]


def test_custom_nodes(tmp_path):
    tree = {
        "registered": Registered(jnp.ones(2), {"x": 1}, static="t"),
        "keyless": Keyless(jnp.ones(2), 3),
        "keyed": Keyed(jnp.zeros(2), [1, 2]),
    }
    got = round_trip(tmp_path, tree)
    assert [bits(x) for x in jax.tree.leaves(got)] == [bits(x) for x in jax.tree.leaves(tree)]
    like = {
        "registered": Registered(jnp.zeros(2), {"x": 0}, static="t"),
        "keyless": Keyless(jnp.zeros(2), 0),
        "keyed": Keyed(jnp.ones(2), [0, 0]),
    }
    assert_same(ckpt.load(tmp_path / "c", like), tree)


def test_classes_that_cannot_be_imported(tmp_path):
    """A NamedTuple comes back with its fields, also where its class is gone."""
    gone = collections.namedtuple("Gone", "first second")
    got = round_trip(tmp_path, {"n": gone(1, jnp.ones(2))})["n"]
    assert got._fields == ("first", "second")
    assert got.first == 1
    assert_same(got[1], jnp.ones(2))


def test_fields_that_have_changed(tmp_path, monkeypatch):
    """A class of that name with other fields is not the class that was saved."""
    ckpt.save(tmp_path / "c", {"n": Moments(1, 2)})
    module = __import__(Moments.__module__, fromlist=["x"])
    other = collections.namedtuple("Moments", "mu nu extra")
    monkeypatch.setattr(module, "Moments", other, raising=False)
    got = ckpt.load(tmp_path / "c")["n"]
    assert got._fields == ("mu", "nu")
    assert tuple(got) == (1, 2)


def test_optax_states(tmp_path):
    optax = pytest.importorskip("optax")
    transform = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.cosine_decay_schedule(1e-3, 100), mask={"w": True, "b": False}),
    )
    state = transform.init({"w": jnp.ones((3, 2)), "b": jnp.ones(2)})
    got = round_trip(tmp_path, state)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    assert_same(jax.tree.leaves(got), jax.tree.leaves(state))
    got = ckpt.load(tmp_path / "c", transform.init({"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}))
    assert jax.tree.structure(got) == jax.tree.structure(state)


LEAVES = {
    "jax": None,  # made in the test: no work for jax while pytest collects
    "numpy": np.arange(3),
    "numpy_scalar": np.float32(2),
    "key": None,  # made in the test
    "int": 5,
    "big": 2**100,
    "float": 2.5,
    "bool": True,
    "complex": 2j,
    "str": "text",
    "bytes": b"bytes",
    "none": None,
    "dict": {},
    "list": [],
    "tuple": (),
    "random": random.Random(3),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_bare_value_is_a_tree(tmp_path, name):
    made = {"key": lambda: jax.random.key(3), "jax": lambda: jnp.arange(3.0)}
    value = made[name]() if name in made else LEAVES[name]
    assert_same(round_trip(tmp_path, value), value)
    ckpt.save(tmp_path / "items", items={"a": value, "b": {"x": value}}, options=QUICK)
    got = ckpt.load(tmp_path / "items")
    assert_same(got, {"a": value, "b": {"x": value}})
    assert_same(ckpt.load(tmp_path / "items", item="a"), value)


def test_one_keyword_item_is_a_dict_of_one(tmp_path):
    ckpt.save(tmp_path / "c", model={"w": np.ones(2)})
    assert_same(ckpt.load(tmp_path / "c"), {"model": {"w": np.ones(2)}})


def test_the_same_array_twice(tmp_path):
    """Shared leaves are saved under both names."""
    array, numpy_array = jnp.arange(1000.0), np.arange(10**5)
    tree = {"a": array, "b": [array, numpy_array], "c": numpy_array}
    assert_same(round_trip(tmp_path, tree), tree)


def test_many_leaves(tmp_path):
    tree = {f"layer{i}": {"w": np.full((4, 4), i, np.float32), "i": i} for i in range(500)}
    assert_same(round_trip(tmp_path, tree), tree)


def test_deep_trees(tmp_path):
    deep = jnp.ones(1)
    for level in range(200):
        deep = {"d": deep} if level % 2 else [deep]
    assert_same(round_trip(tmp_path, deep), deep)
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ckpt.UnsupportedLeaf):
        ckpt.save(tmp_path / "deeper", deep)
    while isinstance(deep, list):  # freed step by step: C recursion would overflow
        (deep,) = deep


def test_a_cycle_is_refused(tmp_path):
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ckpt.UnsupportedLeaf):
        ckpt.save(tmp_path / "c", {"cycle": cycle})


# --------------------------------------------------------------------------------------------- keys

ODD_KEYS = [
    "", " ", ".", "..", "a.b", "a/b", "/", "//", "~", "~0", "~1", "a~1b", "\\", "\n", "é", "中文",
    "\U0001f600", "'", '"', "%2F", "#", "?", "*", "**", "c", "c/0", "zarr.json", ".zarray", "d",
    "manifest.ocdbt", "(root)", "None", "0", "-1", "x" * 300, "\x00", "\x7f", "a" + "/b" * 50,
]  # fmt: skip


@pytest.mark.parametrize(
    "make", [lambda i: np.full(3, i), lambda i: f"t{i}", lambda i: i], ids="ats"
)
def test_odd_keys(tmp_path, make):
    # Names of texts nest by "/" and read "~0" as "~"; the next test has each of them alone.
    alone = ("/", "~0", "~1") if isinstance(make(0), str) else ()
    keys = [key for key in ODD_KEYS if not any(part in key for part in alone)]
    tree = {"outer": {key: make(index) for index, key in enumerate(keys)}}
    assert_same(round_trip(tmp_path, tree), tree)
    assert_same(ckpt.load(tmp_path / "c", tree), tree)


@pytest.mark.parametrize("key", [key for key in ODD_KEYS if "/" in key or "~" in key])
def test_odd_keys_of_text(tmp_path, key):
    assert_same(
        round_trip(tmp_path, {key: "text", "n": {key: "more"}}), {key: "text", "n": {key: "more"}}
    )


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_keys_at_the_top(tmp_path, key):
    tree = {key: np.arange(3), "other": {key: {key: jnp.ones(2)}}}
    if key == "other":
        tree.pop("other")
    assert_same(round_trip(tmp_path, tree), tree)


def test_lone_surrogates_in_keys(tmp_path):
    """File names with bytes that are no text look like this."""
    tree = {"\udcff": np.ones(2), "x": {"\ud800": 1}}
    try:
        got = round_trip(tmp_path, tree)
    except ckpt.UnsupportedLeaf:
        return
    assert_same(got, tree)


def test_names_that_begin_alike(tmp_path):
    """No array's keys in the database are another's."""
    names = ["a", "a/b", "a/c", "a/c/0", "a/c/0/0", "a/zarr.json", "ab", "a.b", "a-", "a0", "c/0"]
    tree = {name: np.full((2, 2), index) for index, name in enumerate(names)}
    assert_same(round_trip(tmp_path, tree), tree)
    assert_same(ckpt.load(tmp_path / "c", only="a"), {"a": tree["a"]})


X, Y = np.ones(2), np.zeros(2)


@pytest.mark.parametrize(
    ("tree", "one", "other"),
    [
        ({"a.b": X, "a": {"b": Y}}, "a.b", "a/b"),
        ({"a": {"b": Y}, "a.b": X}, "a.b", "a/b"),
        ({"a": [X], "a.0": Y}, "a/0", "a.0"),
        ({0: X, "0": Y}, "0", "0"),
        ({"a": {"": X}, "a.": Y}, "a/", "a."),
        ({"x": {"a.b": "text", "a": {"b": "more"}}}, "x/a.b", "x/a/b"),
        ({"a": {"b/c.d": 1}, "a.b/c": {"d": 2}}, "a/b~1c.d", "a.b~1c/d"),
        ({"n": Moments(X, Y), "n.mu": Y}, "n/mu", "n.mu"),
    ],
)
def test_colliding_names_are_refused(tmp_path, tree, one, other):
    with pytest.raises(ckpt.UnsupportedLeaf) as caught:
        ckpt.save(tmp_path / "c", tree)
    assert one in str(caught.value)
    assert other in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_same_names_in_two_items_do_not_collide(tmp_path):
    ckpt.save(tmp_path / "c", one={"a.b": X}, two={"a": {"b": Y}})
    assert_same(ckpt.load(tmp_path / "c"), {"one": {"a.b": X}, "two": {"a": {"b": Y}}})


# -------------------------------------------------------------------------------------- unsupported


def deleted_array():
    array = jnp.ones(3) + 1
    array.delete()
    return array


UNSUPPORTED = {
    "float0": lambda: np.zeros(3, jax.dtypes.float0),
    "object array": lambda: np.array([1, "a", None], object),
    "string array": lambda: np.array(["a", "b"]),
    "datetime array": lambda: np.array(["2020-01-01"], "datetime64[D]"),
    "timedelta": lambda: np.timedelta64(3, "s"),
    "structured array": lambda: np.zeros(2, [("x", "f4"), ("y", "i4")]),
    "void": lambda: np.void(b"abc"),
    "long double": lambda: np.zeros(2, np.longdouble),
    "masked array": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    "abstract array": lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
    "deleted array": deleted_array,
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset({1}),
    "function": lambda: len,
    "lambda": lambda: lambda x: x,
    "partial": lambda: functools.partial(len, [1]).func,
    "class": lambda: Moments,
    "module": lambda: types,
    "object": lambda: object(),
    "iterator": lambda: iter([1, 2]),
    "bytearray": lambda: bytearray(b"x"),
    "range": lambda: range(3),
    "decimal": lambda: decimal.Decimal(1),
    "path": lambda: Path("x"),
    "ellipsis": lambda: ...,
    "str subclass": lambda: type("Name", (str,), {})("x"),
    "int subclass": lambda: type("Count", (int,), {})(3),
    "random subclass": lambda: random.SystemRandom(),
    "bit generator": lambda: np.random.PCG64(3),
    "dict with a bool key": lambda: {True: 1},
    "dict with a tuple of floats as key": lambda: {(1, 2.0): 1},
    "dict with a tuple of bools as key": lambda: {(1, (True,)): 1},
    "dict with None as key": lambda: {None: 1},
    "dict with a float key": lambda: {1.5: 1},
    "dict with a bytes key": lambda: {b"x": 1},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_leaves(tmp_path, name):
    value = UNSUPPORTED[name]()
    with pytest.raises(ckpt.UnsupportedLeaf) as caught:
        ckpt.save(tmp_path / "c", {"good": np.ones(2), "inner": [1, {"x/y": value}]})
    assert isinstance(caught.value, TypeError)
    assert "inner/1/x~1y" in str(caught.value)
    assert caught.value.leaf.startswith("inner/1/x~1y")
    if name.startswith("dict with"):
        assert caught.value.type_name in str(caught.value)
    else:
        assert type(value).__name__ in caught.value.type_name
        assert type(value).__name__ in str(caught.value)
    assert not any(tmp_path.iterdir()), "nothing is left behind"


def test_unsupported_leaf_of_an_item_names_the_item(tmp_path):
    with pytest.raises(ckpt.UnsupportedLeaf) as caught:
        ckpt.save(tmp_path / "c", model={"w": X}, opt={"s": {1}})
    assert "opt" in str(caught.value)


def test_tracers_are_refused(tmp_path):
    def step(x):
        ckpt.save(tmp_path / "c", {"x": x})
        return x

    with pytest.raises(ckpt.UnsupportedLeaf, match="x"):
        jax.jit(step)(jnp.ones(2))
    with pytest.raises(ckpt.UnsupportedLeaf, match="x"):
        jax.grad(lambda x: step(x).sum())(jnp.ones(2))
    assert not any(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------- shardings


def meshes():
    devices = np.array(jax.devices())
    return {
        "4x2": Mesh(devices.reshape(4, 2), ("x", "y")),
        "2x4": Mesh(devices.reshape(2, 4), ("x", "y")),
        "reversed": Mesh(devices[::-1].reshape(4, 2), ("x", "y")),
        "3x2": Mesh(devices[:6].reshape(3, 2), ("x", "y")),
        "last2": Mesh(devices[6:].reshape(2, 1), ("x", "y")),
        "1": Mesh(devices[5:6].reshape(1, 1), ("x", "y")),
    }


SPECS = {
    "both": P("x", "y"),
    "swapped": P("y", "x"),
    "first": P("x"),
    "second": P(None, "y"),
    "merged": P(("x", "y")),
    "replicated": P(),
}
SHAPES = {"small": (24, 24), "large": (1200, 312), "vector": (48, 1)}


def shardings(names):
    for mesh in names:
        for spec in SPECS:
            yield mesh, spec


def sharded(array, mesh, spec):
    return jax.device_put(array, NamedSharding(meshes()[mesh], SPECS[spec]))


def fits(shape, mesh, spec):
    sizes = meshes()[mesh].shape
    for length, axes in zip(shape, (*SPECS[spec], None, None), strict=False):
        axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
        if length % math.prod(sizes[axis] for axis in axes):
            return False
    return True


def numbers(shape):
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def grid_tree(mesh_names):
    return {
        f"{shape}-{mesh}-{spec}": sharded(numbers(SHAPES[shape]), mesh, spec)
        for shape in SHAPES
        for mesh, spec in shardings(mesh_names)
        if fits(SHAPES[shape], mesh, spec)
    }


@pytest.mark.parametrize("mesh_name", ["4x2", "2x4", "reversed", "3x2", "last2", "1"])
def test_the_saved_sharding_is_the_default(tmp_path, mesh_name):
    tree = grid_tree([mesh_name])
    assert len(tree) >= 6
    assert_same(round_trip(tmp_path, tree), tree, sharding=True)


@pytest.mark.parametrize("source", ["4x2", "3x2", "1"])
def test_every_sharding_to_every_other(tmp_path, source):
    """Shards of the target cross the borders of the chunks in all the ways there are."""
    tree = {}
    for mesh, spec in shardings([source]):
        for shape in ("small", "vector"):
            if fits(SHAPES[shape], mesh, spec):
                tree[f"{shape}-{spec}"] = sharded(numbers(SHAPES[shape]), mesh, spec)
    ckpt.save(tmp_path / "c", tree, options=ckpt.Options(durable=False, chunk_bytes=1024))
    for mesh, spec in shardings(["2x4", "reversed", "3x2", "1"]):
        like = {
            name: sharded(np.asarray(leaf), mesh, spec)
            for name, leaf in tree.items()
            if fits(leaf.shape, mesh, spec)
        }
        got = ckpt.load(tmp_path / "c", with_shardings(like), unexpected="ignore")
        assert_same(got, like, sharding=True)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["4x2", "2x4", "reversed", "3x2", "last2"])
@pytest.mark.parametrize(
    ("chunk_bytes", "compression"), [(10_000, None), (100_000, "zstd"), (2**26, None)]
)
def test_every_sharding_to_every_other_large(tmp_path, source, chunk_bytes, compression):
    tree = grid_tree([source])
    options = ckpt.Options(durable=False, chunk_bytes=chunk_bytes, compression=compression)
    ckpt.save(tmp_path / "c", tree, options=options)
    assert_same(ckpt.load(tmp_path / "c"), tree, sharding=True)
    for mesh, spec in shardings(meshes()):
        like = {
            name: sharded(np.asarray(leaf), mesh, spec)
            for name, leaf in tree.items()
            if fits(leaf.shape, mesh, spec)
        }
        got = ckpt.load(tmp_path / "c", with_shardings(like), unexpected="ignore")
        assert_same(got, like, sharding=True)


def test_one_sharding_for_the_whole_tree(tmp_path):
    tree = {
        "a": sharded(numbers((24, 24)), "4x2", "both"),
        "b": jnp.ones(4),
        "n": np.ones(2),
        "s": 1,
    }
    ckpt.save(tmp_path / "c", tree)
    wanted = NamedSharding(meshes()["2x4"], P())
    got = ckpt.load(tmp_path / "c", sharding=wanted)
    assert_same(got, tree)
    assert got["a"].sharding == wanted
    assert got["b"].sharding == wanted
    device = SingleDeviceSharding(jax.devices()[5])
    got = ckpt.load(tmp_path / "c", sharding=device)
    assert got["a"].devices() == got["b"].devices() == {jax.devices()[5]}


def test_a_function_gives_shardings(tmp_path):
    tree = {"a": sharded(numbers((24, 24)), "4x2", "both"), "b": {"c": jnp.ones(4)}}
    ckpt.save(tmp_path / "c", tree)
    wanted = {
        "a": NamedSharding(meshes()["2x4"], P("y")),
        "b/c": SingleDeviceSharding(jax.devices()[2]),
    }
    got = ckpt.load(tmp_path / "c", sharding=lambda path, leaf: wanted[path])
    assert_same(got, tree)
    assert got["a"].sharding == wanted["a"]
    assert got["b"]["c"].sharding == wanted["b/c"]


def test_a_mesh_as_sharding(tmp_path):
    """Saved specs are refitted to the axes of the mesh; what fits nowhere is replicated."""
    tree = {"a": sharded(numbers((24, 24)), "4x2", "both"), "b": jnp.ones(4)}
    ckpt.save(tmp_path / "c", tree)
    mesh = meshes()["2x4"]
    got = ckpt.load(tmp_path / "c", sharding=mesh)
    assert_same(got, tree)
    assert got["a"].sharding == NamedSharding(mesh, P("x", "y"))
    assert got["b"].sharding.is_fully_replicated
    other = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "other"))
    got = ckpt.load(tmp_path / "c", sharding=other)
    assert_same(got, tree)
    assert got["a"].sharding.is_equivalent_to(NamedSharding(other, P("x")), 2)


def test_sharding_of_the_wrong_type(tmp_path):
    ckpt.save(tmp_path / "c", {"a": jnp.ones(4)})
    for wrong in ({"b": SingleDeviceSharding(jax.devices()[2])}, P("x"), "x", 3):
        with pytest.raises(TypeError, match="sharding"):
            ckpt.load(tmp_path / "c", sharding=wrong)


def test_sharding_as_a_tree(tmp_path):
    ckpt.save(tmp_path / "c", {"a": jnp.ones(4), "b": [jnp.zeros(2)]})
    third, fourth = (SingleDeviceSharding(jax.devices()[i]) for i in (2, 3))
    got = ckpt.load(tmp_path / "c", sharding={"a": third, "b": fourth})
    assert got["a"].sharding == third
    assert got["b"][0].sharding == fourth


def test_a_sharding_that_does_not_divide(tmp_path):
    """Said before anything is read, with the leaf's name."""
    ckpt.save(tmp_path / "c", {"good": jnp.ones((8, 3)), "odd": {"leaf": jnp.ones((2, 3))}})
    sharding = NamedSharding(meshes()["4x2"], P("x"))
    like = {
        "good": jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=sharding),
        "odd": {"leaf": jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=sharding)},
    }
    for load in (lambda: ckpt.load(tmp_path / "c", sharding=sharding),
                 lambda: ckpt.load(tmp_path / "c", like)):  # fmt: skip
        with pytest.raises((ckpt.CheckpointError, ValueError), match="odd/leaf"):
            load()


def test_shardings_of_every_make(tmp_path):
    """Explicit axes, three axes, permuted devices, memory kinds: all of it comes back."""
    axis = jax.sharding.AxisType
    devices = np.array(jax.devices())
    shardings = {
        "explicit": NamedSharding(
            jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis.Explicit,) * 2), P("x", "y")
        ),
        "mixed": NamedSharding(
            jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis.Explicit, axis.Auto)), P("y")
        ),
        "three": NamedSharding(Mesh(devices.reshape(2, 2, 2), ("a", "b", "c")), P(("a", "c"), "b")),
        "permuted": NamedSharding(
            Mesh(devices[[5, 2, 7, 1]].reshape(2, 2), ("a", "b")), P("b", "a")
        ),
        "host": NamedSharding(meshes()["4x2"], P("x"), memory_kind="pinned_host"),
        "device": SingleDeviceSharding(devices[6]),
    }
    tree = {name: jax.device_put(numbers((16, 8)), one) for name, one in shardings.items()}
    for got in (round_trip(tmp_path, tree), ckpt.load(tmp_path / "c", with_shardings(tree))):
        assert_same(got, tree)
        assert {name: array.sharding for name, array in got.items()} == shardings


def test_target_without_sharding(tmp_path):
    tree = {"a": sharded(numbers((24, 24)), "4x2", "both"), "b": jnp.ones(4)}
    ckpt.save(tmp_path / "c", tree)
    assert_same(ckpt.load(tmp_path / "c", without_shardings(tree)), tree)


def test_each_distinct_shard_is_written_once(tmp_path):
    """Replicas do not multiply the bytes on disk."""
    array = numbers((512, 512))
    for spec in SPECS:
        ckpt.save(tmp_path / spec, {"a": sharded(array, "4x2", spec)})
        size = sum(path.stat().st_size for path in (tmp_path / spec).rglob("*") if path.is_file())
        assert array.nbytes <= size < 1.1 * array.nbytes, spec


def test_uncommitted_stays_uncommitted(tmp_path):
    """A counter that lives nowhere in particular must go on mixing with arrays of any mesh."""
    tree = {"step": jnp.int32(3), "w": sharded(numbers((24, 24)), "4x2", "both")}
    assert not tree["step"].committed
    ckpt.save(tmp_path / "c", tree)
    for got in (ckpt.load(tmp_path / "c", tree), ckpt.load(tmp_path / "c")):
        assert not got["step"].committed
        assert got["w"].committed
        assert jax.jit(lambda s, w: w + s)(got["step"], got["w"])[0, 0] == 3


def test_weak_types_stay_weak(tmp_path):
    """Or the step function would be traced anew, and bfloat16 times a scalar become float32."""
    everywhere = NamedSharding(meshes()["4x2"], P())
    tree = {
        "weak": jnp.asarray(2.0),
        "weak_int": jnp.asarray(2),
        "on_mesh": jax.device_put(jnp.asarray(2.0), everywhere),
        "on_device": jax.device_put(jnp.asarray(2.0), jax.devices()[3]),
        "strong": jnp.float32(2.0),
        "strong_on_mesh": jax.device_put(jnp.float32(2.0), everywhere),
    }
    for name, array in tree.items():
        assert array.weak_type != name.startswith("strong")
    for got in (round_trip(tmp_path, tree), ckpt.load(tmp_path / "c", tree)):
        assert_same(got, tree, sharding=True)
        wrong = [name for name in tree if got[name].weak_type != tree[name].weak_type]
        assert not wrong


ELSEWHERE = """
import json, sys
import jax, numpy as np
import ckpt_core as ckpt
tree = ckpt.load(sys.argv[1])
leaves = {
    name: [np.asarray(leaf).sum().item(), list(leaf.shape), len(leaf.devices())]
    for name, leaf in tree["arrays"].items()
}
draw = jax.random.normal(tree["keys"][3]).item()
like = {"arrays": {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in tree["arrays"].items()}}
again = ckpt.load(sys.argv[1], like, unexpected="ignore")
same = all(np.array_equal(x, again["arrays"][n]) for n, x in tree["arrays"].items())
print(json.dumps({"leaves": leaves, "draw": draw, "same": same, "devices": len(jax.devices())}))
"""


@pytest.mark.parametrize("devices", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_eight_devices_to_fewer_with_no_argument(tmp_path, run_python, devices):
    arrays = grid_tree(["4x2", "2x4"])
    keys = jax.device_put(
        jax.random.split(jax.random.key(0), 8), NamedSharding(meshes()["4x2"], P("x"))
    )
    ckpt.save(tmp_path / "c", {"arrays": arrays, "keys": keys}, options=QUICK)
    flags = "" if devices == 1 else f"--xla_force_host_platform_device_count={devices}"
    answer = run_python(ELSEWHERE, str(tmp_path / "c"), XLA_FLAGS=flags)
    assert answer["devices"] == devices
    assert answer["same"]
    assert answer["draw"] == jax.random.normal(keys[3]).item()
    assert answer["leaves"] == {
        name: [np.asarray(leaf).sum().item(), [*leaf.shape], 1] for name, leaf in arrays.items()
    }


ONE_TO_EIGHT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
import ckpt_core as ckpt
assert len(jax.devices()) == 1
keys = jax.random.split(jax.random.key(0), 8)
ckpt.save(sys.argv[1], {"w": jnp.arange(96.0).reshape(8, 12), "k": keys})
print("0")
"""


def test_one_device_to_eight(tmp_path, run_python):
    run_python(ONE_TO_EIGHT, str(tmp_path / "c"), XLA_FLAGS="")
    tree = {"w": jnp.arange(96.0).reshape(8, 12), "k": jax.random.split(jax.random.key(0), 8)}
    assert_same(ckpt.load(tmp_path / "c"), tree)
    wanted = jax.device_put(tree, NamedSharding(meshes()["4x2"], P("x")))
    assert_same(ckpt.load(tmp_path / "c", with_shardings(wanted)), wanted, sharding=True)


# ------------------------------------------------------------------------------------ with a target


def model():
    return {
        "params": {"dense": {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}, "out": jnp.full(2, 5.0)},
        "opt": [Moments(jnp.ones(3), jnp.ones(3)), 7],
        "note": "text",
        "host": np.arange(3),
    }


@pytest.fixture
def saved(tmp_path):
    ckpt.save(tmp_path / "c", model(), options=QUICK)
    return tmp_path / "c"


def zeros_like(tree):
    """A target of the same kinds of leaves with other values."""
    return jax.tree.map(
        lambda x: (
            jnp.zeros_like(x) if isinstance(x, jax.Array)
            else np.zeros_like(x) if isinstance(x, np.ndarray)
            else type(x)()
        ),
        tree,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [zeros_like, with_shardings, without_shardings])
def test_kinds_of_targets(saved, kind):
    assert_same(ckpt.load(saved, kind(model())), model())


def test_the_target_decides_between_numpy_and_jax(saved):
    like = model()
    like["host"] = jnp.zeros(3, int)
    like["params"]["out"] = np.zeros(2, np.float32)
    got = ckpt.load(saved, like, cast=True)
    assert isinstance(got["host"], jax.Array)
    assert isinstance(got["params"]["out"], np.ndarray)
    np.testing.assert_array_equal(got["params"]["out"], [5, 5])


def test_the_target_is_not_changed(saved):
    like = zeros_like(model())
    before = copy.copy(like["host"])
    got = ckpt.load(saved, like)
    assert_same(like["host"], before)
    assert got["host"] is not like["host"]


def test_every_mismatch_is_named(saved):
    like = model()
    like["params"]["dense"]["w"] = jnp.ones((4, 4))
    like["params"]["dense"]["bias"] = like["params"]["dense"].pop("b")
    like["params"]["out"] = jnp.ones(2, jnp.int32)
    like["opt"][1] = "seven"
    like["new"] = jnp.ones(1)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.load(saved, like)
    found = {(mismatch.path, mismatch.kind) for mismatch in caught.value.mismatches}
    assert found == {
        ("params/dense/w", "shape"),
        ("params/dense/bias", "missing"),
        ("params/dense/b", "unexpected"),
        ("params/out", "dtype"),
        ("opt/1", "kind"),
        ("new", "missing"),
    }
    by_path = {mismatch.path: mismatch for mismatch in caught.value.mismatches}
    assert by_path["params/dense/bias"].nearest == "params/dense/b"
    assert by_path["params/dense/b"].nearest == "params/dense/bias"
    shape = by_path["params/dense/w"]
    assert "4,3" in shape.saved.replace(" ", "")
    assert "4,4" in shape.wanted.replace(" ", "")
    for path, _ in found:
        assert path in str(caught.value)


def test_containers_of_another_kind(saved):
    """A list is not a dict of positions; a NamedTuple's fields are not positions."""
    like = model()
    like["opt"] = {"0": like["opt"][0], "1": like["opt"][1]}
    with pytest.raises(ckpt.StructureMismatch):
        ckpt.load(saved, like)
    like = model()
    like["opt"][0] = tuple(like["opt"][0])
    with pytest.raises(ckpt.StructureMismatch):
        ckpt.load(saved, like)


def test_int_and_text_keys_differ(tmp_path):
    ckpt.save(tmp_path / "c", {1: np.ones(1)})
    with pytest.raises(ckpt.StructureMismatch):
        ckpt.load(tmp_path / "c", {"1": np.ones(1)})


def test_a_shape_of_the_same_size_is_another_shape(tmp_path):
    ckpt.save(tmp_path / "c", {"a": jnp.ones((2, 3)), "s": jnp.ones(())})
    for like in (
        {"a": jnp.ones((3, 2)), "s": jnp.ones(())},
        {"a": jnp.ones((2, 3)), "s": jnp.ones(1)},
    ):
        with pytest.raises(ckpt.StructureMismatch):
            ckpt.load(tmp_path / "c", like)


def test_nothing_is_read_on_a_mismatch(saved, monkeypatch):
    """The whole tree is checked before any data: also with the data gone it is the mismatch."""
    for path in (saved / "state").rglob("d/*"):
        path.unlink()
    like = model()
    like["params"]["out"] = jnp.ones(3)
    with pytest.raises(ckpt.StructureMismatch):
        ckpt.load(saved, like)


def test_missing_leaves_can_be_kept(saved):
    like = model() | {"new": jnp.full(2, 9.0), "plain": 3}
    got = ckpt.load(saved, like, missing="keep")
    assert_same(got, model() | {"new": jnp.full(2, 9.0), "plain": 3})
    abstract = model() | {"new": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(ckpt.CheckpointError, match="new"):
        ckpt.load(saved, abstract, missing="keep")


def test_unexpected_leaves_can_be_ignored(saved):
    like = {"note": "", "host": np.zeros(3, int)}
    got = ckpt.load(saved, like, unexpected="ignore")
    assert_same(got, {"note": "text", "host": np.arange(3)})


def test_settings_have_no_typos(saved):
    with pytest.raises((ValueError, TypeError)):
        ckpt.load(saved, model(), missing="ignore it")
    with pytest.raises((ValueError, TypeError)):
        ckpt.load(saved, model(), unexpected="whatever")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_cast(saved, dtype):
    like = model()
    like["params"]["out"] = jnp.zeros(2, dtype)
    with pytest.raises(ckpt.StructureMismatch, match="params/out"):
        ckpt.load(saved, like)
    got = ckpt.load(saved, like, cast=True)
    assert_same(got["params"]["out"], jnp.full(2, 5, dtype))
    assert_same(got["host"], model()["host"])


def test_cast_of_sharded_and_numpy(tmp_path):
    tree = {"a": sharded(numbers((24, 24)), "4x2", "both"), "n": np.arange(3.0)}
    ckpt.save(tmp_path / "c", tree)
    want = {
        "a": sharded(numbers((24, 24)).astype(jnp.bfloat16), "2x4", "swapped"),
        "n": np.arange(3),
    }
    assert_same(ckpt.load(tmp_path / "c", with_shardings(want), cast=True), want, sharding=True)


def test_rename_by_function(saved):
    like = model()
    like["params"]["layer"] = like["params"].pop("dense")
    got = ckpt.load(saved, like, rename=lambda path: path.replace("params/dense/", "params/layer/"))
    assert_same(got["params"]["layer"], model()["params"]["dense"])


def test_rename_by_mapping(saved):
    like = model()
    like["params"]["final"] = like["params"].pop("out")
    got = ckpt.load(saved, like, rename={"params/out": "params/final"})
    assert_same(got["params"]["final"], jnp.full(2, 5.0))


def test_rename_onto_another_leaf_is_an_error(saved):
    with pytest.raises((ckpt.CheckpointError, ValueError)):
        ckpt.load(saved, rename=lambda path: "same")


def test_rename_without_a_target(saved):
    got = ckpt.load(saved, rename={"params/out": "params/final"})
    assert_same(got["params"]["final"], jnp.full(2, 5.0))


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("params/**", {"params/dense/w", "params/dense/b", "params/out"}),
        ("params/*", {"params/out"}),
        ("**/b", {"params/dense/b"}),
        ("note", {"note"}),
        (["note", "host"], {"note", "host"}),
        ("opt/0/*", {"opt/0/mu", "opt/0/nu"}),
        (lambda path, _: path.endswith("w"), {"params/dense/w"}),
        (lambda _, leaf: leaf.shape == (3,), {"params/dense/b", "opt/0/mu", "opt/0/nu", "host"}),
    ],
)
def test_only(saved, pattern, paths):
    got = ckpt.load(saved, only=pattern)
    found = {
        "/".join(
            str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in keys
        )
        for keys, _ in jax.tree_util.tree_leaves_with_path(got)
    }
    assert found == paths
    like = zeros_like(model())
    got = ckpt.load(saved, like, only=pattern)
    assert jax.tree.structure(got) == jax.tree.structure(like)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(got):
        name = "/".join(
            str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in keys
        )
        source = model() if name in paths else like
        want = functools.reduce(lambda node, key: _child(node, key), keys, source)
        assert_same(leaf, want, name)


def _child(node, key):
    if isinstance(key, jax.tree_util.GetAttrKey):
        return getattr(node, key.name)
    return node[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]


def test_only_that_matches_nothing(saved):
    for load in (lambda **kw: ckpt.load(saved, **kw), lambda **kw: ckpt.load(saved, model(), **kw)):
        with pytest.raises((ckpt.CheckpointError, ValueError)) as caught:
            load(only="parms/**")
        assert "parms/**" in str(caught.value)


def test_as_numpy(saved):
    got = ckpt.load(saved, as_numpy=True)
    assert isinstance(got["params"]["out"], np.ndarray)
    np.testing.assert_array_equal(got["params"]["out"], [5, 5])
    assert got["opt"][1] == 7
    assert isinstance(got["opt"][0], Moments)


def test_as_numpy_of_odd_dtypes(tmp_path):
    tree = {"b": jnp.ones(3, jnp.bfloat16), "i": jnp.arange(3, dtype=jnp.int4), "s": np.float32(1)}
    ckpt.save(tmp_path / "c", tree)
    got = ckpt.load(tmp_path / "c", as_numpy=True)
    assert got["b"].dtype == ml_dtypes.bfloat16
    assert got["i"].dtype == ml_dtypes.int4
    large = {"big": sharded(numbers((1200, 312)), "4x2", "swapped")}
    ckpt.save(tmp_path / "d", large)
    np.testing.assert_array_equal(ckpt.load(tmp_path / "d", as_numpy=True)["big"], large["big"])


def test_load_async(saved):
    pending = ckpt.load_async(saved, model())
    assert_same(pending.result(), model())


def test_inspect(saved):
    info = ckpt.inspect(saved)
    leaves = {leaf.path: leaf for leaf in info.items["state"].leaves}
    assert leaves["params/dense/w"].shape == (4, 3)
    assert np.dtype(leaves["params/dense/w"].dtype) == np.float32
    assert leaves["params/dense/w"].bytes == 48
    assert leaves["opt/0/mu"].kind
    assert set(leaves) == {
        "params/dense/w", "params/dense/b", "params/out", "opt/0/mu", "opt/0/nu", "opt/1",
        "note", "host",
    }  # fmt: skip


def test_restore_gives_immutable_trees_back(tmp_path):
    ckpt.save(tmp_path / "c", state=model(), extra={"x": np.ones(2)}, metadata={"lr": 0.5})
    restored = ckpt.restore(tmp_path / "c", state=zeros_like(model()), extra={"x": np.zeros(2)})
    assert restored
    assert_same(restored["state"], model())
    assert_same(restored["extra"], {"x": np.ones(2)})
    assert restored.step is None
    assert restored.metadata == {"lr": 0.5}
    assert restored.report.loaded
    assert not restored.report.missing


def test_a_stateful_object_inside_a_tree(tmp_path):
    class Counter:
        def __init__(self, value):
            self.value = value

        def get_state(self):
            return {"value": jnp.int32(self.value), "list": [1, 2]}

        def set_state(self, state):
            self.value = int(state["value"])

    ckpt.save(tmp_path / "c", {"counter": Counter(5), "w": jnp.ones(2)}, options=QUICK)
    counter = Counter(0)
    restored = ckpt.restore(tmp_path / "c", state={"counter": counter, "w": jnp.zeros(2)})
    assert counter.value == 5
    assert restored["state"]["counter"] is counter
    got = ckpt.load(tmp_path / "c")
    assert_same(got["counter"], {"value": jnp.int32(5), "list": [1, 2]})


# ---------------------------------------------------------------------------------------- snapshots


def test_numpy_changed_right_after_an_asynchronous_save(tmp_path):
    """A snapshot is of the moment of the call, small and large, contiguous or not."""
    large, small = np.zeros((2000, 1000)), np.zeros(10)
    tree = {"large": large, "small": small, "view": large[::3, ::7], "list": [1, 2]}
    want = copy.deepcopy(tree)
    pending = ckpt.save_async(tmp_path / "c", tree)
    large[:], small[:] = 7, 7
    tree["list"].append(3)
    tree["extra"] = 5
    pending.result()
    assert_same(ckpt.load(tmp_path / "c"), want)


def test_donated_right_after_an_asynchronous_save(tmp_path):
    mesh = meshes()["4x2"]
    make = jax.jit(
        lambda: {"w": jnp.ones((1024, 512)), "b": jnp.zeros(4)},
        out_shardings=NamedSharding(mesh, P()),
    )
    state = make()
    state["w"] = jax.device_put(state["w"], NamedSharding(mesh, P("x", "y")))
    state["keys"] = jax.device_put(
        jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("x"))
    )
    want = jax.tree.map(lambda x: x if is_key(x) else np.array(x), state)
    want["keys"] = np.array(jax.random.key_data(state["keys"]))
    step = jax.jit(
        lambda s: s | {"w": s["w"] + 1, "b": s["b"] + 1, "keys": s["keys"][::-1]}, donate_argnums=0
    )
    pending = []
    for index in range(4):
        pending.append(ckpt.save_async(tmp_path / str(index), state))
        state = step(state)
    for index, one in enumerate(pending):
        one.result()
        got = ckpt.load(tmp_path / str(index))
        np.testing.assert_array_equal(got["w"], want["w"] + index)
        np.testing.assert_array_equal(got["b"], want["b"] + index)
        keys = want["keys"][::-1] if index % 2 else want["keys"]
        np.testing.assert_array_equal(jax.random.key_data(got["keys"]), keys)


def test_deleted_right_after_an_asynchronous_save(tmp_path):
    array = jnp.arange(10.0**6)
    pending = ckpt.save_async(tmp_path / "c", {"a": array})
    array.delete()
    pending.result()
    np.testing.assert_array_equal(
        ckpt.load(tmp_path / "c")["a"], np.arange(10.0**6, dtype=np.float32)
    )


def test_generators_drawn_from_right_after_an_asynchronous_save(tmp_path):
    tree = {"g": np.random.default_rng(0), "r": random.Random(0), "s": np.random.RandomState(0)}
    want = copy.deepcopy(tree)
    pending = ckpt.save_async(tmp_path / "c", tree)
    tree["g"].normal(), tree["r"].random(), tree["s"].normal()
    pending.result()
    assert_same(ckpt.load(tmp_path / "c"), want)


def test_a_loaded_array_is_no_view_of_the_file(tmp_path):
    """Overwriting or removing the files later must not reach what was loaded."""
    ckpt.save(tmp_path / "c", {"a": jnp.ones((1024, 1024)), "n": np.ones((1024, 1024))})
    got = ckpt.load(tmp_path / "c")
    for path in (tmp_path / "c").rglob("d/*"):
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
    np.testing.assert_array_equal(got["a"], np.ones((1024, 1024)))
    np.testing.assert_array_equal(got["n"], np.ones((1024, 1024)))


# ----------------------------------------------------------------------------------------- any tree

SHORT_DTYPES = st.sampled_from(
    ["float32", "int8", "bool", "bfloat16", "int4", "uint4", "complex64"]
)
SMALL_SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def arrays(draw):
    name, shape = draw(SHORT_DTYPES), draw(SMALL_SHAPES)
    array = np.array(every_bit_pattern(name, shape))
    return jnp.asarray(array) if draw(st.booleans()) else array


LEAF = st.one_of(
    arrays(),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.complex_numbers(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.none(),
    st.floats(width=32).map(np.float32),
    st.integers(0, 2**32 - 1).map(jax.random.key),
)
KEYS = st.one_of(st.text(st.characters(codec="utf-8"), max_size=6), st.integers(-9, 99))
TREE = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.builds(Moments, inner, inner),
        st.builds(Plain, inner, inner),
    ),
    max_leaves=12,
)


def leaves_with_names(tree, path=()):
    """(array name, whether it is text) of every leaf, by the rule of Orbax's format."""
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, Plain):
        children = fields_of(tree).items()
    elif isinstance(tree, Moments):
        children = tree._asdict().items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    elif tree is None:
        return
    else:
        text = isinstance(tree, str) or (type(tree) is int and not -(2**63) <= tree < 2**63)
        yield ".".join(map(str, path)), text
        return
    for key, value in children:
        yield from leaves_with_names(value, (*path, key))


def collides(tree):
    names = [*leaves_with_names(tree)]
    if len({name for name, _ in names}) < len(names):
        return True
    # texts nest by "/", and one cannot be inside another
    texts = [_pointer(name) for name, text in names if text]
    return any(a == b[: len(a)] for i, a in enumerate(texts) for j, b in enumerate(texts) if i != j)


def _pointer(name):
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in name.split("/"))


def check_any_tree(directory, tree):
    path = directory / "c"
    if collides(tree):
        with pytest.raises(ckpt.UnsupportedLeaf):
            ckpt.save(path, tree, options=QUICK)
        assert not path.exists()
        return
    ckpt.save(path, tree, options=QUICK, overwrite=True)
    assert_same(ckpt.load(path), tree)
    assert_same(ckpt.load(path, tree), tree)


@hypothesis.given(TREE)
@hypothesis.settings(max_examples=60)
def test_any_tree(tmp_path_factory, tree):
    check_any_tree(tmp_path_factory.mktemp("tree"), tree)


@pytest.mark.slow
@hypothesis.given(TREE)
@hypothesis.settings(max_examples=1500)
def test_any_tree_at_length(tmp_path_factory, tree):
    check_any_tree(tmp_path_factory.mktemp("tree"), tree)
