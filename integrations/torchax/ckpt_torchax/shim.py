"""Makes torchax 0.0.13 importable with torch 2.13. Delete it after torchax's next release.

torch 2.13 dropped named tensors, and with them 21 overloads of operators. torchax 0.0.13, the newest
release, refers to them in two tables when it is imported, and fails::

    AttributeError: The underlying op of 'aten.prod' has no overload name 'dim_Dimname'

It never calls them. So it is enough that the names exist: ``install`` makes each an alias of another
overload of the same operator. torchax's repository has the proper fix already.
"""

from __future__ import annotations

from typing import Any

import torch

_MISSING = {
    "all": ("dimname", "dimname_out"),
    "index_add": ("dimname",),
    "index_copy": ("dimname",),
    "index_copy_": ("dimname",),
    "index_fill": ("Dimname_Scalar", "Dimname_Tensor"),
    "index_fill_": ("Dimname_Scalar", "Dimname_Tensor"),
    "norm": ("names_ScalarOpt_dim", "names_ScalarOpt_dim_dtype", "names_dtype_out", "names_out"),
    "prod": ("dim_Dimname",),
    "std": ("correction_names", "correction_names_out", "names_dim", "names_out"),
    "std_mean": ("correction_names", "names_dim"),
    "unbind": ("Dimname",),
}


def install() -> list[str]:
    """Adds the missing names to torch and returns them, such as ``prod.dim_Dimname``.

    Call it before ``import torchax``. If torch has the names it does nothing.

    Example:
        >>> from ckpt_torchax import shim
        >>> added = shim.install()
        >>> import torchax
    """
    added: list[str] = []
    for operator, names in _MISSING.items():
        packet: Any = getattr(torch.ops.aten, operator)
        present = packet.overloads()
        for name in names:
            if name not in present and not hasattr(packet, name):
                setattr(packet, name, getattr(packet, present[0]))
                added.append(f"{operator}.{name}")
    return added
