"""``ckpt_orbax.future``, for ``from ckpt_orbax.future import ...``."""

from ckpt_orbax.v0.future import *  # noqa: F403
