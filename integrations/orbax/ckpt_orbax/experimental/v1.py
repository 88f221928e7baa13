"""``ckpt_orbax.v1`` under its earlier name."""

from ckpt_orbax._refused import refusing
from ckpt_orbax.v1 import *  # noqa: F403

__getattr__ = refusing(__name__)
