"""What a checkpoint says of its trees."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_orbax.v0.metadata import TreeMetadata


@dataclass
class ValueMetadataEntry:
    """What Orbax's file of a tree says of a leaf; ckpt makes none.

    Attributes:
        value_type: ``"jax.Array"``, ``"np.ndarray"``, ``"scalar"``, ``"string"``, ``"Dict"`` and the like.
        skip_deserialize: it is a node without leaves.
        write_shape: of an array, as it was written.
    """

    value_type: str
    skip_deserialize: bool = False
    write_shape: tuple[int, ...] | None = None


__all__ = ["TreeMetadata", "ValueMetadataEntry"]
