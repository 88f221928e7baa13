"""JSON of files that anybody may have written: how deep and how many its values are is known before they are made."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._options import MIB

MOST_VALUES_BYTES = 1024 * MIB
"""Limit of the memory that the values of one text may take; a million leaves of a record need less."""
_LIGHT_BYTES = 4 * MIB
"""A text up to this length is not looked at: its values take 30 times as much at most."""
_COSTS_BYTES = ((b"{", 232), (b"[", 80), (b'"', 32), (b",", 40), (b":", 48))
"""What each such character may cost in CPython: an object of values, a list, half a text, a number, an entry."""
_TEXTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def dump_json(value: Any) -> bytes:
    """Compact JSON in UTF-8; NaN and infinities as in Python's json, which reads them back."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(
        errors="surrogatepass"
    )


def parse_json(
    data: bytes,
    file: str,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    errors: str = "surrogatepass",
) -> Any:
    """The value of a JSON file.

    Args:
        data: the text.
        file: its name, for messages.
        pairs: makes each object of its names and values; None for a dict.
        errors: as for ``bytes.decode``.

    Raises:
        CheckpointCorrupt: invalid JSON, nested deeper than any program reads, or values beyond
            ``MOST_VALUES_BYTES``.
        MemoryError, RecursionError: this process has no memory or stack for what is sound.
    """
    refuse_heavy(data, file)
    try:
        return json.loads(data.decode(errors=errors), object_pairs_hook=pairs)
    except ValueError as error:
        raise CheckpointCorrupt(f"{file}: not valid JSON: {error}", file=file) from error
    except RecursionError as error:
        refuse_deep(data, file, error)
        raise


def refuse_heavy(data: bytes, file: str) -> None:
    """Raises CheckpointCorrupt if the values of a text could take more than ``MOST_VALUES_BYTES``."""
    if len(data) > _LIGHT_BYTES and (heavy := values_bytes(data)) > MOST_VALUES_BYTES:
        raise CheckpointCorrupt(
            f"{file}: the values in its {len(data)} bytes would take {heavy} bytes of memory, and can take "
            f"{MOST_VALUES_BYTES} at most: it is damaged, and not parsed",
            file=file,
        )


def values_bytes(data: bytes) -> int:
    """Upper limit of the memory for the values of a text, by counting; they are not made."""
    wide = (
        not data.isascii() or b"\\u" in data
    )  # one such character makes each of a text take 4 bytes
    return len(data) * (4 if wide else 1) + sum(
        cost * data.count(mark) for mark, cost in _COSTS_BYTES
    )


def refuse_deep(
    data: bytes, file: str, error: RecursionError, most_depth: int | None = None
) -> None:
    """Raises CheckpointCorrupt if the text itself is why the stack did not suffice, not how deep the caller is.

    Args:
        data, file: the text and the name of its file.
        error: what came of it.
        most_depth: the depth of sound values; None for as deep as this interpreter reads at all.
    """
    most = max(1000, sys.getrecursionlimit()) if most_depth is None else most_depth
    brackets = np.frombuffer(_TEXTS.sub(b"", data).translate(None, _NO_BRACKETS), np.uint8)
    depths = np.cumsum(np.where(np.isin(brackets, list(b"[{")), 1, -1), dtype=np.int32)
    if depths.max(initial=0) > most:
        raise CheckpointCorrupt(
            f"{file}: not valid JSON: {error}: it is nested more than {most} levels deep",
            file=file,
        ) from error
