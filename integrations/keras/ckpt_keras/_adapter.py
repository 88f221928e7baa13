"""The adapter: gets the arrays of Keras objects, and sets arrays on their live variables."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np

from ckpt_core import CheckpointError
from ckpt_keras import _matching, _slots
from ckpt_keras._assets import warn_of_left_out
from ckpt_keras._matching import Named


class KerasAdapter:
    """Reads and sets models, layers, optimizers, metrics, seed generators and single variables. A model's state is the tree of
    ``Model.get_state_tree``, with the variables added that Keras loses because their names are not unique: see ``_slots``.
    """

    def accepts(self, cls: type, /) -> bool:
        """Whether objects of this class are Keras objects with state."""
        keras: Any = sys.modules.get("keras")
        return keras is not None and issubclass(
            cls,
            (
                keras.layers.Layer,
                keras.optimizers.Optimizer,
                keras.metrics.Metric,
                keras.random.SeedGenerator,
                keras.Variable,
            ),
        )

    def get_state(self, obj: Any, /) -> Any:
        """The arrays of an object under Keras' names; CheckpointError if a model was not built. It creates the slots of an
        optimizer that has none yet, all zero, so that a checkpoint is complete and a restore has variables to set.
        """
        slots = slots_of(obj)
        if _is_layer(obj):
            warn_of_left_out(obj)
        return _slots.nested((slot.path, value_of(slot.variable)) for slot in slots)

    def set_state(self, obj: Any, state: Any, /) -> None:
        """Assigns a state with the structure of ``get_state(obj)``."""
        for slot in slots_of(obj):
            slot.variable.assign(reduce(getitem, slot.path, state))
        if _is_layer(obj):
            _refresh_normalization(obj)

    def set_leaves(self, obj: Any, leaves: Mapping[tuple[str, ...], Any], /) -> list[Any]:
        """Assigns some variables, by their paths in ``get_state(obj)``; returns their new values."""
        chosen = [slot for slot in slots_of(obj) if slot.path in leaves]
        for slot in chosen:
            slot.variable.assign(leaves[slot.path])
        return [slot.variable.value for slot in chosen]

    def align(
        self, obj: Any, saved: Mapping[str, Any], *, ordered: bool
    ) -> tuple[dict[str, str], set[str]]:
        """Maps saved names to names in the object; see ``ckpt_core.Adapter``."""
        del ordered  # the counters in the names give the order
        before = [Named(path, tuple(leaf.shape), str(leaf.dtype)) for path, leaf in saved.items()]
        now = named(obj)
        if _is_layer(obj):
            return _matching.align_model(before, now, counted=_slots.counted_in(obj))
        return _matching.align_plain(before, now, counted=_slots.counted_anywhere()), set()

    def renamed(self, rename: Mapping[str, str], saved: Sequence[str]) -> dict[str, str]:
        """New names of the saved paths that a dict for ``rename=`` changes; see ``_matching``."""
        return _matching.renamed(rename, saved)


def slots_of(obj: Any) -> Sequence[_slots.Slot]:
    """Every variable of a Keras object, in a fixed order."""
    if not _is_layer(obj):
        return _slots.slots_of_object(obj)
    if hasattr(obj, "jax_state_sync"):
        obj.jax_state_sync()  # inside fit the trainer holds the values, not the variables
    if not obj.built:
        raise CheckpointError(
            f"the Keras model {obj.name!r} was not built, so it has no variables to save or restore: call it on a batch "
            "or build(input_shape), or let OrbaxCheckpointCallback restore it inside of fit"
        )
    optimizer = getattr(obj, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(obj.trainable_variables)
    return _slots.slots_of_model(obj)


def _refresh_normalization(model: Any) -> None:
    """Updates the copies of its variables with which an adapted Normalization layer computes."""
    every = model._flatten_layers()  # no public method finds layers in attributes
    kind = import_keras().layers.Normalization
    adapted = [layer for layer in every if isinstance(layer, kind)]
    for layer in adapted:
        layer.finalize_state()
    for name in ("train", "test", "predict") if adapted else ():
        if getattr(model, f"{name}_function", None) is not None:
            getattr(model, f"make_{name}_function")(force=True)


def named(obj: Any) -> list[Named]:
    """The variables of a live object in the form that ``_matching`` takes."""
    root, owners = (), dict[int, tuple[str, ...]]()
    if _is_layer(obj):
        root, owners = (str(obj.name),), _slots.owners_of(obj)
    return [
        Named(
            slot.text,
            tuple(slot.variable.shape),
            str(slot.variable.value.dtype if on_jax() else slot.variable.dtype),
            (*root, *owners.get(id(slot.variable), ())),
        )
        # The order in which the nested tree is saved.
        for slot in _leaves(_slots.nested((slot.path, slot) for slot in slots_of(obj)))
    ]


def _leaves(node: Any) -> Iterator[_slots.Slot]:
    if isinstance(node, _slots.Slot):
        yield node
        return
    for child in node.values():
        yield from _leaves(child)


def value_of(variable: Any) -> Any:
    """The array of a variable, a copy on backends that write in place; CheckpointError if an interrupted step took it."""
    if not on_jax():
        return np.array(import_keras().ops.convert_to_numpy(variable.value))
    if variable._value is None:  # a deleted array still tells its shape to a restore
        raise CheckpointError(
            f"{variable.path} has no value: Ctrl-C interrupted a training step, for whose time Keras takes the arrays out of "
            "the model. fit with OrbaxCheckpointCallback goes on from the last checkpoint; if there is none, create and "
            "compile the model again"
        )
    return variable.value


def is_lost(variable: Any) -> bool:
    """Whether an interrupted training step left a variable of the JAX backend without its array."""
    held = variable._value  # `value` would make up an initial one
    return held is None or (hasattr(held, "is_deleted") and held.is_deleted())


def _is_layer(obj: Any) -> bool:
    return isinstance(obj, import_keras().layers.Layer)


def import_keras() -> Any:
    """The ``keras`` package; without it or its backend, the ModuleNotFoundError says what to do."""
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name == "keras":
            what = "ckpt_keras needs Keras: pip install 'ckpt-core[keras]'"
        else:
            what = (
                f"importing Keras failed, its backend needs {error.name!r}: ckpt_keras works on the "
                "JAX backend. Set KERAS_BACKEND=jax before Keras is imported for the first time"
            )
        raise ModuleNotFoundError(what, name=error.name) from error
    return keras


def on_jax() -> bool:
    """Whether Keras runs on JAX."""
    return import_keras().backend.backend() == "jax"


def require_jax(host_only: bool) -> None:
    """Raises RuntimeError for another backend than JAX, unless the caller asked for copies on the host."""
    if not host_only and not on_jax():
        raise RuntimeError(
            "ckpt_keras needs the JAX backend for sharded, asynchronous checkpoints; the active backend is "
            f"{import_keras().backend.backend()!r}. Set KERAS_BACKEND=jax before importing keras, or pass host_only=True "
            "(one process, numpy copies)"
        )


ADAPTER = KerasAdapter()
"""The entry point ``ckpt_core.adapters: keras`` refers to this object."""
