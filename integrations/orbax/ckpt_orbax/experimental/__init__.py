"""Orbax's second API under its earlier name; and emergency managers, which say what to use instead."""

from ckpt_orbax import _lone_names as emergency
from ckpt_orbax import v1

__all__ = ["emergency", "v1"]
