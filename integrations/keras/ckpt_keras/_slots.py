"""Lists every variable of a Keras object under a unique name, and the names in it that Keras numbers or loses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

TRAINABLE = "trainable_variables"
NON_TRAINABLE = "non_trainable_variables"
OPTIMIZER = "optimizer_variables"
METRICS = "metrics_variables"
MORE_OPTIMIZERS = "more_optimizers"
"""Top-level names of a model's state; the first four are those of ``Model.get_state_tree``."""

Parts = tuple[str, ...]
"""The parts of a path, or the layers that lead to one."""
_ALWAYS_COUNTED = frozenset({"variable", "seed_generator"})
_COUNTED = re.compile(r"(.+)_([1-9]\d*)")


@dataclass(frozen=True)
class Slot:
    """One variable and its place in the state."""

    path: Parts  # names from the top of the state to the leaf
    variable: Any

    @property
    def text(self) -> str:
        """The path as text, as in the checkpoint."""
        return "/".join(part.replace("~", "~0").replace("/", "~1") for part in self.path)


def slots_of_model(model: Any) -> list[Slot]:
    """The variables of a model by collection, each once, in Keras' order; also those of optimizers in attributes (a GAN's)."""
    seen = set[int]()
    trainable = _unseen(model.trainable_variables, seen)
    others = _unseen(model.non_trainable_variables, seen)
    found = _weights(trainable, others, owners_of(model))
    weights = {id(slot.variable): slot for slot in found}
    for prefix, optimizer in _optimizers(model).items():
        found += _named(prefix, _unseen(optimizer.variables, seen), _of_slots(optimizer, weights))
    metrics = _unseen(getattr(model, "metrics_variables", ()), seen)
    return [*found, *_named((METRICS,), metrics, _of_metrics(model))]


def slots_of_object(obj: Any) -> list[Slot]:
    """The variables of an optimizer, a metric or a seed generator; a single variable without a name."""
    import keras

    if isinstance(obj, keras.Variable):
        return [Slot((), obj)]
    if not hasattr(obj, "variables"):
        return list(_named((), [obj.state], {}))
    weights = _weights(list(getattr(obj, "_trainable_variables", ())), [], {})
    suffixes = _of_slots(obj, {id(slot.variable): slot for slot in weights})
    return list(_named((), obj.variables, suffixes))


def _weights(trainable: list[Any], others: list[Any], owners: Mapping[int, Parts]) -> list[Slot]:
    both = [*trainable, *others]  # together, because freezing must not change the name of a weight
    shared = _shared_paths(both)
    suffixes = {id(each): _beside_path(each, owners.get(id(each), ())) for each in both}
    return [
        *_named((TRAINABLE,), trainable, suffixes, shared),
        *_named((NON_TRAINABLE,), others, suffixes, shared),
    ]


def _beside_path(variable: Any, owners: Iterable[str]) -> str:
    """The names that a variable's own path omits."""
    parts = str(variable.path).split("/")
    return ".".join(owner for owner in owners if owner not in parts)


def _shared_paths(variables: Iterable[Any]) -> set[str]:
    counts = Counter(str(variable.path) for variable in variables)
    return {path for path, count in counts.items() if count > 1}


def _optimizers(model: Any) -> dict[Parts, Any]:
    """Place in the state -> optimizer: the compiled one, and those in other attributes."""
    import keras

    compiled = getattr(model, "optimizer", None)
    known = (compiled, getattr(compiled, "inner_optimizer", None))
    others = {
        (MORE_OPTIMIZERS, name): value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer) and not any(value is one for one in known)
    }
    return others if compiled is None else {(OPTIMIZER,): compiled, **others}


def _unseen(variables: Iterable[Any], seen: set[int]) -> list[Any]:
    new = [variable for variable in variables if id(variable) not in seen]
    seen.update(map(id, new))
    return new


def _named(
    prefix: Parts,
    variables: Iterable[Any],
    suffixes: Mapping[int, str],
    shared: set[str] | None = None,
) -> Iterator[Slot]:
    """Slots under Keras' own paths. One that is not unique (Adafactor's, layers of one name in two models) gets what it belongs
    to as a suffix, ``kernel@tower_a``; if that is equal too, ``@2``. So does a path that contains the path of another.
    """
    variables = list(variables)
    shared = _shared_paths(variables) if shared is None else shared
    leaves, inner = set[Parts](), set[Parts]()
    for variable in variables:
        *front, last = str(variable.path).split("/")
        parents: Parts = ()
        for part in front:
            parents = _unique((*parents, part), leaves)
            inner.add(parents)
        where = suffixes.get(id(variable), "") if str(variable.path) in shared else ""
        path = _unique((*parents, f"{last}@{where}" if where else last), leaves, inner)
        leaves.add(path)
        yield Slot((*prefix, *path), variable)


def _unique(path: Parts, *taken: Set[Parts]) -> Parts:
    candidate, count = path, 1
    while any(candidate in paths for paths in taken):
        count += 1
        candidate = (*path[:-1], f"{path[-1]}@{count}")
    return candidate


def nested(values: Iterable[tuple[Parts, Any]]) -> Any:
    """Nested dictionaries of values, each of which comes with its path; the value itself if its path is empty."""
    top: dict[str, Any] = {"": {}}
    for path, value in values:
        *parents, last = ("", *path)
        node = top
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return top[""]


def owners_of(model: Any) -> dict[int, Parts]:
    """Id of a weight's variable -> the layers that contain it, also those that its path omits; the first place if shared."""
    found: dict[int, Parts] = {}
    for layer, owners in layers_of(model):
        own = [
            *getattr(layer, "_trainable_variables", ()),
            *getattr(layer, "_non_trainable_variables", ()),
            *(generator.state for generator in getattr(layer, "_seed_generators", ())),
        ]
        for variable in own:
            found.setdefault(id(variable), owners)
    return found


def layers_of(model: Any) -> list[tuple[Any, Parts]]:
    """A model and every layer in it, each once, with the names from below the model to the layer."""
    found: dict[int, tuple[Any, Parts]] = {}

    def walk(layer: Any, owners: Parts) -> None:
        if id(layer) not in found:
            found[id(layer)] = (layer, owners)
            # No public method finds layers in attributes.
            for inner in getattr(layer, "_layers", ()):
                walk(inner, (*owners, str(inner.name)))

    walk(model, ())
    return list(found.values())


def _of_slots(optimizer: Any, weights: Mapping[int, Slot]) -> dict[int, str]:
    """Id of an optimizer's slot -> its list and its weight: the lists are parallel to that of the weights."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    found: dict[int, str] = {}
    trained = list(getattr(optimizer, "_trainable_variables", ()))
    for role, slots in vars(optimizer).items():
        is_parallel = isinstance(slots, list) and len(slots) == len(trained)
        if role in ("_variables", "_trainable_variables") or not is_parallel:
            continue
        for weight, slot in zip(trained, slots, strict=True):
            if id(weight) in weights and slot is not None:
                path = weights[id(weight)].path[1:]
                found.setdefault(id(slot), ".".join((role.strip("_"), *path)))
    return found


def _of_metrics(model: Any) -> dict[int, str]:
    """Id of a compiled metric's variable -> the output that it measures."""
    compiled = getattr(model, "_compile_metrics", None)
    lists = [
        *(getattr(compiled, "_flat_metrics", None) or ()),
        *(getattr(compiled, "_flat_weighted_metrics", None) or ()),
    ]
    return {
        id(variable): _beside_path(variable, (str(part.output_name),))
        for part in lists
        if getattr(part, "output_name", None)
        for metric in getattr(part, "metrics", ())
        for variable in metric.variables
    }


def numbered(part: str, counted: Set[str]) -> tuple[str, int | None]:
    """A part of a path without its number, and the number: 0 for the first, which has none; None if Keras counts no such."""
    found = _COUNTED.fullmatch(part)
    if found is not None and found[1] in counted and part not in counted:
        return found[1], int(found[2])
    return part, 0 if part in counted else None


def counted_in(model: Any) -> frozenset[str]:
    """The classes in a model that Keras numbers; not layers that the user named: ``tower_1`` and ``tower_2`` are different."""
    layers = [layer for layer, _ in layers_of(model)]
    optimizers = list(_optimizers(model).values())
    wrapped = [one.inner_optimizer for one in optimizers if hasattr(one, "inner_optimizer")]
    objects = [*layers, *optimizers, *wrapped, *(getattr(model, "metrics", None) or ())]
    counted = set(_ALWAYS_COUNTED)
    for each in objects:
        base = _snake_case(type(each).__name__)
        # Bidirectional names its two layers after the layer that it wraps.
        bases = (base, f"forward_{base}", f"backward_{base}")
        counted.update(one for one in bases if numbered(str(each.name), {one})[1] is not None)
    return frozenset(counted)


def counted_anywhere() -> frozenset[str]:
    """The same for an optimizer without a model: its slots may belong to layers of any class."""
    import keras

    roots = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)
    return _ALWAYS_COUNTED | {_snake_case(cls.__name__) for root in roots for cls in _below(root)}


def _below(cls: type) -> Iterator[type]:
    yield cls
    for inner in cls.__subclasses__():
        yield from _below(inner)


def _snake_case(name: str) -> str:
    from keras.src.utils.naming import to_snake_case  # Keras' rule for names; not public

    return to_snake_case(name)


def nameless(model: Any) -> frozenset[Parts]:
    """The names that lead to each layer without ``get_config``: Keras makes it again with a name after its class."""
    found: set[Parts] = set()
    for layer, owners in layers_of(model):
        try:
            if owners and "name" not in layer.get_config():
                found.add(owners)
        except Exception:  # of a get_config: then no configuration made the layer
            pass
    return frozenset(found)
