"""Orbax's private modules: importing them says what to import instead."""

from ckpt_orbax._refused import missing_name

raise ImportError(str(missing_name("ckpt_orbax", "_src")))
