"""Items that are no trees: a process's state, JSON, and Orbax's single arrays and random keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from ckpt_core import _adapters, _processes
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    Mismatch,
    StructureMismatch,
)
from ckpt_core._format import states
from ckpt_core._lazy import jax
from ckpt_core._load import place
from ckpt_core._load.foreign import read_special
from ckpt_core._load.opened import Opened, SavedItem
from ckpt_core._load.wants import NOT_SAVED, Planned


def plan_other(opened: Opened, saved: SavedItem, like: Any, context: Any) -> Planned:
    """Items that are no trees: a process's state, JSON, and Orbax's single arrays and keys."""
    adapter = None if like is NOT_SAVED else _adapters.adapter_for(like)
    if saved.form == "process":
        state = _process_state(opened, saved, adapter, like)
        if adapter is None:
            return Planned(saved, [], [], {}, lambda _: state)
        check = getattr(adapter, "check_state", None)
        if check is not None:
            check(like, state)

        return _plan_pipeline(saved, adapter, like, state)
    if saved.form == "json":
        return Planned(saved, [], [], {}, lambda _: saved.value)
    value = _special_value(opened, saved, context)
    return Planned(saved, [], [], {}, lambda _: value)


def _plan_pipeline(saved: SavedItem, adapter: Any, like: Any, state: Any) -> Planned:
    """Set before the arrays are read, so that the pipeline fills up meanwhile; undone on failure."""

    def hold() -> Callable[[], object]:
        before = getattr(adapter, "get_position", adapter.get_state)(like)
        return lambda: adapter.set_state(like, before)

    return Planned(
        saved,
        [],
        [],
        {},
        lambda _: like,
        hold=hold,
        begin=lambda: adapter.set_state(like, state),
        live=[(like, False)],
    )


def _process_state(opened: Opened, saved: SavedItem, adapter: Any, like: Any) -> Any:
    """The state that this process saved, with its types."""
    processes = _processes.this_run()
    name = states.file_name(processes.index, processes.count)
    directory = f"{opened.path}/{saved.directory}"
    present = [file for file in opened.form.files(directory) if file.startswith("process_")]
    if opened.record is not None:
        # the record says which files there must be: one that is gone is damage
        present = [
            states.file_name(index, saved.process_count) for index in range(saved.process_count)
        ]
    if name not in present and opened.record is not None and hasattr(adapter, "check_state"):
        # the adapter knows whether its pipeline can go on with another number of processes
        name = present[processes.index % len(present)]
    if name not in present:
        counts = sorted({file.rpartition("-of-")[2].removesuffix(".json") for file in present})
        raise CheckpointError(
            f"{opened.path}: item {saved.name!r} was saved by {', '.join(counts) or '?'} process(es), and "
            f"{processes.count} run now: the state of a data pipeline belongs to one process. Start as many "
            "processes as saved it, or restore the other items and begin the data anew"
        )
    if adapter is not None and not _adapters.is_per_process(adapter):
        raise StructureMismatch(
            [
                Mismatch(
                    "(root)",
                    "kind",
                    "the state of a process",
                    type(like).__name__,
                    None,
                    saved.name,
                )
            ],
            where=opened.path,
        )
    if opened.record is not None:
        exact = f"{saved.directory}/exact/{name}"
        return states.load_exact(opened.read_file(exact), exact)
    file = f"{saved.directory}/{name}"
    try:
        text = opened.read_file(file).decode(errors="surrogatepass")
        return _json_or(text) if adapter is None else adapter.from_text(like, text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointCorrupt(
            f"{file}: not the state of a process: {error!r}", file=file
        ) from error


def _json_or(text: str) -> Any:
    """The value of what Grain and others of Orbax's handlers write as JSON; else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _special_value(opened: Opened, saved: SavedItem, context: Any) -> Any:
    """An item of Orbax's that is one array or one random key."""
    array = read_special(opened, saved, context)
    if saved.form == "array":
        tree = saved.orbax
        as_numpy = tree is not None and any(leaf.value_type == "np.ndarray" for leaf in tree.leaves)
        return array if as_numpy else place.as_jax(array, saved.name)
    if array.ndim == 0 or array.dtype != np.uint32:
        raise CheckpointCorrupt(
            f"item {saved.name!r}: {array.dtype}{list(array.shape)} is no random key",
            leaf=saved.name,
        )
    note = opened.form.read(opened.path, f"{saved.name}/jax_random_key_metadata/metadata") or b"{}"
    if b'"typed": true' in note or b'"typed":true' in note:
        # Orbax does not say which implementation; the key's width tells all but unsafe_rbg
        impl = "threefry2x32" if array.shape[-1] == 2 else "rbg"
        return jax.random.wrap_key_data(jax.device_put(array), impl=impl)
    return jax.device_put(array)
