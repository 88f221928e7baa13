"""``ckpt_orbax.checkpointers``, for ``from ckpt_orbax.checkpointers import ...``."""

from ckpt_orbax._refused import refusing
from ckpt_orbax.v0.checkpointers import *  # noqa: F403

__getattr__ = refusing(__name__)
