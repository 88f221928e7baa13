"""``ckpt_orbax.checkpoint_managers``, for ``from ckpt_orbax.checkpoint_managers import ...``."""

from ckpt_orbax.v0.checkpoint_managers import *  # noqa: F403
