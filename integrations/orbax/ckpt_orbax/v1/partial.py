"""Saving a pytree piece by piece: parts are written as they come, and ``finalize`` commits all of them.

A session belongs to the process that began it. Orbax keeps the parts of a dead process below ``PATH.partial_save``, where
another one may go on; here the next writer removes them.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import Any, NamedTuple

import ckpt_core as ckpt
from ckpt_orbax._paths import as_text
from ckpt_orbax._response import AsyncResponse, Waiting
from ckpt_orbax.v1 import _engine, _items
from ckpt_orbax.v1._context import get_context
from ckpt_orbax.v1._names import STATE
from ckpt_orbax.v1.errors import DestinationExistsError


class _Session(NamedTuple):
    writer: Any
    stack: ExitStack
    metadata: dict[str, Any]


_sessions: dict[str, _Session] = {}
_lock = threading.RLock()


def save(path: Any, state: Any, *, custom_metadata: Any = None) -> None:
    """Adds a part of a pytree to the checkpoint that ``finalize(path)`` will commit.

    When it returns, the arrays may be changed and deleted. A leaf that was added before is refused, as by Orbax.

    Args:
        path: where the checkpoint will be; the first call for a path begins a session.
        state: a pytree of dictionaries; dictionaries at the same path are joined.
        custom_metadata: a dictionary of JSON values, which is merged with that of earlier calls.

    Raises:
        DestinationExistsError: there is a checkpoint at ``path``.
        CheckpointError: a leaf is there already; several processes run.
        ValueError: the tree has a leaf that Orbax does not save.

    Example:
        >>> from ckpt_orbax import v1 as ocp
        >>> import numpy as np, tempfile
        >>> path = tempfile.mkdtemp() + "/checkpoint"
        >>> ocp.partial.save(path, {"layer_0": np.ones(2)})
        >>> ocp.partial.save(path, {"layer_1": np.zeros(2)})
        >>> ocp.partial.finalize(path)
        >>> sorted(ocp.load(path))
        ['layer_0', 'layer_1']
    """
    _items.check_state(state)
    context = get_context()
    items = _items.items_of({STATE: state}, context)
    with _lock:
        session = _session(path, context)
        for name, value in items.items():
            session.writer.add(name, value)
        if custom_metadata:
            session.metadata.update(custom_metadata)
            session.writer.set_metadata(session.metadata)


def save_async(path: Any, state: Any, *, custom_metadata: Any = None) -> AsyncResponse[None]:
    """As ``save``; the part is written before it returns."""
    save(path, state, custom_metadata=custom_metadata)
    return Waiting(lambda timeout: None)


def finalize(path: Any) -> None:
    """Commits all parts; when it returns, a power cut cannot lose the checkpoint.

    Raises:
        FileNotFoundError: nothing was added for this path in this process.
        DestinationExistsError: another checkpoint came to be there meanwhile; the parts are gone.
    """
    with _lock:
        session = _sessions.pop(_key(path), None)
        if session is None:
            raise FileNotFoundError(
                f"{path}: ocp.partial.save() was not called for it in this process: call it first; parts that "
                "another process has written are lost with that process"
            )
        try:
            session.stack.close()
        except ckpt.CheckpointExists as error:
            raise DestinationExistsError(str(error)) from error


def _session(path: Any, context: Any) -> _Session:
    key = _key(path)
    found = _sessions.get(key)
    if found is None:
        stack = ExitStack()
        try:
            options = _engine.engine_options(context)
            writer = stack.enter_context(ckpt.writer(as_text(path), options=options))
        except ckpt.CheckpointExists as error:
            raise DestinationExistsError(str(error)) from error
        found = _sessions[key] = _Session(writer, stack, {})
    return found


def _key(path: Any) -> str:
    text = as_text(path)
    return text if "://" in text else os.path.abspath(text)
