"""``ckpt_orbax.checkpoint_utils``, for ``from ckpt_orbax.checkpoint_utils import ...``."""

from ckpt_orbax.v0.checkpoint_utils import *  # noqa: F403
