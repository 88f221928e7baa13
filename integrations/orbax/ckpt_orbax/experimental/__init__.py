"""Orbax's second API under its earlier name; and emergency managers, which say what to use instead."""

from ckpt_orbax import v1 as v1
from ckpt_orbax._modules import emergency as emergency
