"""How the state that a restore gave differs from the one that was saved: bits, dtypes and places.

For code that runs in processes of ``jax.distributed``: arrays may lie on other processes.
"""

import random
from typing import Any

import jax
import numpy as np


def differences(saved: Any, found: Any, *, types_too: bool = True) -> list[str]:
    """One line for each leaf that is not as it was saved; with ``types_too`` containers must have the same types. Empty if all are."""
    shape, other = jax.tree_util.tree_structure(saved), jax.tree_util.tree_structure(found)
    told = [f"{shape} became {other}"] if types_too and shape != other else []
    ours, theirs = _by_name(saved), _by_name(found)
    told += [f"only on one side: {name}" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in ours.keys() & theirs.keys():
        how = _difference(ours[name], theirs[name])
        if how:
            told.append(f"{name}: {how}")
    return told


def _by_name(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _difference(one: Any, two: Any) -> str:
    if not isinstance(one, jax.Array):
        return "" if _plain(one) == _plain(two) else f"{one!r} became {two!r}"
    if not isinstance(two, jax.Array):
        return f"an array became a {type(two).__name__}"
    if str(one.aval) != str(two.aval):
        return f"{one.aval} became {two.aval}"
    if one.committed != two.committed:
        return f"committed={one.committed} became {two.committed}"
    if not one.sharding.is_equivalent_to(two.sharding, one.ndim):
        return f"{one.sharding} became {two.sharding}"
    return "" if _bits(one) == _bits(two) else "other values"


def _plain(value: Any) -> tuple[Any, ...]:
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype, value.shape, value.tobytes()
    if isinstance(value, np.random.Generator):
        return type(value), repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return type(value), repr(value.get_state(legacy=False))
    if isinstance(value, random.Random):
        return type(value), value.getstate()
    return type(value), repr(value)


def _bits(array: Any) -> list[tuple[int, bytes]]:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return [(one.device.id, np.asarray(one.data).tobytes()) for one in array.addressable_shards]


def abstract(state: Any, *, bare: bool = False) -> Any:
    """The state with each array as its shape and dtype, with the sharding of those that are placed; ``bare``: without any."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        where = leaf.sharding if leaf.committed and not bare else None
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where, weak_type=weak)

    return jax.tree.map(one, state)
