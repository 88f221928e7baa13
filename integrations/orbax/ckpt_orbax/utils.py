"""``ckpt_orbax.utils``, for ``from ckpt_orbax.utils import ...``."""

from ckpt_orbax.v0.utils import *  # noqa: F403
