"""The measured libraries behind one interface: ckpt, others, and the lower bound of the disk.

To add a library, write a subclass of ``Library`` and a line in ``LIBRARIES``. What it measures is
imported at its first use; benchmarks of one that is not installed are skipped with that reason.
"""

from __future__ import annotations

import importlib
from typing import Any

from ckpt_core.bench._core import Skipped
from ckpt_core.bench.libraries._base import Library as Library
from ckpt_core.bench.libraries._files import Equinox, Floor, NumpySavez, Safetensors
from ckpt_core.bench.libraries._orbax import OrbaxV0Manager, OrbaxV1, OrbaxV1Uncompressed
from ckpt_core.bench.libraries._ours import Ckpt
from ckpt_core.bench.libraries._pytorch import TorchDcp, TorchSave

LIBRARIES: dict[str, type[Library]] = {
    "ckpt": Ckpt,
    "orbax_v1": OrbaxV1,
    "orbax_v1_uncompressed": OrbaxV1Uncompressed,
    "orbax_v0_manager": OrbaxV0Manager,
    "torch_dcp": TorchDcp,
    "torch_save": TorchSave,
    "safetensors": Safetensors,
    "numpy_savez": NumpySavez,
    "equinox": Equinox,
    "floor": Floor,
}


def installed(name: str) -> type[Library]:
    """The class of a library, with what it measures imported; raises ``Skipped`` if that is not installed."""
    kind = LIBRARIES[name]
    try:
        for module in kind.modules:
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Skipped(f"{name} is not installed: {error}") from error
    return kind


def make_library(options: Any) -> Library:
    """The library of options of ``SaveLoad``, ready to run; raises ``Skipped`` if it is not installed."""
    return installed(options.library)(options)
