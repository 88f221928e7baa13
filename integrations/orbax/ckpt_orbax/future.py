"""``ckpt_orbax.future``, for ``from ckpt_orbax.future import ...``."""

from ckpt_orbax._refused import refusing
from ckpt_orbax.v0.future import *  # noqa: F403

__getattr__ = refusing(__name__)
