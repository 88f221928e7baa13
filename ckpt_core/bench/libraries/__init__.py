"""The measured libraries behind one interface: ckpt, others, and the lower bound of the disk.

To add a library, write a subclass of ``Library`` and a line in ``_HOMES``. A library is imported
at its first use; benchmarks of one that is not installed are skipped with that reason.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ckpt_core.bench._core import Skipped
from ckpt_core.bench._schema import nearest
from ckpt_core.bench.libraries._base import Library as Library

_HOMES = {
    "ckpt": ("_ours", "Ckpt"),
    "orbax_v1": ("_orbax", "OrbaxV1"),
    "orbax_v1_uncompressed": ("_orbax", "OrbaxV1Uncompressed"),
    "orbax_v0_manager": ("_orbax", "OrbaxV0Manager"),
    "torch_dcp": ("_pytorch", "TorchDcp"),
    "torch_save": ("_pytorch", "TorchSave"),
    "safetensors": ("_files", "Safetensors"),
    "numpy_savez": ("_files", "NumpySavez"),
    "equinox": ("_files", "Equinox"),
    "floor": ("_files", "Floor"),
}

NAMES = tuple(_HOMES)


def library(name: str) -> type[Library]:
    """The class of a library by its name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in _HOMES:
        raise ValueError(f"no library {name!r}{nearest(name, NAMES)}")
    home, class_name = _HOMES[name]
    return getattr(importlib.import_module(f"ckpt_core.bench.libraries.{home}"), class_name)


def make_library(options: Any) -> Library:
    """The library of options of ``SaveLoad``, ready to run.

    Raises:
        Skipped: it is not installed, or does not support the settings.
    """
    name = str(options.library)
    kind = library(name)
    for module in kind.modules:
        if importlib.util.find_spec(module) is None:
            raise Skipped(f"{name} is not installed: no module {module!r}")
    reason = kind.refuses(options)
    if reason is not None:
        raise Skipped(f"{name} {reason}")
    return kind(options)


__all__ = ["NAMES", "Library", "library", "make_library"]
