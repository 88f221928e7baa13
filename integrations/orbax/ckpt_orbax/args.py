"""``ckpt_orbax.args``, for ``from ckpt_orbax.args import ...``."""

from ckpt_orbax._refused import refusing
from ckpt_orbax.v0.args import *  # noqa: F403

__getattr__ = refusing(__name__)
