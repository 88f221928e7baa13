"""JSON metadata of a whole run, in the file next to the steps that Orbax uses for it."""

from __future__ import annotations

import json
from typing import Any

from ckpt_core._directory.backend import Backend
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.plain_json import refuse_keys
from ckpt_core._format.record import dump_json, parse_json
from ckpt_core.arguments import an

_FOLDER = "metadata"
_FILE = "_ROOT_METADATA"
_EARLIER_FILE = "metadata"
"""In which Orbax wrote the value itself until November 2024."""


def read_run_metadata(backend: Backend, directory: str) -> Any:
    """The metadata of the run with its steps in ``directory``; None if there is none."""
    data = backend.read(f"{directory}/{_FOLDER}", _FILE)
    if data is None:
        return _earlier(backend, directory)
    file = f"{_FOLDER}/{_FILE}"
    value = parse_json(data, file)
    if not isinstance(value, dict):
        raise CheckpointCorrupt(f"{directory}/{file}: not a JSON object", file=file)
    return value.get("custom_metadata")


def _earlier(backend: Backend, directory: str) -> Any:
    """What an early Orbax wrote; None if there is no such file, or somebody else's."""
    try:
        data = backend.read(f"{directory}/{_FOLDER}", _EARLIER_FILE)
        value = None if data is None else parse_json(data, _EARLIER_FILE)
    except CheckpointCorrupt:
        return None
    return value if isinstance(value, dict) else None


def write_run_metadata(backend: Backend, directory: str, value: Any) -> None:
    """Atomically replaces the metadata; raises TypeError if ``value`` is not a dict of plain JSON values."""
    try:
        refuse_keys(value)
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"metadata must be plain JSON values: {error}") from None
    if not isinstance(value, dict):
        raise TypeError(f"a run's metadata is a dict of JSON values, got {an(value)}")
    data = dump_json({"internal_metadata": {}, "custom_metadata": value})
    backend.put(f"{directory}/{_FOLDER}", _FILE, data)
