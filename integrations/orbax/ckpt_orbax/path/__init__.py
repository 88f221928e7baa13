"""Paths and step names."""

from ckpt_orbax.path import atomicity, atomicity_defaults, atomicity_types, format_utils, step
from ckpt_orbax.v1.path import Path, PathAwaitingCreation, PathLike

__all__ = [
    "Path",
    "PathAwaitingCreation",
    "PathLike",
    "atomicity",
    "atomicity_defaults",
    "atomicity_types",
    "format_utils",
    "step",
]
