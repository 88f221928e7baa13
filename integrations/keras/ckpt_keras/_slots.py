"""Every variable of a Keras object, each under a name that no other one has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

TRAINABLE = "trainable_variables"
NON_TRAINABLE = "non_trainable_variables"
OPTIMIZER = "optimizer_variables"
METRICS = "metrics_variables"
MORE_OPTIMIZERS = "more_optimizers"
"""Top-level names of a model's state; the first four are those of ``Model.get_state_tree``."""


@dataclass(frozen=True)
class Slot:
    """One variable and its place in the state.

    Attributes:
        path: names from the top of the state to the leaf.
        variable: the Keras variable.
    """

    path: tuple[str, ...]
    variable: Any

    @property
    def text(self) -> str:
        """The path as the checkpoint writes it."""
        return "/".join(part.replace("~", "~0").replace("/", "~1") for part in self.path)


def slots_of_model(model: Any) -> list[Slot]:
    """The variables of a model or layer by collection, in Keras' order.

    A variable is listed once. Optimizers that a model holds as attributes beside the compiled one
    (a GAN's) are found too; Keras' own state tree lacks them.
    """
    trainable = list(model.trainable_variables)
    seen = {id(variable) for variable in trainable}
    found = list(_named((TRAINABLE,), trainable))
    found += _named((NON_TRAINABLE,), _unseen(model.non_trainable_variables, seen))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        found += _named((OPTIMIZER,), _unseen(optimizer.variables, seen))
    for name, other in more_optimizers(model).items():
        found += _named((MORE_OPTIMIZERS, name), _unseen(other.variables, seen))
    found += _named((METRICS,), _unseen(getattr(model, "metrics_variables", ()), seen))
    return found


def slots_of_variables(variables: Iterable[Any]) -> list[Slot]:
    """The variables of an optimizer, a metric or a seed generator."""
    return list(_named((), variables))


def more_optimizers(model: Any) -> dict[str, Any]:
    """Optimizers held as attributes beside the compiled one, by attribute."""
    import keras

    compiled = getattr(model, "optimizer", None)
    inner = getattr(compiled, "inner_optimizer", None)
    return {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer)
        and value is not compiled
        and value is not inner
    }


def _unseen(variables: Iterable[Any], seen: set[int]) -> list[Any]:
    new = [variable for variable in variables if id(variable) not in seen]
    seen.update(map(id, new))
    return new


def _named(prefix: tuple[str, ...], variables: Iterable[Any]) -> Iterator[Slot]:
    """Slots under Keras' own paths; ``@2``, ``@3`` is added to names that are taken.

    Taken are paths that another variable has (Adafactor's, two metrics of one name, two layers of
    one name), and those that lead through another variable or that others lead through (a variable
    and a layer of one name), which no nested dictionary can hold.
    """
    leaves: set[tuple[str, ...]] = set()
    inner: set[tuple[str, ...]] = set()
    for variable in variables:
        parts = tuple(str(variable.path).split("/"))
        parents: tuple[str, ...] = ()
        for part in parts[:-1]:
            parents = (*parents, _free(part, lambda name, at=parents: (*at, name) in leaves))
            inner.add(parents)
        last = _free(
            parts[-1],
            lambda name, at=parents: (*at, name) in leaves or (*at, name) in inner,
        )
        leaves.add((*parents, last))
        yield Slot((*prefix, *parents, last), variable)


def _free(name: str, is_taken: Any) -> str:
    candidate, count = name, 1
    while is_taken(candidate):
        count += 1
        candidate = f"{name}@{count}"
    return candidate


def without_count(name: str) -> str:
    """A name without the ``@2`` that made it unique."""
    head, _, tail = name.rpartition("@")
    return head if head and tail.isdigit() else name


def nested(slots: Iterable[Slot], values: Iterable[Any]) -> dict[str, Any]:
    """Nested dictionaries of values by the paths of their slots."""
    tree: dict[str, Any] = {}
    for slot, value in zip(slots, values, strict=True):
        node = tree
        for part in slot.path[:-1]:
            node = node.setdefault(part, {})
        node[slot.path[-1]] = value
    return tree


def value_at(tree: Any, path: tuple[str, ...]) -> Any:
    """The leaf of nested dictionaries at a path."""
    for part in path:
        tree = tree[part]
    return tree
