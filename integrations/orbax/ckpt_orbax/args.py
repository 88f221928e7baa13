"""``ckpt_orbax.args``, for ``from ckpt_orbax.args import ...``."""

from ckpt_orbax.v0.args import *  # noqa: F403
