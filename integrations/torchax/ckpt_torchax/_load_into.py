"""Fills modules on the meta device, reading straight onto their devices."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator, Mapping
from typing import Any, TypeVar

import jax
import torch

import ckpt_core as ckpt
from ckpt_core.arguments import answering
from ckpt_torchax import _bits, _modules, _torchax
from ckpt_torchax._weights import FILES, TORCH_SUFFIXES, chosen_item

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
    _refuse_other_types(path, module)
    inside = _torchax.unwrapped(module)
    stays_on_cpu = shardings is None and not buffers and _is_on_cpu(inside)
    if not stays_on_cpu:
        _torchax.require("by load_into (ckpt_torchax.to_torch does without)")
    _refuse_unknown_buffers(inside, buffers or {})
    _modules.refuse_meta_buffers(inside, buffers)
    chosen = _by_name(shardings) if isinstance(shardings, Mapping) else shardings
    _put_buffers(inside, buffers or {})
    with _as_loadable(path) as loadable:
        filling = ckpt.load(
            loadable,
            _modules.Filling(inside),
            item=None if str(path).endswith(FILES) else chosen_item(path, item),
            sharding=chosen,
            cast=cast,
            rename=rename,
            missing=missing,
            unexpected=unexpected,
            options=options,
        )
        _modules.set_state(inside, filling.state)
    if not stays_on_cpu:
        _move_the_rest(inside)
    return module


@contextlib.contextmanager
def _as_loadable(path: str | os.PathLike[str]) -> Generator[str | os.PathLike[str]]:
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


def _refuse_other_types(path: Any, module: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            "the path of a checkpoint or weights file must be a str or an os.PathLike object, got a "
            f"{type(path).__name__}: the path comes first, as in load_into(path, module)"
        )
    _modules.refuse_no_module("load_into", module)


def _is_on_cpu(module: torch.nn.Module) -> bool:
    """Whether all tensors of a module are plain CPU tensors."""
    return not any(
        _torchax.is_jax(tensor) or tensor.is_meta for _, tensor in _modules.names_of_tensors(module)
    )


def _by_name(shardings: Mapping[str, Any]) -> Any:
    return lambda name, leaf: shardings.get(name)


def _refuse_unknown_buffers(module: torch.nn.Module, given: Mapping[str, Any]) -> None:
    known = dict(module.named_buffers(remove_duplicate=False))
    for name in given:
        if name not in known:
            raise KeyError(f"buffers= names {name!r}; the module has: {', '.join(known) or 'none'}")


def _put_buffers(module: torch.nn.Module, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        old = _modules.tensor_at(module, name)
        array = _as_array(value, name)
        if array.shape != tuple(old.shape):
            raise ValueError(f"buffers= has {name} of shape {array.shape}, not {tuple(old.shape)}")
        _modules.replace(module, [name], old, array)


def _move_the_rest(module: torch.nn.Module) -> None:
    """Converts tensors that were made on the CPU, outside of the meta device, to JAX arrays."""
    for names, tensor in _modules.names_of_tensors(module):
        if not _torchax.is_jax(tensor) and tensor.device.type == "cpu":
            _modules.replace(module, names, tensor, _as_array(tensor, names[0]))


def _as_array(value: Any, name: str) -> Any:
    """A jax array that shares no memory with the value."""
    if isinstance(value, torch.Tensor) and not _torchax.is_jax(value):
        value = _modules.narrowed(_bits.to_numpy(value, name), name)
    elif isinstance(value, torch.Tensor):
        value = value.jax()  # pyright: ignore
    return jax.numpy.array(value)
