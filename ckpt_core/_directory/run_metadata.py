"""JSON that belongs to a whole run: beside its steps, in the place where Orbax keeps it."""

from __future__ import annotations

import json
from typing import Any

from ckpt_core._directory import Backend
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.record import dump_json, parse_json

_FOLDER = "metadata"
_FILE = "_ROOT_METADATA"


def read_run_metadata(backend: Backend, directory: str) -> Any:
    """What was written for the run whose steps lie in ``directory``; None where nothing was.

    Raises:
        CheckpointCorrupt: the file is damaged.
    """
    data = backend.read(f"{directory}/{_FOLDER}", _FILE)
    if data is None:
        return None
    file = f"{_FOLDER}/{_FILE}"
    value = parse_json(data, file)
    if not isinstance(value, dict):
        raise CheckpointCorrupt(f"{directory}/{file}: not a JSON object", file=file)
    return value.get("custom_metadata")


def write_run_metadata(backend: Backend, directory: str, value: Any) -> None:
    """Replaces it, in one step.

    Raises:
        TypeError: no JSON object.
    """
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"metadata must be plain JSON values: {error}") from error
    if not isinstance(value, dict):
        raise TypeError(f"a run's metadata is a dict of JSON values, got a {type(value).__name__}")
    data = dump_json({"internal_metadata": {}, "custom_metadata": value})
    backend.put(f"{directory}/{_FOLDER}", _FILE, data)
