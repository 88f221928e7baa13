"""``ckpt_orbax.checkpointers``, for ``from ckpt_orbax.checkpointers import ...``."""

from ckpt_orbax.v0.checkpointers import *  # noqa: F403
