"""What a checkpoint says of itself without its arrays."""

from ckpt_orbax.metadata import tree, value
from ckpt_orbax.v0 import metadata as _metadata
from ckpt_orbax.v0.metadata import *  # noqa: F403

__all__ = ["tree", "value"]
__all__ += _metadata.__all__
