"""``ckpt_orbax.options``, for ``from ckpt_orbax.options import ...``."""

from ckpt_orbax.v0.options import *  # noqa: F403
