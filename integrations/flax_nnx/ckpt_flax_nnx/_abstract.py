"""Abstract models, shapes and shardings to restore into without initializing arrays; and shardings of parameters for their Optax states."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

import jax
from flax import nnx
from flax.nnx import spmd
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckpt_core.arguments import answering

T = TypeVar("T")
_OBJECTS = (nnx.Module, nnx.Optimizer)


class _Checkpointer(Protocol):
    def restore_latest(self, **items: Any) -> Any: ...


@answering
def abstract(make: Callable[[], T], mesh: Mesh | None = None) -> T:
    """The result of ``make()`` with shapes, dtypes and shardings in place of arrays.

    A restore reads every array straight onto its sharding; after it the model can be used. No array
    is initialized first::

        model, optimizer = abstract(make, mesh)
        ckpt.restore(path, model=model, optimizer=optimizer)

    Args:
        make: makes NNX objects: one, or a tuple, list or dictionary of them.
        mesh: the mesh for the arrays. Variables with sharding annotations are sharded by
            them, everything else is replicated. The default is the mesh of ``jax.set_mesh``;
            without one, the shardings stay undefined.

    Raises:
        TypeError: an object was passed instead of the function that makes it.
        ValueError: the model has annotations, and there is no mesh to resolve them on.
    """
    mesh = _current_mesh() if mesh is None else mesh
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        graphdef, state = _eval_split(make)
        return nnx.merge(graphdef, state if mesh is None else _placed(state, mesh))


def restore_or_init(
    checkpointer: _Checkpointer, make: Callable[[], T], mesh: Mesh | None = None, **targets: Any
) -> tuple[T, Any]:
    """The objects of ``make()``, restored from the latest checkpoint or new; and ``Restored`` or None.

    From a checkpoint, the arrays are read straight onto their devices and none is initialized first.
    Without a checkpoint, ``make`` runs; on a mesh it runs compiled, so that no device holds more than
    its shards. The dictionary that ``make`` returns names the items to restore; save the same
    items later::

        items, restored = restore_or_init(checkpointer, make, mesh, data=iterator)
        for step in range(restored.step + 1 if restored else 0, total):
            ...
            checkpointer.save(step, **items, data=iterator)

    Args:
        checkpointer: a ``ckpt_core.Checkpointer``.
        make: makes the NNX objects. A dictionary has one item per key; anything else is the single
            item of ``checkpointer.save(step, state)``.
        mesh: as for ``abstract``.
        **targets: further items to restore from the same step, such as a data iterator.

    Raises:
        TypeError: ``make`` returns no dictionary, and there are further targets; or is no function.
    """
    if not hasattr(checkpointer, "restore_latest"):
        raise TypeError(
            f"the Checkpointer comes first, and then the function that makes the objects, got a {type(checkpointer).__name__}"
        )
    wanted = abstract(make, mesh)
    if isinstance(wanted, dict):
        restored = checkpointer.restore_latest(**wanted, **targets)
    elif targets:
        raise TypeError(
            "restore_or_init with further targets needs a make() that returns a dictionary of items"
        )
    else:
        restored = checkpointer.restore_latest(state=wanted)
    if restored is not None:
        return wanted, restored
    return _init(make, _current_mesh() if mesh is None else mesh), None


def _init(make: Callable[[], T], mesh: Mesh | None) -> T:
    """Calls ``make()``; on a mesh compiled, with the shardings of its annotations."""
    if mesh is None:
        return make()
    with jax.set_mesh(mesh):
        graphdef, wanted = _eval_split(make)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, _placed(wanted, mesh))
        state = jax.jit(lambda: nnx.split(make(), graph=True)[1], out_shardings=shardings)()
    return nnx.merge(graphdef, state)


def _eval_split(make: Callable[[], T]) -> tuple[nnx.GraphDef[T], nnx.State[Any, Any]]:
    """``nnx.split(make())``, abstract."""
    if isinstance(make, _OBJECTS) or not callable(make):
        name = type(make).__name__
        raise TypeError(
            f"make must be a function that makes the objects, and a {name} itself was passed: write lambda: {name}(...)"
        )
    try:
        # Not nnx.eval_shape, which on a mesh fails for Variables without an array (optax.masked).
        return jax.eval_shape(lambda: nnx.split(_without_classes(make()), graph=True))
    except ValueError as error:
        if "mesh" not in str(error):
            raise
        raise ValueError(
            "the model has sharding annotations, which need a mesh: pass mesh=, or call inside "
            "`with jax.set_mesh(mesh):`"
        ) from error


def _without_classes(made: T) -> T:
    """``made``; TypeError if it holds a class in the place of an object."""
    for one in jax.tree.leaves(made, is_leaf=lambda one: isinstance(one, _OBJECTS)):
        if isinstance(one, type) and issubclass(one, _OBJECTS):
            name = one.__name__
            raise TypeError(
                f"make() gives the class {name}, and an object of it is wanted: write {name}(...) in its place"
            )
    return made


def _current_mesh() -> Mesh | None:
    """The concrete mesh of an enclosing ``jax.set_mesh``, or None."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def _placed(state: nnx.State[Any, Any], mesh: Mesh) -> nnx.State[Any, Any]:
    """The abstract state with shardings on ``mesh``."""

    def placed(node: Any) -> Any:
        annotated = spmd.get_var_pspec(node) if isinstance(node, nnx.Variable) else None
        return jax.tree.map(lambda leaf: _on_mesh(leaf, mesh, annotated), node)

    return jax.tree.map(placed, state, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _on_mesh(leaf: Any, mesh: Mesh, annotated: PartitionSpec | None) -> jax.ShapeDtypeStruct:
    # On an Explicit mesh, tracing gives a sharding over an abstract mesh: keep its spec.
    traced = getattr(leaf.sharding, "spec", None)
    sharding = NamedSharding(mesh, traced or annotated or PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


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
    shardings = [getattr(leaf, "sharding", None) for _, leaf in leaves]
    meshes = [one.mesh for one in shardings if isinstance(one, NamedSharding)]
    mesh = next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)
    elsewhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())

    def place(path: Any, leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        names = _entries(path)
        ends = (by_path.get(names[start:]) for start in range(len(names) + 1))  # the longest first
        twin = next((one for one in ends if one is not None and one.shape == leaf.shape), None)
        sharding = elsewhere if twin is None else getattr(twin, "sharding", None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, state)


def _entries(path: Any) -> tuple[str, ...]:
    """A JAX key path as texts, because a list of parameters may be a dict in the state."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
