"""Loads checkpoints into plain CPU PyTorch."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

import ckpt_core as ckpt
from ckpt_core.arguments import answering
from ckpt_torchax import _bits, _modules, _tensors
from ckpt_torchax._weights import chosen_item

PathLike = str | os.PathLike[str]


@answering
def to_torch(path: PathLike, module: Any = None, *, item: str | None = None) -> Any:
    """A checkpoint as plain CPU tensors: a ``state_dict``, or the module with the values.

    It needs neither torchax nor a JAX device, whatever the checkpoint was saved from.

    Args:
        path: path of a checkpoint, or of one item in it.
        module: a module to set in place; from the meta device it moves to the CPU. int32 values that
            were int64 before torchax become int64 again.
        item: the item to load; needed if there are several and none is called ``model``.

    Raises:
        StructureMismatch: lists every difference to the module, before anything is read or changed.
        UnsupportedLeaf: torch lacks a dtype.

    Example::

        model.load_state_dict(to_torch("runs/1/step_100"))
    """
    if module is not None and isinstance(
        path, (str, os.PathLike)
    ):  # else they stand in another order
        _modules.refuse_no_module("to_torch", module)
    name = chosen_item(path, item)
    if module is None:
        return _as_state_dict(_tensors.tensors_of(ckpt.load(path, item=name, as_numpy=True)))
    if any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        _load_over_meta(path, module, name)
    else:
        ckpt.restore(path, items={name: module})
    return module


def _load_over_meta(path: PathLike, module: Any, item: str) -> None:
    """Loads into a copy with memory, and moves its tensors into the module on the meta device."""
    _modules.refuse_meta_buffers(module)
    names_of = _modules.names_of_tensors(module)
    filled = copy.deepcopy(module).to_empty(device="cpu")
    for names, tensor in names_of:
        made = _modules.tensor_at(filled, names[0])
        if not tensor.is_meta:  # made outside of the meta device, and maybe in no checkpoint
            made.data.copy_(tensor)
        elif not tensor.is_floating_point():
            made.zero_()  # uninitialized integers might not fit the checkpoint's dtype
        for name in names[1:]:  # to_empty unties
            _modules.put(filled, name, made)
    ckpt.restore(path, items={item: filled})
    for names, _ in names_of:
        for name in names:
            _modules.put(module, name, _modules.tensor_at(filled, name))


def _as_state_dict(tree: Any) -> Any:
    """Tied weights under all of their names, and counters as int64, which torchax stores as int32."""
    if not isinstance(tree, dict):
        return tree
    tied = _modules.first_names(tree)
    state = {name: value for name, value in tree.items() if name != _modules.TIED}
    state |= {name: state[first] for name, first in tied.items()}
    with _bits.plain_torch():
        for name, value in state.items():
            if str(name).endswith("num_batches_tracked") and isinstance(value, torch.Tensor):
                state[name] = value.to(torch.int64)
    return state
