"""``ckpt_orbax.utils``, for ``from ckpt_orbax.utils import ...``."""

from ckpt_orbax._refused import refusing
from ckpt_orbax.v0.utils import *  # noqa: F403

__getattr__ = refusing(__name__)
