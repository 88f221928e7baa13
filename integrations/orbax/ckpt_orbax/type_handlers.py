"""Arguments of single leaves; and Orbax's handlers of types, which are names: ckpt stores each type of leaf in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax

from ckpt_orbax._leaves import PLACEHOLDER as PLACEHOLDER, as_sharding
from ckpt_orbax._refused import not_offered


@dataclass
class SaveArgs:
    """How a leaf is saved: in ``dtype``. The rest is of no effect: ckpt chooses the chunks."""

    aggregate: bool = False
    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()


@dataclass
class RestoreArgs:
    """How a leaf is restored: as ``jax.Array``, ``np.ndarray``, ``int``, ``float``, ``str`` or None, as saved; in ``dtype``."""

    restore_type: Any = None
    dtype: Any = None


@dataclass
class ArrayRestoreArgs(RestoreArgs):
    """How a leaf is restored as a ``jax.Array``.

    Attributes:
        mesh, mesh_axes: a ``NamedSharding`` of these.
        sharding: a sharding, a ``Format`` or the sharding of a metadata; before ``mesh``.
        global_shape, shape: two names of the shape, which must be the saved one.
        strict: False is refused where the shape differs: ckpt does not pad or cut arrays.
    """

    restore_type: Any = jax.Array
    mesh: Any = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        shape, whole = self.shape, self.global_shape
        if None not in (shape, whole) and shape != whole:
            raise ValueError(f"shape and global_shape are the same thing, got {shape} and {whole}")
        self.shape = self.global_shape = whole if shape is None else shape


@dataclass
class SingleReplicaArrayRestoreArgs(ArrayRestoreArgs):
    """As ``ArrayRestoreArgs``; one process reads what several hold, and sends it on. Its own sharding is of no effect."""

    single_replica_sharding: Any = None


def sharding_of(args: RestoreArgs) -> Any:
    """The sharding that the arguments ask for; None if they leave it open."""
    given = getattr(args, "sharding", None)
    if given is not None:
        return as_sharding(given)
    mesh, axes = getattr(args, "mesh", None), getattr(args, "mesh_axes", None)
    return None if mesh is None or axes is None else jax.sharding.NamedSharding(mesh, axes)


class ParamInfo(SimpleNamespace):
    """Describes a leaf to a handler of types, of which ckpt calls none: for programs that only name it."""


class TypeHandler:
    """Base of handlers of types; ckpt calls none of them."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


class ArrayHandler(TypeHandler):
    """Stands for the way in which ckpt stores jax arrays; each process writes what it holds alone."""


class SingleReplicaArrayHandler(ArrayHandler):
    """As ``ArrayHandler``; leaves with ``SingleReplicaArrayRestoreArgs`` are read once and sent on."""


def register_type_handler(
    ty: Any, handler: Any, func: Callable[[Any], bool] | None = None, override: bool = False
) -> None:
    """Accepts what changes nothing: Orbax's handlers of arrays, and those of types that ckpt refuses as leaves anyhow.

    Raises:
        NotOffered: a handler of your own for arrays.
    """
    own = type(handler) not in (ArrayHandler, SingleReplicaArrayHandler)
    if own and isinstance(ty, type) and issubclass(ty, jax.Array):
        raise not_offered(
            f"register_type_handler({ty.__name__}, {type(handler).__name__}())",
            "ckpt stores each type of leaf in one way, which Orbax reads",
            "an item of its own, with a CheckpointHandler of yours or with get_state() and set_state()",
        )
