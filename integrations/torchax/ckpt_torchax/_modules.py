"""Gets and sets the state of modules: the entries of their ``state_dict``, on the live tensors.

A state is a dictionary by the names of ``state_dict``, so checkpoints of a module, of its
``state_dict`` and of a dictionary of weights are the same. A tensor with several names (tied
weights) is stored once, under the first; the other names are keys below ``_tied_weights``::

    {"embed.weight": array, "norm.bias": array, "_tied_weights": {"embed.weight": {"head.weight": True}}}
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch

from ckpt_core import Mismatch, StructureMismatch, UnsupportedLeaf
from ckpt_torchax import _tensors, _torchax

TIED = "_tied_weights"
"""The key, beside a module's names, that holds ``{first name: {other name: True}}``."""
_EXTRA = "_extra_state"  # torch's name in state_dict


def get_state(module: Any) -> dict[str, Any]:
    """The arrays of a module by name, tied ones once; tensors in ``_extra_state`` as arrays."""
    entries = _entries(module)
    leaves = {
        name: _tensors.arrays_of(value) if _is_extra(name) else _tensors.read_live(value, name)
        for name, value in entries.items()
    }
    # Two torchax tensors may share one array.
    held = entries | {n: leaf for n, leaf in leaves.items() if isinstance(leaf, jax.Array)}
    shared = by_object(held)
    tied = {first: dict.fromkeys(others, True) for first, *others in shared if others}
    state = {names[0]: leaves[names[0]] for names in shared}
    return state | {TIED: tied} if tied else state


def first_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Further name of a tied weight -> the name under which it is stored."""
    return {name: first for first, names in state.get(TIED, {}).items() for name in names}


def numbers_in(module: Any) -> dict[str, int | float]:
    """The numbers in attributes of a module and those in it, by path, unless a part has an extra state, which may have them."""
    return {
        f"{path}.{name}" if path else name: value
        for path, part in _torchax.unwrapped(module).named_modules()
        for name, value in vars(part).items()
        if type(value) in (int, float)
        and type(part).get_extra_state is torch.nn.Module.get_extra_state
    }


def wanted(module: Any, saved: Any) -> Any:
    """The state to request, given the saved one: each tensor once, under a name that was saved."""
    entries = _entries(module)
    if any(_is_meta(value) for value in entries.values()):
        refuse_meta_buffers(module)
        _torchax.require(
            "to restore into a module on the meta device (ckpt_torchax.to_torch does without)"
        )
    saved = saved if isinstance(saved, Mapping) else {}
    first_of = first_names(saved)
    state: dict[str, Any] = {}
    for names in by_object(entries):
        value = entries[names[0]]
        if _is_extra(names[0]):
            state[names[0]] = saved.get(names[0], value)
            continue
        leaf = _tensors.read_shape(value, names[0])
        present = [name for name in names if name in saved]
        if not present:
            present = [
                first_of[name]
                for name in names
                if name in first_of and _fits(leaf, entries.get(first_of[name]), first_of[name])
            ]
        for name in present or names[:1]:
            state.setdefault(name, _integers_as_saved(leaf, saved.get(name), value))
    if TIED in saved:
        state[TIED] = {first: dict.fromkeys(names, True) for first, names in saved[TIED].items()}
    return state


def set_state(module: Any, state: Mapping[str, Any]) -> None:
    """Sets a state on the live tensors, which stay the same objects; meta tensors are replaced."""
    if isinstance(module, _torchax.LoadTarget):
        module.state = state
        return
    module = _torchax.unwrapped(module)
    entries = _entries(module)
    first_of = first_names(state)
    values: list[tuple[list[str], Any]] = []
    untied: list[str] = []
    for names in by_object(entries):
        sources = [name for name in names if name in state]
        if not sources:
            sources = [first_of[name] for name in names]
            first = entries.get(sources[0])
            if first is not None and _tensors.is_of(state[sources[0]], first):
                continue  # only= left it out, so this is the target's own value
            untied += [f"{name} = {first_of[name]}" for name in names if first is not None]
        _warn_of_lost_differences(names, [state[source] for source in sources])
        value = state[sources[0]]
        values.append((names, narrowed(value, names[0]) if _is_meta(entries[names[0]]) else value))
    for names, value in values:
        tensor = entries[names[0]]
        if _is_extra(names[0]):
            _owner(module, names[0]).set_extra_state(_tensors.tensors_of(value))
        elif isinstance(value, jax.ShapeDtypeStruct):
            continue  # only= left it out
        elif _is_meta(tensor):
            replace(module, names, tensor, value)
        else:
            _tensors.write(tensor, value)
    if untied:
        _warn(
            f"tied when saved, separate in the target: {', '.join(untied)}. Each has the saved value now, and training "
            "would make them differ: tie them again after .to('jax'), which unties them"
        )


def set_leaves(module: Any, leaves: Mapping[tuple[Any, ...], Any]) -> list[Any]:
    """Sets arrays on live torchax tensors while others are still being read; returns what it set."""
    entries = _entries(_torchax.unwrapped(module))
    was_set: list[Any] = []
    for path, value in leaves.items():
        tensor = entries.get(path[0]) if len(path) == 1 else None
        if _torchax.is_tensor(tensor):  # neither a view, nor on the CPU or the meta device
            _tensors.write(tensor, value)
            was_set.append(value)
    return was_set


def select(module: Any, variable_type: type) -> Callable[[tuple[Any, ...], object], bool]:
    """For ``only=torch.nn.Parameter``: whether a leaf is such a tensor, as a function."""
    names = {name for name, value in _entries(module).items() if isinstance(value, variable_type)}
    return lambda path, leaf: bool(path) and (path[0] in names or path[0] == TIED)


def replace(module: Any, names: list[str], old: Any, array: Any) -> None:
    """Replaces a meta tensor by a new torchax tensor under all of its names."""
    made = _torchax.parameter_or_tensor(array, old)
    for name in names:
        put(module, name, made)


def refuse_meta_buffers(module: Any, given: Mapping[str, Any] | None = None) -> None:
    """Raises StructureMismatch if there are buffers on the meta device, which no checkpoint holds."""
    module = _torchax.unwrapped(module)
    saved = _entries(module)
    lost = [
        name
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if _is_meta(buffer) and name not in saved and name not in (given or {})
    ]
    if lost:
        raise StructureMismatch(
            [Mismatch(name, "missing", None, "a non-persistent buffer on meta") for name in lost],
            advice="Non-persistent buffers are in no checkpoint. Make them outside of the meta device, or pass "
            f"load_into(path, module, buffers={{{lost[0]!r}: tensor, ...}}).",
        )


def _entries(module: Any) -> dict[str, Any]:
    """Name -> live tensor, or value of ``get_extra_state``; names as in the bare module's."""
    module = _torchax.unwrapped(module)
    entries: dict[str, Any] = dict(module.state_dict(keep_vars=True))
    live: set[int] = set()
    for part in module.modules():
        live.update(map(id, vars(part)["_parameters"].values()))  # without torch's walk over names
        live.update(map(id, vars(part)["_buffers"].values()))
    for name, value in entries.items():
        if id(value) not in live and not _is_extra(name):
            raise UnsupportedLeaf(
                f"{name}: a hook made this entry of state_dict, and a restore could not set it: save "
                "module.state_dict() instead of the module, and restore with load_state_dict",
                leaf=name,
                type_name=type(value).__name__,
            )
    return entries


def by_object(entries: Mapping[str, Any]) -> list[list[str]]:
    """Names of the same object together, in order; an extra state is alone."""
    groups: dict[Any, list[str]] = {}
    for name, value in entries.items():
        groups.setdefault(name if _is_extra(name) else id(value), []).append(name)
    return list(groups.values())


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def _is_meta(value: Any) -> bool:
    # torch reports torchax tensors as meta tensors.
    return isinstance(value, torch.Tensor) and not _torchax.is_jax(value) and value.is_meta


def _owner(module: Any, name: str) -> Any:
    return module.get_submodule(name.rpartition(".")[0])


def _fits(leaf: Any, first: Any, name: str) -> bool:
    """Whether a tensor can take the value of the one that it was tied to when saved."""
    if first is None:
        return True  # it replaces the first tensor, and is compared in its place
    other = _tensors.read_shape(first, name)
    return (leaf.shape, leaf.dtype) == (other.shape, other.dtype)


def _integers_as_saved(leaf: Any, saved: Any, tensor: Any) -> Any:
    """The leaf; or the saved one, if they differ only because torchax stores int64 (``num_batches_tracked``) as int32,
    which can be restored into an int64 CPU tensor. A meta tensor of int64 can only become int32, if the values fit.
    """
    saved_dtype = getattr(saved, "dtype", None)
    if isinstance(leaf, np.ndarray) and (leaf.dtype.name, saved_dtype) == ("int64", "int32"):
        kept = leaf.astype(np.int32)
        return kept if np.array_equal(kept, leaf) else leaf
    if _is_meta(tensor) and leaf.dtype.name != saved_dtype == "int64" and saved.kind == "numpy":
        return saved if tensor.dtype == torch.int64 else leaf
    return leaf


def narrowed(value: Any, name: str) -> Any:
    """The value for a meta tensor as a jax array; numpy integers of 64 bits must fit into 32."""
    if not isinstance(value, np.ndarray):
        return value
    narrow = value.astype(jax.dtypes.canonicalize_dtype(value.dtype))
    if not np.array_equal(narrow, value):
        raise StructureMismatch(
            [Mismatch(name, "dtype", f"{value.dtype} beyond {narrow.dtype}", str(narrow.dtype))],
            advice="Set jax_enable_x64, or load it with ckpt_core.load(path, as_numpy=True).",
        )
    return jax.numpy.array(narrow)


def _warn_of_lost_differences(names: list[str], values: list[Any]) -> None:
    """Warns if several saved tensors with different values are restored into one."""
    if _is_extra(names[0]):
        return
    for name, value in zip(names[1:], values[1:], strict=False):
        if np.asarray(value).tobytes() != np.asarray(values[0]).tobytes():
            _warn(
                f"{name} and {names[0]} are one tensor in the target, and were two with other values when saved: "
                f"it now has the value of {names[0]}"
            )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)


def put(module: Any, name: str, tensor: Any) -> None:
    """Makes a tensor the parameter or buffer with this name."""
    setattr(_owner(module, name), name.rpartition(".")[2], tensor)
