"""What a checkpoint says of its trees."""

from ckpt_orbax._refused import refusing
from ckpt_orbax.v0.metadata import TreeMetadata

__all__ = ["TreeMetadata"]

__getattr__ = refusing(__name__)
