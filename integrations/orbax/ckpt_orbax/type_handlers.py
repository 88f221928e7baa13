"""``ckpt_orbax.type_handlers``, for ``from ckpt_orbax.type_handlers import ...``."""

from ckpt_orbax.v0.type_handlers import *  # noqa: F403
