"""Gives the slots of an optimizer's state the shardings of their parameters."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

T = TypeVar("T")
_Path = tuple[str, ...]


def like_params(state: T, params: Any) -> T:
    """The state's shapes and dtypes with the shardings of the parameters: a target for ``load``.

    A leaf is a slot of a parameter if its path ends with the whole path of the parameter, and it has
    the same shape (``0/mu/layer/kernel`` is a slot of ``layer/kernel``). Everything else, such as
    counters and factored moments, is replicated over the mesh of the parameters::

        wanted = jax.eval_shape(tx.init, params)
        opt_state = ckpt.load(path, like_params(wanted, params), item="opt_state")

    ``jax.eval_shape`` alone gives no shardings, and ``jax.jit(tx.init)`` replicates the slots.

    Args:
        state: an Optax state, live or from ``jax.eval_shape``.
        params: the parameters, live or abstract, with the shardings to use.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    by_path = {_entries(path): leaf for path, leaf in leaves}
    mesh = _mesh_of([leaf for _, leaf in leaves])
    elsewhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())

    def place(path: Any, leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        twin = _parameter_of(_entries(path), leaf, by_path)
        sharding = elsewhere if twin is None else getattr(twin, "sharding", None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, state)


def _parameter_of(path: _Path, leaf: Any, by_path: dict[_Path, Any]) -> Any:
    """The parameter with the longest path that ends the leaf's path; None if there is none."""
    for start in range(len(path) + 1):
        parameter = by_path.get(path[start:])
        if parameter is not None and parameter.shape == leaf.shape:
            return parameter
    return None


def _entries(path: Any) -> _Path:
    """A JAX key path as texts, because a list of parameters may be a dict in the state."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def _mesh_of(leaves: list[Any]) -> Mesh | None:
    shardings: list[Sharding] = [leaf.sharding for leaf in leaves if hasattr(leaf, "sharding")]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)
