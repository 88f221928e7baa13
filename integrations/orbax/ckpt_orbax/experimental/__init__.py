"""Orbax's second API under its earlier name; and emergency managers, which say what to use instead."""

from ckpt_orbax import _lone_names, v1 as v1

emergency = _lone_names
