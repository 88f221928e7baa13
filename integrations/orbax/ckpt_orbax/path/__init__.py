"""Paths and step names."""

import os
from typing import Any

from ckpt_orbax import _lone_names as atomicity
from ckpt_orbax._paths import path_type
from ckpt_orbax.path import step

Path: Any = path_type()
PathLike = str | os.PathLike[str]
PathAwaitingCreation = Any
"""What a handler's ``save`` gets: ``await it.await_creation()`` is the directory."""

__all__ = ["Path", "PathAwaitingCreation", "PathLike", "atomicity", "step"]
