"""The names that Keras numbers: class names, which it gives to unnamed objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckpt_keras._names import pattern
from ckpt_keras._slots import layers_of, more_optimizers

_ALWAYS = frozenset({"variable", "seed_generator"})


def counted_in(model: Any) -> frozenset[str]:
    """The numbered names in a model: classes of its layers, optimizers and metrics.

    A layer that the user named is not numbered, so ``tower_1`` and ``tower_2`` are as different
    as ``user`` and ``item``.
    """
    layers = [layer for layer, _ in layers_of(model)]
    objects = [*layers, *_optimizers(model), *(getattr(model, "metrics", None) or ())]
    return _ALWAYS | {base for each in objects for base in _base(each)}


def counted_anywhere() -> frozenset[str]:
    """The same for an optimizer without a model: its slots may belong to layers of any class."""
    import keras

    roots = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)
    return _ALWAYS | {_snake_case(cls.__name__) for root in roots for cls in _subclasses(root)}


def _optimizers(model: Any) -> list[Any]:
    compiled = getattr(model, "optimizer", None)
    inner = getattr(compiled, "inner_optimizer", None)
    return [
        each for each in (compiled, inner, *more_optimizers(model).values()) if each is not None
    ]


def _base(obj: Any) -> Iterable[str]:
    name, base = str(obj.name), _snake_case(type(obj).__name__)
    # Bidirectional names its two layers after the layer that it wraps.
    bases = (base, f"forward_{base}", f"backward_{base}")
    return (each for each in bases if pattern(name, {each})[0] == each)


def _subclasses(cls: type) -> Iterator[type]:
    yield cls
    for inner in cls.__subclasses__():
        yield from _subclasses(inner)


def _snake_case(name: str) -> str:
    from keras.src.utils.naming import to_snake_case  # Keras' rule for names; not public

    return to_snake_case(name)
