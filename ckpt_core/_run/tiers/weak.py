"""Methods handed to an object that their own object holds, without a reference cycle."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from ckpt_core._errors import CheckpointError

T = TypeVar("T")


def weakly(method: Callable[..., T]) -> Callable[..., T]:
    """The method, without a reference to its object: a cycle would delay that object's collection."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> T:
        bound = reference()
        if bound is None:
            raise CheckpointError("its Checkpointer is gone")
        return bound(*arguments)

    return call
