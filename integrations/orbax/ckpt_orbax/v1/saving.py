"""``save`` and its forms: one checkpoint at one path."""

from __future__ import annotations

import warnings
from typing import Any

import ckpt_core as ckpt
from ckpt_orbax._paths import as_text
from ckpt_orbax._response import AsyncResponse, Waiting
from ckpt_orbax.v1 import _engine, _items
from ckpt_orbax.v1._context import get_context
from ckpt_orbax.v1._names import STATE, check_checkpointables
from ckpt_orbax.v1.errors import DestinationExistsError


def save(
    path: Any,
    state: Any,
    *,
    checkpointable_name: str = STATE,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> None:
    """Writes a pytree at ``path``; when it returns, a power cut cannot lose it.

    Args:
        path: directory, or URL in a bucket; it must not exist.
        state: pytree of arrays, numbers and text.
        checkpointable_name: name of the pytree in the checkpoint.
        overwrite: replace what is there, in one step: a crash leaves the old or the new one.
        custom_metadata: a JSON value of your own.

    Raises:
        DestinationExistsError: there is something at ``path``.
        ValueError: the tree is empty, or has a leaf that Orbax does not save.

    Example:
        >>> from ckpt_orbax import v1 as ocp
        >>> import numpy as np, tempfile
        >>> path = tempfile.mkdtemp() + "/checkpoint"
        >>> ocp.save(path, {"w": np.ones(2)})
        >>> ocp.load(path)["w"].tolist()
        [1.0, 1.0]
    """
    _items.check_state(state)
    checkpointables = {checkpointable_name: state}
    _begin(path, checkpointables, overwrite, custom_metadata).result()


def save_async(
    path: Any,
    state: Any,
    *,
    checkpointable_name: str = STATE,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> AsyncResponse[None]:
    """As ``save``, in the background; blocks only until the arrays are copied."""
    _items.check_state(state)
    return _begin(path, {checkpointable_name: state}, overwrite, custom_metadata)


def save_checkpointables(
    path: Any,
    checkpointables: dict[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> None:
    """Writes several named objects at ``path``: pytrees, data pipelines, objects with a handler."""
    save_checkpointables_async(
        path, checkpointables, overwrite=overwrite, custom_metadata=custom_metadata
    ).result()


def save_checkpointables_async(
    path: Any,
    checkpointables: dict[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> AsyncResponse[None]:
    """As ``save_checkpointables``, in the background."""
    if not checkpointables:
        raise ValueError(f"checkpointables must name what is to be saved, got {checkpointables!r}")
    check_checkpointables(checkpointables, "checkpointables")
    return _begin(path, checkpointables, overwrite, custom_metadata)


def _begin(path: Any, checkpointables: dict[str, Any], overwrite: bool, metadata: Any) -> Waiting:
    """Starts a save; every form of ``save`` ends here."""
    context = get_context()
    options = _engine.engine_options(context)
    items = _items.items_of(checkpointables, context)
    target = as_text(path)
    if overwrite:
        _engine.logger.info("%s: what is there is replaced, since overwrite=True was given", target)
    try:
        pending = ckpt.save_async(
            target, items=items, overwrite=overwrite, metadata=metadata, options=options
        )
    except ckpt.CheckpointExists as error:
        raise DestinationExistsError(str(error)) from error

    def wait(timeout: float | None) -> None:
        pending.result(timeout)

    return Waiting(wait, context.asynchronous.post_finalization_callback)


def save_pytree(*arguments: Any, **named: Any) -> None:
    """Deprecated name of ``save``."""
    warnings.warn("Use `save` instead.", DeprecationWarning, stacklevel=2)
    save(*arguments, **named)


def save_pytree_async(*arguments: Any, **named: Any) -> AsyncResponse[None]:
    """Deprecated name of ``save_async``."""
    warnings.warn("Use `save_async` instead.", DeprecationWarning, stacklevel=2)
    return save_async(*arguments, **named)
