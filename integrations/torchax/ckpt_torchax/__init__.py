"""PyTorch for ckpt: modules and tensors on JAX arrays (torchax), and plain CPU PyTorch.

Saving and restoring needs no import of this package: ``ckpt_core`` loads ``ADAPTER`` when
it meets an object of torch or torchax. Some functions are for the user:

``load_into(path, module)``
    fills a module on the meta device, reading straight onto the devices.
``to_torch(path)``
    loads plain CPU tensors, without torchax and without a JAX device.
``export_file(path, file)`` and ``import_file(file, path)``
    convert a checkpoint to ``.safetensors`` or ``.pt`` and back, by ``ckpt_core.convert``.

Each name is imported at its first use (PEP 562): ``import ckpt_torchax`` imports no torch, and this
package never imports torchax; the user's program does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_torchax._adapter import ADAPTER as ADAPTER, TorchAdapter as TorchAdapter
    from ckpt_torchax._fill import load_into as load_into, to_torch as to_torch
    from ckpt_torchax._weights import export_file as export_file, import_file as import_file

_HOMES = {
    "ADAPTER": "_adapter",
    "TorchAdapter": "_adapter",
    "export_file": "_weights",
    "import_file": "_weights",
    "load_into": "_fill",
    "to_torch": "_fill",
}

__all__ = ["ADAPTER", "TorchAdapter", "export_file", "import_file", "load_into", "to_torch"]


if not TYPE_CHECKING:  # to a type checker, a name that is not above is a mistake

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'ckpt_torchax' has no attribute {name!r}")
        try:
            home = importlib.import_module(f"ckpt_torchax.{_HOMES[name]}")
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            message = f"ckpt_torchax.{name} needs torch: pip install 'ckpt-core[torchax]'"
            raise ModuleNotFoundError(message, name="torch") from error
        value = getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
