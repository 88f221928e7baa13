"""Arguments of single leaves; and Orbax's handlers of types, which are names for ckpt's own ways.

ckpt stores each type of leaf in one way. A program that registers one of Orbax's handlers for the
type that it is for changes nothing by it; a handler of its own is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ckpt_orbax._leaves import PLACEHOLDER
from ckpt_orbax._refused import not_offered
from ckpt_orbax.path.format_utils import is_ocdbt_checkpoint
from ckpt_orbax.v0.leaf_args import (
    ArrayRestoreArgs,
    RestoreArgs,
    SaveArgs,
    SingleReplicaArrayRestoreArgs,
)


class ParamInfo:
    """Describes a leaf to a handler of types, of which ckpt calls none: for programs that only name it.

    Args:
        **described: become attributes.
    """

    def __init__(self, **described: Any) -> None:
        self.__dict__.update(described)


class TypeHandler:
    """Base of handlers of types; ckpt calls none of them, and refuses those of your own.

    Args:
        *_, **__: of Orbax's handler, of no effect.
    """

    types: tuple[type, ...] = ()

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def typestr(self) -> str:
        """The name of the type."""
        return type(self).__name__


class NumpyHandler(TypeHandler):
    """Stands for the way in which ckpt stores numpy arrays."""

    types = (np.ndarray,)


class ScalarHandler(NumpyHandler):
    """Stands for the way in which ckpt stores numbers."""

    types = (int, float, np.number)


class StringHandler(TypeHandler):
    """Stands for the way in which ckpt stores text."""

    types = (str,)


class ArrayHandler(TypeHandler):
    """Stands for the way in which ckpt stores jax arrays; each process writes what it holds alone."""

    types = (jax.Array,)


class SingleReplicaArrayHandler(ArrayHandler):
    """As ``ArrayHandler``; leaves with ``SingleReplicaArrayRestoreArgs`` are read once and sent on."""


_STANDARD = (ScalarHandler, NumpyHandler, ArrayHandler, StringHandler)


class TypeHandlerRegistry:
    """Handlers by type: those that stand for ckpt's own ways.

    Args:
        *handlers: pairs of a type and its handler.
    """

    def __init__(self, *handlers: tuple[Any, Any]) -> None:
        self._handlers = {kind: cls() for cls in _STANDARD for kind in cls.types}
        for kind, handler in handlers:
            self.add(kind, handler)

    def add(
        self,
        ty: Any,
        handler: Any,
        func: Callable[[Any], bool] | None = None,
        override: bool = False,
    ) -> None:
        """Adds a handler; see ``register_type_handler``."""
        register_type_handler(ty, handler, func, override)

    def get(self, ty: Any) -> TypeHandler:
        """The handler of a type.

        Raises:
            ValueError: ckpt does not store it.
        """
        found = next((one for kind, one in self._handlers.items() if issubclass(ty, kind)), None)
        if found is None:
            raise ValueError(
                f"Unknown type: {ty}. Supported are jax and numpy arrays, numbers, text"
            )
        return found

    def has(self, ty: Any) -> bool:
        """Whether there is a handler of a type."""
        return any(issubclass(ty, kind) for kind in self._handlers)


def create_type_handler_registry(*handlers: tuple[Any, Any]) -> TypeHandlerRegistry:
    """Handlers by type; see ``TypeHandlerRegistry``."""
    return TypeHandlerRegistry(*handlers)


def register_type_handler(
    ty: Any,
    handler: Any,
    func: Callable[[Any], bool] | None = None,
    override: bool = False,
) -> None:
    """Accepts one of Orbax's handlers for the type that it is for, which is stored so anyhow.

    Args:
        ty: the type.
        handler: one of those of this module.
        func, override: of no effect.

    Raises:
        NotOffered: a handler of your own, or of another type.
    """
    standard = type(handler) in (*_STANDARD, SingleReplicaArrayHandler)
    if not standard or not isinstance(ty, type) or not issubclass(ty, handler.types):
        raise not_offered(
            f"register_type_handler({getattr(ty, '__name__', ty)}, {type(handler).__name__}())",
            "ckpt stores each type of leaf in one way, which Orbax reads",
            "an item of its own, with a CheckpointHandler of yours or with get_state() and set_state()",
        )


def get_type_handler(ty: Any) -> TypeHandler:
    """The handler that stands for how ckpt stores a type; ValueError if it does not."""
    return TypeHandlerRegistry().get(ty)


def has_type_handler(ty: Any) -> bool:
    """Whether ckpt stores a type."""
    return TypeHandlerRegistry().has(ty)


def supported_types() -> list[Any]:
    """The types that ckpt stores through this package."""
    return [kind for cls in _STANDARD for kind in cls.types]


def is_supported_type(value: Any, *_: Any) -> bool:
    """Whether ckpt stores a value through this package."""
    return isinstance(value, tuple(supported_types()))


def register_standard_handlers_with_options(*, use_ocdbt: bool = True, **_: Any) -> None:
    """Accepts options about how arrays are written, which are ckpt's to choose.

    Raises:
        NotOffered: ``use_ocdbt=False``.
    """
    if not use_ocdbt:
        raise not_offered(
            "register_standard_handlers_with_options(use_ocdbt=False)",
            "it would change what is stored",
            "leave it at True; ckpt stores OCDBT and zarr3, which Orbax reads",
        )


__all__ = [
    "PLACEHOLDER",
    "ArrayHandler",
    "ArrayRestoreArgs",
    "NumpyHandler",
    "ParamInfo",
    "RestoreArgs",
    "SaveArgs",
    "ScalarHandler",
    "SingleReplicaArrayHandler",
    "SingleReplicaArrayRestoreArgs",
    "StringHandler",
    "TypeHandler",
    "TypeHandlerRegistry",
    "create_type_handler_registry",
    "get_type_handler",
    "has_type_handler",
    "is_ocdbt_checkpoint",
    "is_supported_type",
    "register_standard_handlers_with_options",
    "register_type_handler",
    "supported_types",
]
