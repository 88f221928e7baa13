"""Orbax's second API under its earlier name; and emergency managers, which say what to use instead."""

from ckpt_orbax import v1
from ckpt_orbax._refused import refusing
from ckpt_orbax.experimental import emergency

__all__ = ["emergency", "v1"]

__getattr__ = refusing(__name__)
