"""``ckpt_orbax.tree``, for ``from ckpt_orbax.tree import ...``."""

from ckpt_orbax.v0.tree import *  # noqa: F403
