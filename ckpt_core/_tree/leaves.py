"""The kinds of leaves, the array or text (docs/format.md) as which each is stored, since Zarr and Orbax lack some types, and
what becomes of values in another dtype.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from ckpt_core._errors import UnsupportedLeaf
from ckpt_core._lazy import jax
from ckpt_core._tree import Path, format_path
from ckpt_core._tree.code import advice_for, unsupported

Array = np.ndarray[Any, Any]

TEXT_KINDS = frozenset({"str", "bigint", "generator", "random_state", "py_random"})
"""Kinds of leaves that are stored as text."""

CHANGEABLE_KINDS = frozenset({"numpy", "generator", "random_state", "py_random"})
"""Kinds of leaves that a program changes in place: one of them at two places must stay one."""

PYTHON_NUMBERS = frozenset({"int", "float", "bool", "complex"})
"""Kinds of leaves that are loaded as Python's numbers."""

KINDS = TEXT_KINDS | PYTHON_NUMBERS | {"jax", "key", "numpy", "numpy_scalar", "bytes"}
"""Every kind of leaf."""

STORED_DTYPES = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128", "bfloat16", "int2", "int4"),
        *("float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
)
"""Names of the dtypes that stored zarr arrays may have."""
_BYTE_CARRIED = frozenset({"uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"})
_KEY_IMPLS = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}
KEY_WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}  # uint32 words of a key


@dataclass(frozen=True)
class LeafSpec:
    """Kind, dtype and shape of a leaf."""

    # ``jax``, ``numpy``, ``key``, ``numpy_scalar``, ``int``, ``float``, ``bool``, ``complex``, ``bytes``, or one of TEXT_KINDS.
    kind: str
    dtype: str = ""  # of the elements; of a key the PRNG implementation; empty for text
    shape: tuple[int, ...] = ()  # of a key array without the uint32 words of a key
    # ``weak``: a weakly typed jax scalar; the bit generator's name of a Generator; ``>``: a big-endian numpy array.
    detail: str = ""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.dtype, self.shape, self.detail))

    @cached_property
    def stored_dtype(self) -> str:
        """Name of the dtype on disk."""
        if self.kind == "key":
            return "uint32"
        return "uint8" if self.dtype in _BYTE_CARRIED else self.dtype

    @cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape on disk."""
        return (*self.shape, KEY_WORDS[self.dtype]) if self.kind == "key" else self.shape

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The stored dtype as numpy's."""
        return dtype_from_name(self.stored_dtype)

    @cached_property
    def stored_bytes(self) -> int:
        """Uncompressed size on disk in bytes; 0 for text."""
        if self.kind in TEXT_KINDS:
            return 0
        return math.prod(self.stored_shape) * self.numpy_dtype.itemsize

    def __str__(self) -> str:
        if self.kind in TEXT_KINDS:
            return {"bigint": "int"}.get(self.kind, self.kind)
        if self.kind in PYTHON_NUMBERS:
            return self.kind
        name = f"key<{self.dtype}>" if self.kind == "key" else self.dtype
        return f"{name}[{','.join(map(str, self.shape))}]"


def dtype_from_name(name: str) -> np.dtype[Any]:
    """The numpy or ml_dtypes dtype of that name; raises ValueError if no checkpoint holds it."""
    found = _DTYPES.get(name)
    if found is None:
        raise ValueError(f"dtype {name!r} is not one that a checkpoint holds")
    return found


_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in STORED_DTYPES | _BYTE_CARRIED}


@lru_cache(4096)
def leaf_spec(
    kind: str, dtype: str = "", shape: tuple[int, ...] = (), detail: str = ""
) -> LeafSpec:
    """A cached ``LeafSpec``: equal leaves share one object, which saves time and memory."""
    return LeafSpec(kind, dtype, shape, detail)


@lru_cache(1024)
def _dtype_name(dtype: Any) -> str:
    return dtype.name


def is_key_dtype(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def as_abstract(leaf: Any) -> Any:
    """A ``jax.ShapeDtypeStruct`` for an object with ``shape`` and ``dtype``, with its sharding if that is jax's; else the leaf."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return leaf
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None or isinstance(leaf, type):
        return leaf
    try:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, jax.sharding.Sharding):
            sharding = None
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)
    except (TypeError, ValueError):
        return leaf


def describe(leaf: Any, path: Path) -> LeafSpec:
    """The ``LeafSpec`` of a value or of a description of an array; raises UnsupportedLeaf with advice if it cannot be saved."""
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        if isinstance(leaf, jax.core.Tracer):
            raise _unsupported(leaf, path, "it is being traced: save outside of jit and grad")
        return _describe_jax(leaf, path)
    if isinstance(leaf, np.ndarray):
        if type(leaf) not in (np.ndarray, np.memmap):
            raise _unsupported(leaf, path, "it is more than its numbers: convert to a plain array")
        return _describe_numpy(leaf, path)
    if isinstance(leaf, np.generic):
        return leaf_spec("numpy_scalar", _describe_numpy(leaf, path).dtype)
    return _describe_python(leaf, path)


def _describe_jax(leaf: Any, path: Path) -> LeafSpec:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        advice = "its buffer was donated or deleted: save before the step that donates it"
        raise _unsupported(leaf, path, advice)
    if getattr(getattr(leaf.sharding, "spec", None), "unreduced", None):
        advice = "each device holds a part of its sum: save jax.sharding.reshard(array, jax.sharding.PartitionSpec())"
        raise _unsupported(leaf, path, advice)
    dtype = leaf.dtype
    if not isinstance(dtype, np.dtype):  # jax's extended dtypes, which are those of PRNG keys
        short = str(dtype).removeprefix("key<").removesuffix(">")  # ``key<fry>``
        impl = _KEY_IMPLS.get(short, short)
        if impl not in KEY_WORDS:
            raise _unsupported(leaf, path, f"PRNG implementation {impl!r} is not known")
        return LeafSpec("key", impl, tuple(leaf.shape))
    if _dtype_name(dtype) not in _DTYPES:
        advice = f"its dtype {dtype} cannot be stored: convert or leave it out"
        raise _unsupported(leaf, path, advice)
    weak = getattr(leaf, "weak_type", False) and not leaf.shape
    return leaf_spec("jax", _dtype_name(dtype), tuple(leaf.shape), "weak" if weak else "")


def _describe_numpy(leaf: Any, path: Path) -> LeafSpec:
    # numpy has many dtypes that cannot be stored: objects, dates, records.
    dtype, name = leaf.dtype, _dtype_name(leaf.dtype)
    if name not in _DTYPES or dtype.itemsize != _DTYPES[name].itemsize:
        advice = f"its dtype {dtype} cannot be stored: convert it to numbers, or leave it out"
        raise _unsupported(leaf, path, advice)
    return leaf_spec("numpy", name, leaf.shape, "" if dtype.isnative else ">")


_SCALARS = {bool: "bool", float: "float64", complex: "complex128"}


def _describe_python(leaf: Any, path: Path) -> LeafSpec:
    cls = type(leaf)
    if cls is int:
        return leaf_spec("int", "int64") if -(2**63) <= leaf < 2**63 else leaf_spec("bigint")
    if cls in _SCALARS:
        return leaf_spec(cls.__name__, _SCALARS[cls])
    if cls is str:
        return leaf_spec("str")
    if cls is bytes:
        return leaf_spec("bytes", "uint8", (len(leaf),))
    if isinstance(leaf, np.random.Generator):
        return leaf_spec("generator", detail=type(leaf.bit_generator).__name__)
    if isinstance(leaf, np.random.RandomState):
        return leaf_spec("random_state")
    if cls is random.Random:
        return leaf_spec("py_random")
    raise _unsupported(leaf, path, advice_for(leaf))


def _unsupported(leaf: Any, path: Path, advice: str) -> UnsupportedLeaf:
    if getattr(getattr(leaf, "dtype", None), "names", None) == ("float0",):
        advice = (
            "it is the gradient of integers, and holds nothing: leave it out, as in jax.tree.map(lambda g: None if g.dtype == "
            "jax.dtypes.float0 else g, gradients)"
        )
    return unsupported(leaf, format_path(path), advice)


def to_text(leaf: Any, spec: LeafSpec) -> str:
    """The text as which a leaf of TEXT_KINDS is stored."""
    match spec.kind:
        case "str":
            return leaf
        case "bigint":
            return hex(leaf)  # Python limits the length of decimal conversions, not of hex
        case "generator":
            bits = leaf.bit_generator
            seed = bits.seed_seq  # which ``spawn`` uses
            seeded = {"seed": seed.state} if isinstance(seed, np.random.SeedSequence) else {}
            return json.dumps({"state": bits.state, **seeded}, default=_plain)
        case "random_state":
            return json.dumps(leaf.get_state(legacy=False), default=_plain)
        case _:
            return json.dumps(leaf.getstate())


_MOST_SEED_WORDS = 2**24  # most uint32 words of a SeedSequence's pool; numpy's default is 4


def from_text(text: str, spec: LeafSpec) -> Any:
    """The leaf from its text, the inverse of ``to_text``; ValueError, KeyError or TypeError if it is no state of this kind."""
    match spec.kind:
        case "str":
            return text
        case "bigint":
            return int(text, 16)
        case "generator":
            value = json.loads(text, object_hook=_unplain)
            seed = value.get("seed")
            if seed and not seed["pool_size"] <= _MOST_SEED_WORDS:
                raise ValueError(f"impossible pool of a seed, {seed['pool_size']} words")
            bits = _bit_generator(spec.detail)(np.random.SeedSequence(**seed) if seed else None)
            bits.state = value["state"]
            return np.random.Generator(bits)
        case "random_state":
            value = json.loads(text, object_hook=_unplain)
            state = np.random.RandomState(_bit_generator(value["bit_generator"])())
            state.set_state(value)
            return state
        case _:
            version, internal, gauss = json.loads(text)
            made = random.Random()
            made.setstate((version, tuple(internal), gauss))
            return made


def _bit_generator(name: str) -> Any:
    found = getattr(np.random, name, None)
    if not (isinstance(found, type) and issubclass(found, np.random.BitGenerator)):
        raise ValueError(f"unknown bit generator {name!r}")
    return found


def _plain(value: Any) -> Any:
    """What stands in JSON for an array or a number of numpy."""
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.name}
    return value.item()


def _unplain(value: dict[str, Any]) -> Any:
    if value.keys() == {"array", "dtype"}:
        return np.array(value["array"], dtype_from_name(value["dtype"]))
    return value


def to_host_array(leaf: Any, spec: LeafSpec) -> Array:
    """The array as which a host leaf is stored; a view of a numpy array if possible."""
    if type(leaf) is np.ndarray and leaf.dtype == spec.numpy_dtype:
        return leaf
    if spec.kind == "bytes":
        return np.frombuffer(leaf, np.uint8)
    return as_stored(np.asarray(leaf, dtype_from_name(spec.dtype)), spec)


def as_stored(array: Array, spec: LeafSpec) -> Array:
    """A view of the array with the dtype that is stored."""
    return array if array.dtype == spec.numpy_dtype else array.view(spec.numpy_dtype)


def as_logical(array: Array, spec: LeafSpec) -> Array:
    """A view of the stored array with the leaf's own dtype; key data stays uint32."""
    if spec.kind == "key" or spec.stored_dtype == spec.dtype:
        return array
    return array.view(dtype_from_name(spec.dtype))


def from_host_array(array: Array, spec: LeafSpec) -> Any:
    """The leaf of a host kind (numpy, scalar, bytes); the inverse of ``to_host_array``."""
    match spec.kind:
        case "bytes":
            return array.tobytes()
        case "int" | "float" | "bool" | "complex":
            return array.item()
        case "numpy_scalar":
            return as_logical(array, spec)[()]
        case _:
            array = as_logical(array, spec)
            return array.astype(array.dtype.newbyteorder(">")) if spec.detail == ">" else array


def converted(
    array: Array, dtype: np.dtype[Any], *, rounds: bool = True, overflows: bool = True
) -> tuple[Array, Array]:
    """The array in another dtype, and those of its values that are lost. Between floats numbers round, and beyond the largest
    they become infinite, as in ``astype``; a fraction is cut off on the way to an integer. Lost are integers that the wanted
    dtype does not hold, and NaN and what is too large where integers are wanted. With ``rounds=False`` a float that changes its
    value is lost, too; with ``overflows=False`` a finite one that becomes infinite. A complex array needs a complex dtype.
    """
    if array.dtype == dtype:
        return array, array.reshape(-1)[:0]
    from_, to = family(array.dtype.name), family(dtype.name)
    exact = array
    if from_ == "i" and array.dtype.kind not in "iu":  # of 2 or 4 bits
        exact = array.astype(np.int8)
    elif not np.can_cast(array.dtype, dtype, "unsafe"):  # as between some floats of 8 bits
        exact = array.astype(np.float32)
    with np.errstate(all="ignore"):
        if from_ == "f" and to == "i" and dtype.kind not in "iu":
            # in steps that every dtype of ml_dtypes has
            made = exact.astype(np.float32).astype(np.int32).astype(dtype)
        else:
            made = exact.astype(dtype)
        lost: Any = False
        if from_ == "i" and to in "ib":
            least, most = (0, 1) if to == "b" else _bounds(dtype)
            lost = (exact < least) | (exact > most) if _reaches(exact, least, most) else False
        elif from_ == "i":
            lost = _rounded(exact, made, dtype)
        elif from_ == "f" and to == "i":
            least, most = _bounds(dtype)
            whole = np.trunc(exact.astype(np.float64))
            # both limits are exact in a float64
            lost = ~((whole >= float(least)) & (whole < float(most + 1)))
        elif to in "fc":
            if not rounds:
                lost = (made.astype(array.dtype) != array) & ~np.isnan(array)
            elif not overflows:
                lost = np.isfinite(array) & ~np.isfinite(made)
    return made, array[lost] if np.any(lost) else array.reshape(-1)[:0]


def family(name: str) -> str:
    """``b``, ``i``, ``f`` or ``c``, by the name of a dtype: numpy does not know all of them."""
    if name.startswith(("int", "uint")):
        return "i"
    return "f" if name.startswith("bfloat") else name[:1]


def _bounds(dtype: np.dtype[Any]) -> tuple[int, int]:
    limits = ml_dtypes.iinfo(dtype)
    return int(limits.min), int(limits.max)


def _reaches(array: Array, least: int, most: int) -> bool:
    """Whether an integer is beyond these limits; finds out without a mask as large as the array."""
    return bool(array.size) and (int(array.min()) < least or int(array.max()) > most)


def _rounded(integers: Array, made: Array, dtype: np.dtype[Any]) -> Any:
    """Which integers have another value as floats of a dtype."""
    part = made.real if family(dtype.name) == "c" else made
    digits = int(ml_dtypes.finfo(part.dtype).nmant) + 1
    if not _reaches(integers, -(2**digits), 2**digits) and part.dtype.itemsize > 1:
        return False
    # A float of p digits is an odd number of at most p digits, times a power of 2. Comparing as floats alone
    # would compare two rounded numbers.
    size = np.where(integers < 0, -integers.astype(np.uint64), integers.astype(np.uint64))
    odd = size // np.maximum(size & (~size + np.uint64(1)), np.uint64(1))
    return (odd >= 2**digits) | (part.astype(np.float64) != integers.astype(np.float64))
