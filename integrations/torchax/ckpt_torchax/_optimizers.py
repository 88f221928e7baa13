"""Optimizers, learning-rate schedulers and random generators of torch.

A ``torch.optim`` optimizer has no state before its first step, so a fresh one requests the structure in the checkpoint.
Parameters and groups match by the names of the parameters, which are recorded beside the state, else by position.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from ckpt_core import Mismatch, StructureMismatch
from ckpt_torchax import _tensors, _torchax

# State that has the shape of its parameter, in torch's own optimizers.
_LIKE_PARAMETER = frozenset(
    (
        *("acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq"),
        *("max_exp_avg_sqs", "momentum_buffer", "prev", "square_avg", "step_size", "sum"),
    )
)


def get_state(obj: Any) -> dict[str, Any]:
    """``state_dict`` of an optimizer, a scheduler or a scaler, with arrays for tensors; the bytes of a random generator."""
    if isinstance(obj, torch.Generator):
        with _tensors.plain_torch():
            return {"state": obj.get_state().numpy().copy()}
    return _tensors.arrays_of(obj.state_dict())


Names = Sequence[Sequence[str]]
"""The names of an optimizer's parameters, by group."""


def names_of(optimizer: torch.optim.Optimizer, objects: Mapping[str, Any]) -> Names | None:
    """The names that it was given, or those that its parameters have in modules among the objects; None if it has others."""
    names = [group.get("param_names") or [] for group in optimizer.param_groups]
    if not all(names):
        known = [
            (id(parameter), name, path)
            for path, module in objects.items()
            if isinstance(module, torch.nn.Module)
            for name, parameter in _torchax.unwrapped(module).named_parameters()
        ]
        mine = {id(one) for one in _parameters(optimizer)}
        used = Counter(name for at, name, _ in known if at in mine)
        named = {at: name if used[name] == 1 else f"{path}:{name}" for at, name, path in known}
        names = [[named.get(id(one), "") for one in g["params"]] for g in optimizer.param_groups]
    every = [name for group in names for name in group]
    return names if all(every) and len(set(every)) == len(every) else None


def names_beside(names: Names | None) -> dict[str, bool]:
    """What is recorded of names: ``{"0=fc.weight": True}``, as numbers of an object are."""
    return {f"{number}={name}": True for number, name in enumerate(itertools.chain(*names or ()))}


class Order(NamedTuple):
    """Which of the optimizer's own parameters is which of the saved ones, and which saved group is which of its own."""

    parameters: Sequence[int]  # by position of the saved one
    groups: Sequence[int]  # by position of its own


def order_of(optimizer: torch.optim.Optimizer, names: Names | None, saved: Any) -> Order:
    """By name, if both sides have the same names in the same groups; else by position, with a warning where names differ."""
    groups = saved.get("param_groups", []) if isinstance(saved, Mapping) else []
    live_sizes = [len(group["params"]) for group in optimizer.param_groups]
    sizes = [len(group["params"]) for group in groups]
    recorded: Mapping[str, Any] = getattr(saved, "constants", {})
    by_number = dict(key.split("=", 1) for key in recorded if "=" in key)
    before = [by_number.get(str(n), "") for n in range(sum(sizes))]
    now = [name for group in names or () for name in group] or [""] * sum(live_sizes)
    if names is not None and all(before):
        left, wanted = iter(before), list(map(set, names))
        parts = [set(itertools.islice(left, size)) for size in sizes]
        if sorted(map(sorted, parts)) == sorted(map(sorted, wanted)):
            places = {name: place for place, name in enumerate(now)}
            return Order([places[name] for name in before], [parts.index(one) for one in wanted])
    if live_sizes != sizes:
        _refuse(
            "param_groups", f"groups of {sizes} parameters", f"groups of {live_sizes} parameters"
        )
    if before != now:
        pairs = zip(before, now, strict=True)
        shown = ", ".join(f"{old or '?'} -> {new or '?'}" for old, new in pairs if old != new)
        warnings.warn(
            "the optimizer's parameters have other names than at the save, or none, so their state goes by position: save "
            f"and restore the model in the same call. {shown[:300]}",
            UserWarning,
            stacklevel=2,
        )
    return Order(range(sum(sizes)), range(len(sizes)))


def warn_of_groups(order: Order) -> None:
    """Warns of an optimizer with a scheduler, which has one rate for each group, by position."""
    if list(order.groups) != sorted(order.groups):
        warnings.warn(
            "the optimizer's groups stand in another order than at the save. They are restored by name, and the state of its "
            "scheduler by position: the next scheduler.step() gives groups the rates of others. Keep the order of the groups",
            UserWarning,
            stacklevel=2,
        )


def wanted_of_optimizer(optimizer: torch.optim.Optimizer, saved: Any, order: Order) -> Any:
    """The saved structure, with each array on the device or sharding of its parameter."""
    saved_groups = saved["param_groups"]
    own_parameters = _parameters(optimizer)
    parameters = [own_parameters[place] for place in order.parameters]
    live = get_state(optimizer)
    groups: list[Any] = [None] * len(saved_groups)
    for own, place in zip(live["param_groups"], order.groups, strict=True):
        groups[place] = {**own, **saved_groups[place]}  # settings that were not saved stay
    state: dict[Any, Any] = {}
    for key, entry in saved.get("state", {}).items():
        if not str(key).isdigit():  # not a parameter's: some optimizers also have text keys
            state[key] = entry
            continue
        index = int(key)  # Orbax's own trees have text keys
        if index >= len(parameters):
            _refuse(f"state/{index}", "state of a parameter", f"{len(parameters)} parameters")
        own = live["state"].get(order.parameters[index], {})
        state[index] = {
            name: _wanted_leaf(own.get(name), leaf, parameters[index], f"state/{index}/{name}")
            for name, leaf in entry.items()
        }
    return {"state": state, "param_groups": groups}


def set_optimizer_state(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], order: Order | None
) -> None:
    """Gives the optimizer new state tensors and the saved settings; keeps its parameters. Without an order, the state is in its own."""
    parameters, groups = _parameters(optimizer), state["param_groups"]
    if order is not None:
        parameters = [parameters[place] for place in order.parameters]
        groups = [groups[place] for place in order.groups]
    made: defaultdict[Any, Any] = defaultdict(dict)
    for key, entry in state["state"].items():
        if isinstance(key, int):
            made[parameters[key]] = _tensors.tensors_of(entry, parameters[key])
        else:
            made[key] = _tensors.tensors_of(entry)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        kept = ("params", "param_names") if "param_names" in group else ("params",)
        settings = {name: value for name, value in saved.items() if name not in kept}
        group.update(_tensors.tensors_of(settings))
    optimizer.state = made


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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
    return jax.ShapeDtypeStruct(saved.shape, _tensors.dtype_named(saved.dtype), sharding=sharding)


def _refuse(where: str, saved: str, wanted: str, kind: str = "structure") -> None:
    raise StructureMismatch(
        [Mismatch(where, kind, saved, wanted)],
        advice="Give the optimizer the parameters it had, in the same groups and order.",
    )


def wanted(obj: Any, saved: Any) -> Any:
    """The object's own entries, each with the saved structure; unsaved entries count as missing."""
    own = get_state(obj)
    if isinstance(obj, torch.Generator) or not isinstance(saved, Mapping):
        return own
    return {name: saved.get(name, value) for name, value in own.items()}


def set_state(obj: Any, state: Mapping[str, Any]) -> None:
    """Passes a state to ``load_state_dict``, or sets a random generator to it."""
    if isinstance(obj, torch.Generator):
        with _tensors.plain_torch():
            obj.set_state(torch.from_numpy(np.array(state["state"])))
        return
    own = obj.state_dict()
    made = _tensors.tensors_of(state)
    for name, value in made.items():
        kind = type(own.get(name))
        if isinstance(value, dict) and kind is not dict and issubclass(kind, dict):
            made[name] = kind(value)  # such as the Counter of a scheduler's milestones
    obj.load_state_dict(made)
