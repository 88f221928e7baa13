"""``ckpt_orbax.checkpoint_manager``, for ``from ckpt_orbax.checkpoint_manager import ...``."""

from ckpt_orbax.v0.checkpoint_manager import *  # noqa: F403
