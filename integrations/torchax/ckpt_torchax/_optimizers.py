"""Optimizers, learning-rate schedulers and random generators of torch.

A ``torch.optim`` optimizer has no state before its first step. A fresh one therefore requests the
structure in the checkpoint, checked against its own parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from ckpt_core import Mismatch, StructureMismatch
from ckpt_torchax import _bits, _tensors, _torchax

# State that has the shape of its parameter, in torch's own optimizers.
_LIKE_PARAMETER = frozenset(
    [
        "acc_delta",
        "ax",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "grad_avg",
        "max_exp_avg_sq",
        "max_exp_avg_sqs",
        "momentum_buffer",
        "prev",
        "square_avg",
        "step_size",
        "sum",
    ]
)


def state_with_arrays(obj: Any) -> dict[str, Any]:
    """``state_dict`` of an optimizer, a scheduler or a scaler, with arrays for tensors."""
    return _tensors.arrays_of(obj.state_dict())


def wanted_of_optimizer(optimizer: torch.optim.Optimizer, saved: Any) -> Any:
    """The saved structure, with each array on the device or sharding of its parameter."""
    saved_groups = saved.get("param_groups", []) if isinstance(saved, Mapping) else []
    _check_groups(optimizer, saved_groups)
    parameters = _parameters(optimizer)
    live = state_with_arrays(optimizer)
    groups = [
        _wanted_group(own, group)
        for own, group in zip(live["param_groups"], saved_groups, strict=True)
    ]
    state: dict[Any, Any] = {}
    for key, entry in saved.get("state", {}).items():
        if not str(key).isdigit():  # not a parameter's: some optimizers also have text keys
            state[key] = entry
            continue
        index = int(key)  # Orbax's own trees have text keys
        if index >= len(parameters):
            _refuse(f"state/{index}", "state of a parameter", f"{len(parameters)} parameters")
        own = live["state"].get(index, {})
        state[index] = {
            name: _wanted_leaf(own.get(name), leaf, parameters[index], f"state/{index}/{name}")
            for name, leaf in entry.items()
        }
    return {"state": state, "param_groups": groups}


def set_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Gives the optimizer new state tensors and the saved settings; keeps its parameters."""
    parameters = _parameters(optimizer)
    made: defaultdict[Any, Any] = defaultdict(dict)
    for key, entry in state["state"].items():
        if isinstance(key, int):
            made[parameters[key]] = _tensors.tensors_of(entry, parameters[key])
        else:
            made[key] = _tensors.tensors_of(entry)
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        settings = {name: value for name, value in saved.items() if name != "params"}
        group.update(_tensors.tensors_of(settings))
    optimizer.state = made


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_groups(optimizer: torch.optim.Optimizer, saved_groups: Any) -> None:
    own = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in saved_groups]
    if own != saved:
        _refuse("param_groups", f"groups of {saved} parameters", f"groups of {own} parameters")


def _wanted_group(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved settings of a group; settings that were not saved keep the group's values."""
    group = {name: saved.get(name, value) for name, value in own.items()}
    return group | {name: value for name, value in saved.items() if name not in own}


def _wanted_leaf(own: Any, saved: Any, parameter: Any, where: str) -> Any:
    """The target for one entry of a parameter's state."""
    if getattr(saved, "kind", None) not in ("jax", "numpy"):
        return saved
    if where.rpartition("/")[2] in _LIKE_PARAMETER and saved.shape != tuple(parameter.shape):
        shape = str(list(parameter.shape))
        _refuse(where, f"{saved.dtype}{list(saved.shape)}", shape, "shape")
    if isinstance(own, (jax.Array, np.ndarray)):
        return own
    if not _torchax.is_tensor(parameter):
        return saved
    if saved.kind == "numpy" and where.endswith("/step"):
        return saved  # torch keeps step counters on the CPU
    sharding = parameter.jax().sharding if saved.shape == tuple(parameter.shape) else None
    return jax.ShapeDtypeStruct(saved.shape, _bits.dtype_named(saved.dtype), sharding=sharding)


def _refuse(where: str, saved: str, wanted: str, kind: str = "structure") -> None:
    raise StructureMismatch(
        [Mismatch(where, kind, saved, wanted)],
        advice="Give the optimizer the parameters it had, in the same groups and order.",
    )


def wanted_of_plain(obj: Any, saved: Any) -> Any:
    """The object's own entries, each with the saved structure; unsaved entries count as missing."""
    own = state_with_arrays(obj)
    if not isinstance(saved, Mapping):
        return own
    return {name: saved.get(name, value) for name, value in own.items()}


def set_plain_state(obj: Any, state: Mapping[str, Any]) -> None:
    """Passes a state to ``load_state_dict``."""
    own = obj.state_dict()
    made = _tensors.tensors_of(state)
    for name, value in made.items():
        kind = type(own.get(name))
        if isinstance(value, dict) and kind is not dict and issubclass(kind, dict):
            made[name] = kind(value)  # such as the Counter of a scheduler's milestones
    obj.load_state_dict(made)


def get_generator_state(generator: torch.Generator) -> dict[str, Any]:
    """The bytes of a generator's state."""
    with _bits.plain_torch():
        return {"state": generator.get_state().numpy().copy()}


def set_generator_state(generator: torch.Generator, state: Mapping[str, Any]) -> None:
    """Sets a generator to a saved state."""
    with _bits.plain_torch():
        generator.set_state(torch.from_numpy(np.array(state["state"])))
