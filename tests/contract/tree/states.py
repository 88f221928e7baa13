"""States of every kind: what is saved and, where it is not the same, what comes back without a target."""

import collections
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.support.trees import Moments, Plain, every_bit_pattern, meshes

ML_DTYPES = [
    "int2", "uint2", "int4", "uint4", "bfloat16", "float4_e2m1fn", "float6_e2m3fn",
    "float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
NUMPY_DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
EVERY_DTYPE = [*ML_DTYPES, *NUMPY_DTYPES]
NOT_OF_XLA = ["float6_e2m3fn", "float6_e3m2fn"]  # jax names them, its compiler lacks them
GENERATORS = ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"]
ODD_KEYS = [
    "", " ", ".", "..", "a.b", "a/b", "/", "//", "~", "~0", "~1", "a~1b", "\\", "\n", "é", "中文",
    "\U0001f600", "'", '"', "%2F", "#", "?", "*", "**", "c", "c/0", "zarr.json", ".zarray", "d",
    "manifest.ocdbt", "(root)", "None", "0", "-1", "x" * 300, "\x00", "\x7f", "a" + "/b" * 50,
]  # fmt: skip


class Empty(NamedTuple):
    pass


def every_dtype(shape: tuple[int, ...], spec: Any = None) -> dict[str, Any]:
    """Of numpy and of jax; needs x64."""
    arrays = {name: np.array(every_bit_pattern(name, shape)) for name in EVERY_DTYPE}
    of_jax = {name: array for name, array in arrays.items() if name not in NOT_OF_XLA}
    if spec is None:
        return {"numpy": arrays, "jax": jax.tree.map(jnp.asarray, of_jax)}
    return {"numpy": arrays, "jax": jax.device_put(of_jax, NamedSharding(meshes()["4x2"], spec))}


def keys(impl: str) -> dict[str, Any]:
    key = jax.random.key(7, impl=impl)
    rows = NamedSharding(meshes()["4x2"], P("x"))
    return {
        "one": key,
        "batch": jax.random.split(key, 6).reshape(2, 3),
        "none": jax.random.split(key, 4)[:0],
        "sharded": jax.device_put(jax.random.split(key, 8), rows),
        "raw": jax.random.key_data(key),
    }


def of_numpy() -> dict[str, Any]:
    base = np.arange(24.0).reshape(4, 6)
    read_only = base.copy()
    read_only.flags.writeable = False
    return {
        "scalar": np.float32(1.5),
        "scalar_bool": np.True_,
        "scalar_bfloat16": ml_dtypes.bfloat16(3),
        "scalar_complex": np.complex64(1 - 2j),
        "scalar_wide": np.uint64(2**64 - 1),
        "zero_dim": np.array(1.5),
        "strided": base[::2, ::3],
        "reversed": base[::-1],
        "fortran": np.asfortranarray(base),
        "broadcast": np.broadcast_to(np.float32(2), (3, 5)),
        "read_only": read_only,
        "many_dims": np.arange(2**12).reshape((2,) * 12),
        "big_endian": [np.arange(6, dtype=">i4").reshape(2, 3), np.array([1.5], ">f8")],
    }


def drawn(generator: Any) -> Any:
    """A generator that keeps half of a word, or a second normal number, back."""
    if isinstance(generator, np.random.Generator):
        generator.integers(10, dtype=np.int32)
    elif isinstance(generator, np.random.RandomState):
        generator.normal()
    else:
        generator.gauss(0, 1)
    return generator


def random_states() -> dict[str, Any]:
    of_kinds = {kind: np.random.Generator(getattr(np.random, kind)(3)) for kind in GENERATORS}
    every = {**of_kinds, "numpy": np.random.RandomState(5), "python": random.Random(6)}
    return {name: drawn(one) for name, one in every.items()}


def of_python() -> dict[str, Any]:
    return {
        "ints": [0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64, -(2**63) - 1],
        "huge": [10**400, -(10**400), 3**20_000],
        "floats": [0.0, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan],
        "bools": [True, False],
        "complex": [1 - 2j, complex(math.nan, math.inf), complex(-0.0, 0.0)],
        "text": ["", "é中\U0001f600", "line\r\n", "\x00\x1f", '"\\/~', "\ud800", "x" * 10**5],
        "bytes": [b"", b"\x00", bytes(range(256)), b"y" * 10**6],
    }


def containers() -> dict[str, Any]:
    shared = jnp.arange(1000.0)
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
        "twice": [shared, shared],
        "defaultdicts": [
            collections.defaultdict(factory, {"b": jnp.ones(2), "a": 3, 5: np.zeros(2)})
            for factory in (int, float, list, dict, set, collections.OrderedDict, None)
        ],
    }


def optax_state() -> Any:
    import optax

    schedule = optax.cosine_decay_schedule(1e-3, 100)
    adam = optax.adamw(schedule, mask={"w": True, "b": False})
    transform = optax.chain(optax.clip_by_global_norm(1.0), adam)
    return transform.init({"w": jnp.ones((3, 2)), "b": jnp.ones(2)})


def deep() -> Any:
    tree: Any = jnp.ones(1)
    for level in range(200):
        tree = {"d": tree} if level % 2 else [tree]
    return tree


def odd_keys(make: Callable[[int], Any]) -> Any:
    # Names of texts nest by "/" and read "~0" as "~": those stand alone in another state.
    alone = ("/", "~0", "~1") if isinstance(make(0), str) else ()
    kept = [key for key in ODD_KEYS if not any(part in key for part in alone)]
    return {"outer": {key: make(index) for index, key in enumerate(kept)}}


BEGIN_ALIKE = ["a", "a/b", "a/c", "a/c/0", "a/c/0/0", "a/zarr.json", "ab", "a.b", "a-", "c/0"]
BARE: dict[str, Callable[[], Any]] = {
    "jax": lambda: jnp.arange(3.0),
    "numpy": lambda: np.arange(3),
    "numpy scalar": lambda: np.float32(2),
    "key": lambda: jax.random.key(3),
    "int": lambda: 5,
    "big": lambda: 2**100,
    "float": lambda: 2.5,
    "bool": lambda: True,
    "complex": lambda: 2j,
    "str": lambda: "text",
    "bytes": lambda: b"bytes",
    "none": lambda: None,
    "dict": dict,
    "list": list,
    "tuple": tuple,
}
STATES: dict[str, Callable[[], Any]] = {
    **{f"dtypes {shape}": lambda shape=shape: every_dtype(shape)
       for shape in [(16, 16), (), (0, 3), (1, 257)]},
    # above the size where another way of writing begins
    "dtypes large and sharded": lambda: every_dtype((1024, 512), P("x", "y")),
    **{f"keys {impl}": lambda impl=impl: keys(impl)
       for impl in ("threefry2x32", "rbg", "unsafe_rbg")},
    "numpy": of_numpy,
    "random states": random_states,
    "python": of_python,
    "containers": containers,
    "optax": optax_state,
    "deep": deep,
    "many": lambda: {f"layer{i}": {"w": np.full((4, 4), i), "i": i} for i in range(500)},
    "odd keys of arrays": lambda: odd_keys(lambda i: np.full(3, i)),
    "odd keys of texts": lambda: odd_keys(lambda i: f"t{i}"),
    "odd keys of numbers": lambda: odd_keys(lambda i: i),
    **{f"key {key[:9]!r}": lambda key=key: {key: "text", "n": {key: "more", "other": {key: X}}}
       for key in ODD_KEYS if "/" in key or "~" in key},
    "names that begin alike": lambda: {name: np.full(2, n) for n, name in enumerate(BEGIN_ALIKE)},
    "a name of nearly 64,000 bytes": lambda: {"k" * 63_990: np.arange(3), "b": np.ones((1,) * 20)},
    **{f"bare {name}": make for name, make in BARE.items()},
}  # fmt: skip
X = np.ones(2)
