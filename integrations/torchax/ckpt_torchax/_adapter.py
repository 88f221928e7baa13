"""The adapter that the entry points ``torch`` and ``torchax`` name."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ckpt_torchax import _modules, _optimizers, _tensors, _torchax


class TorchAdapter:
    """Gets and sets the state of torch and torchax objects, in place: modules (bare, in a JittableModule, compiled), tensors,
    random generators, torchax environments, and what has ``state_dict`` and ``load_state_dict``.
    """

    arrays_are_writable = True
    """On a CPU ``tensor.cpu()`` of torchax shares the memory of its jax array."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._scheduled: weakref.WeakSet[Any] = weakref.WeakSet()
        self._orders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def accepts(self, cls: type, /) -> bool:
        """Whether the adapter handles objects of this class."""
        if issubclass(cls, (torch.Tensor, torch.nn.Module, torch.Generator)):
            return True
        return _torchax.is_environment_class(cls) or all(
            callable(getattr(cls, name, None)) for name in ("state_dict", "load_state_dict")
        )

    def get_state(self, obj: Any, /) -> Any:
        """The state as arrays: jax arrays of torchax tensors, numpy views of CPU tensors; UnsupportedLeaf for other tensors.

        Nothing is copied: torchax replaces arrays instead of writing to them, and an asynchronous save copies other memory.
        """
        if isinstance(obj, torch.Tensor):
            return _tensors.read(obj, "tensor")
        return _functions_for(obj).get_state(obj)

    def get_constants(self, obj: Any, /) -> Mapping[str, Any]:
        """Numbers in a module's attributes, such as a count of updates; names of an optimizer's parameters."""
        if isinstance(obj, torch.optim.Optimizer):
            return _optimizers.names_beside(self._names.get(obj) or _optimizers.names_of(obj, {}))
        return _modules.numbers_in(obj) if isinstance(obj, torch.nn.Module) else {}

    def meet(self, obj: Any, others: Mapping[str, Any], /) -> None:
        """Learns the names of an optimizer's parameters from the modules that are saved or restored with it."""
        if not isinstance(obj, torch.optim.Optimizer):
            return
        if names := _optimizers.names_of(obj, others):
            self._names[obj] = names
        if any(getattr(other, "optimizer", None) is obj for other in others.values()):
            self._scheduled.add(obj)

    def set_state(self, obj: Any, state: Any, /) -> None:
        """Sets a state with the structure of ``wanted`` or ``get_state``. Tensors stay the same objects, so optimizers,
        ties and JittableModules see the new values. A compiled function that closes over a module keeps the old values.
        """
        if isinstance(obj, torch.Tensor):
            _tensors.write(obj, state)
        elif isinstance(obj, torch.optim.Optimizer):
            _optimizers.set_optimizer_state(obj, state, self._orders.pop(obj, None))
        else:
            _functions_for(obj).set_state(obj, state)

    def set_leaves(self, obj: Any, leaves: Mapping[tuple[Any, ...], Any], /) -> list[Any]:
        """Sets jax arrays on some torchax tensors of a module, by path, and returns them; others are left to ``set_state``."""
        if isinstance(obj, _torchax.LoadTarget) or not isinstance(obj, torch.nn.Module):
            return []
        return _modules.set_leaves(obj, leaves)

    def wanted(self, obj: Any, saved: Any, /) -> Any:
        """The state to request for the target ``obj``, given the saved state."""
        if isinstance(obj, torch.Tensor):
            return _tensors.read_shape(obj, "tensor")
        if isinstance(obj, torch.optim.Optimizer):
            names = self._names.get(obj) or _optimizers.names_of(obj, {})
            order = self._orders[obj] = _optimizers.order_of(obj, names, saved)
            if obj in self._scheduled:
                _optimizers.warn_of_groups(order)
            return _optimizers.wanted_of_optimizer(obj, saved, order)
        return _functions_for(obj).wanted(obj, saved)

    def renamed(self, rename: Mapping[str, str], saved: Sequence[str], /) -> dict[str, str]:
        """Saved path -> new path for ``rename=``; ``fc`` also renames ``fc.weight``."""
        table = sorted(rename.items(), key=lambda entry: -len(entry[0]))
        return {path: _renamed(path, table) for path in saved}

    def copy(self, objects: Sequence[Any], /) -> list[Any]:
        """Copies of tensors; None for the rest, with hooks and compiled functions, which cannot be copied in general."""
        return [_copied(obj) for obj in objects]

    def select(self, obj: Any, variable_type: type, /) -> Callable[[tuple[Any, ...], object], bool]:
        """For ``only=torch.nn.Parameter``: whether a leaf is such a tensor, as a function; TypeError without a module."""
        if not isinstance(obj, torch.nn.Module):
            raise TypeError(
                f"only={variable_type.__name__} selects from modules, got {type(obj).__name__}"
            )
        return _modules.select(obj, variable_type)


def _renamed(path: str, table: Sequence[tuple[str, str]]) -> str:
    for old, new in table:
        if not path.startswith(old):
            continue
        rest = path.removeprefix(old)
        if old.endswith((".", "/")):  # a plain prefix: {"module.": ""}
            return new + rest
        if rest[:1] in ("", ".", "/"):
            return new + rest if new else rest[1:]
    return path


def _copied(obj: Any) -> Any:
    if isinstance(obj, _torchax.LoadTarget):
        return _torchax.LoadTarget(obj.inside)
    return _tensors.copied(obj) if isinstance(obj, torch.Tensor) else None


def _functions_for(obj: Any) -> Any:
    """The module that gets, sets and requests the state of this kind of object."""
    cls = type(obj)  # a JittableModule's __class__ is that of the inner module
    if issubclass(cls, torch.nn.Module):
        return _modules
    return _torchax if _torchax.is_environment_class(cls) else _optimizers


ADAPTER = TorchAdapter()
"""The entry points ``torch`` and ``torchax`` of ``ckpt_core.adapters`` refer to this object."""
