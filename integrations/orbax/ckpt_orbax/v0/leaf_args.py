"""How single leaves are saved and restored: ``SaveArgs``, ``RestoreArgs``, ``ArrayRestoreArgs``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from ckpt_orbax._leaves import as_sharding


@dataclass
class SaveArgs:
    """How a leaf is saved.

    Attributes:
        aggregate: of no effect, as in Orbax.
        dtype: the leaf is stored in this dtype.
        chunk_byte_size, shard_axes: of no effect; ckpt chooses the chunks.
    """

    aggregate: bool = False
    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()


@dataclass
class RestoreArgs:
    """How a leaf is restored.

    Attributes:
        restore_type: ``jax.Array``, ``np.ndarray``, ``int``, ``float``, ``str``; None as it was saved.
        dtype: the leaf is converted to this dtype.
    """

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
        if None not in (self.shape, self.global_shape) and self.shape != self.global_shape:
            raise ValueError(
                f"shape and global_shape are the same thing, got {self.shape} and {self.global_shape}"
            )
        self.shape = self.global_shape = self.global_shape if self.shape is None else self.shape


@dataclass
class SingleReplicaArrayRestoreArgs(ArrayRestoreArgs):
    """As ``ArrayRestoreArgs``; one process reads what several hold, and sends it to the others.

    Attributes:
        single_replica_sharding: of no effect, as in Orbax.
    """

    single_replica_sharding: Any = None


def wants_broadcast(restore_args: Any) -> bool:
    """Whether a leaf is to be read once and sent on."""
    leaves = jax.tree.leaves(restore_args)
    return any(isinstance(leaf, SingleReplicaArrayRestoreArgs) for leaf in leaves)


def sharding_of(args: RestoreArgs) -> Any:
    """The sharding that the arguments ask for; None if they leave it open."""
    given = getattr(args, "sharding", None)
    if given is not None:
        return as_sharding(given)
    mesh, axes = getattr(args, "mesh", None), getattr(args, "mesh_axes", None)
    return None if mesh is None or axes is None else jax.sharding.NamedSharding(mesh, axes)
