"""Fills modules with checkpoints: on JAX arrays, straight onto their devices, or in plain CPU PyTorch."""

from __future__ import annotations

import contextlib
import copy
import operator
import os
import tempfile
from collections.abc import Generator, Mapping
from typing import Any, TypeVar

import jax
import torch

import ckpt_core as ckpt
from ckpt_core.arguments import answering
from ckpt_torchax import _modules, _tensors, _torchax
from ckpt_torchax._weights import FILES, TORCH_SUFFIXES, chosen_item

PathLike = str | os.PathLike[str]
ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


@answering
def load_into(
    path: str | os.PathLike[str],
    module: ModuleT,
    *,
    shardings: Any = None,
    item: str | None = None,
    buffers: Mapping[str, Any] | None = None,
    cast: bool = False,
    rename: Any = None,
    missing: str = "error",
    unexpected: str = "error",
    options: ckpt.Options | None = None,
) -> ModuleT:
    """Returns the module with the saved values, on JAX arrays; blocks until they are loaded.

    A module that is entirely on the CPU stays there, and needs no torchax, unless ``shardings`` or
    ``buffers`` are given.

    A module made under ``torch.device("meta")`` takes no memory, and each of its tensors is read from
    the disk straight onto its sharding: the host holds the model once. Tied weights stay tied.
    Tensors that are JAX arrays already are set in place; tensors on the CPU are moved.

    Args:
        path: path of a checkpoint, of one item in it, or of a ``.safetensors``, ``.safetensors.index.json`` or ``.pt``
            file; the last becomes a checkpoint in the system's temporary folder first.
        module: a module, usually on the meta device.
        shardings: where arrays go, as for ``ckpt_core.load``: a Sharding, a Mesh, a dict by name, or a
            function of (name, leaf). By default as saved if the devices allow, else on the default device.
        item: the item to load; needed if there are several and none is called ``model``.
        buffers: values of non-persistent buffers that are on the meta device, by name.
        cast: convert dtypes to the module's.
        rename, missing, unexpected, options: as for ``ckpt_core.load``.

    Raises:
        StructureMismatch: lists every difference, before anything is read or changed; and non-persistent
            buffers on the meta device that ``buffers`` lacks.
        CheckpointNotFound: there is no such checkpoint or file.
        ModuleNotFoundError: torchax is needed and not imported.

    Example::

        with torch.device("meta"):
            model = Net()
        load_into("runs/1/step_100", model, shardings=lambda name, leaf: NamedSharding(mesh, P("data")))
    """
    _refuse_other_types("load_into", module)
    inside = _torchax.unwrapped(module)
    stays_on_cpu = (
        shardings is None
        and not buffers
        and not any(_torchax.is_jax(one) or one.is_meta for _, one in _tensors_in(inside))
    )
    if not stays_on_cpu:
        _torchax.require("by load_into (ckpt_torchax.to_torch does without)")
    arrays = _buffers_for(inside, buffers or {})
    _modules.refuse_meta_buffers(inside, arrays)
    for name, array in arrays.items():
        _modules.replace(inside, [name], inside.get_buffer(name), array)
    with _as_loadable(path) as loadable:
        filling = ckpt.load(
            loadable,
            _torchax.LoadTarget(inside),
            item=None if str(path).endswith(FILES) else chosen_item(path, item),
            sharding=_by_name(shardings) if isinstance(shardings, Mapping) else shardings,
            cast=cast,
            rename=rename,
            missing=missing,
            unexpected=unexpected,
            options=options,
        )
        _modules.set_state(inside, filling.state)
    for names, tensor in [] if stays_on_cpu else _tensors_in(inside):
        if not _torchax.is_jax(tensor) and tensor.device.type == "cpu":
            # made outside of the meta device
            _modules.replace(inside, names, tensor, _as_array(tensor, names[0]))
    return module


@contextlib.contextmanager
def _as_loadable(path: PathLike) -> Generator[PathLike]:
    """The path, or that of a temporary checkpoint of what a file of ``torch.save`` holds."""
    if not str(path).endswith(TORCH_SUFFIXES):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, os.path.basename(path))
        ckpt.convert.import_weights(path, copy, options=ckpt.Options(durable=False))
        try:
            yield copy
        except BaseException as error:
            error.add_note(f"{copy} was a copy of {path}")
            raise


def _by_name(shardings: Mapping[str, Any]) -> Any:
    return lambda name, leaf: shardings.get(name)


def _buffers_for(module: torch.nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ``buffers=`` as arrays of the shapes of the module's."""
    known = dict(module.named_buffers(remove_duplicate=False))
    arrays: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise KeyError(f"buffers= names {name!r}; the module has: {', '.join(known) or 'none'}")
        found, wanted = _as_array(value, name), tuple(known[name].shape)
        if found.shape != wanted:
            raise ValueError(f"buffers= has {name} of shape {found.shape}, not {wanted}")
        arrays[name] = found
    return arrays


def _as_array(value: Any, name: str) -> Any:
    """A jax array that shares no memory with the value."""
    if isinstance(value, torch.Tensor) and not _torchax.is_jax(value):
        value = _modules.narrowed(_tensors.to_numpy(value, name), name)
    elif isinstance(value, torch.Tensor):
        value = value.jax()  # pyright: ignore
    return jax.numpy.array(value)


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
    if module is not None:
        _refuse_other_types("to_torch", module)
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
    names_of = _tensors_in(module)
    filled = copy.deepcopy(module).to_empty(device="cpu")
    for names, tensor in names_of:
        made = operator.attrgetter(names[0])(filled)
        if not tensor.is_meta:  # made outside of the meta device, and maybe in no checkpoint
            made.data.copy_(tensor)
        elif not tensor.is_floating_point():
            made.zero_()  # uninitialized integers might not fit the checkpoint's dtype
        for name in names[1:]:  # to_empty unties
            _modules.put(filled, name, made)
    ckpt.restore(path, items={item: filled})
    for names, _ in names_of:
        for name in names:
            _modules.put(module, name, operator.attrgetter(name)(filled))


def _as_state_dict(tree: Any) -> Any:
    """Tied weights under all of their names, and counters as int64, which torchax stores as int32."""
    if not isinstance(tree, dict):
        return tree
    tied = _modules.first_names(tree)
    state = {name: value for name, value in tree.items() if name != _modules.TIED}
    state |= {name: state[first] for name, first in tied.items()}
    with _tensors.plain_torch():
        for name, value in state.items():
            if str(name).endswith("num_batches_tracked") and isinstance(value, torch.Tensor):
                state[name] = value.to(torch.int64)
    return state


def _refuse_other_types(call: str, module: Any) -> None:
    """Raises TypeError, for a call that fills a module, if that is a class or no module."""
    if isinstance(module, type):
        raise TypeError(
            f"{call}(path, module) fills an object, got the class {module.__name__}: write {call}(path, "
            f"{module.__name__}(...))"
        )
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"{call}(path, module) fills a torch.nn.Module, got a {type(module).__name__}: for tensors by name, "
            "ckpt_torchax.to_torch(path)"
        )


def _tensors_in(module: Any) -> list[tuple[list[str], Any]]:
    """Every parameter and buffer, including non-persistent ones, with all of its names."""
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    return [(names, tensors[names[0]]) for names in _modules.by_object(tensors)]
