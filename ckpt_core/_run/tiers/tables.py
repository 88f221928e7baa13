"""Tables that process 0 publishes, of which each process reads the rows that concern it.

What stands in the answer of an agreement goes to every process, so a list of all processes in it costs bytes by the square of
their number. A table is put at the coordination service once, in blocks of about 1 KiB, and is not put again while it stays
the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

from ckpt_core._errors import CheckpointError

_BLOCK_BYTES = 1024
_ROW_BYTES = 3
"""Of an empty row too, which most may be."""


class Keys(Protocol):
    """What a table needs of ``Processes``."""

    def put(self, name: str, text: str) -> None:
        """Sets a key."""
        ...

    def get(self, name: str) -> str | None:
        """The text of a key; None if it is not set."""
        ...

    def drop(self, name: str) -> None:
        """Deletes a key and all below it."""
        ...


class Table:
    """The newest table of one name, the same on all processes and of no other table; its earlier ones are deleted."""

    def __init__(self, keys: Keys, name: str) -> None:
        self._keys = keys
        self._name = name
        self._published = ("", tuple[str, ...]())  # on process 0
        self._blocks: dict[str, list[str]] = {}  # read here, of the newest table

    def publish(self, rows: Sequence[str]) -> str:
        """On process 0, while it decides: the name of the table for the answer; empty if all rows are. The table
        before is deleted: each sender of a value for this decision has read of it what it needed.
        """
        if not any(rows):
            return ""
        digest = hashlib.sha256(json.dumps(list(rows)).encode()).hexdigest()[:16]
        size_bytes = sum(map(len, rows)) + _ROW_BYTES * len(rows)
        rows_each = max(1, _BLOCK_BYTES * len(rows) // size_bytes)
        table = f"{digest}.{rows_each}"
        before, _ = self._published
        if table == before:
            return table
        for first in range(0, len(rows), rows_each):
            block = json.dumps(list(rows[first : first + rows_each]), separators=(",", ":"))
            self._keys.put(f"{self._name}/{table}/{first // rows_each}", block)
        self._published = (table, tuple(rows))
        if before:
            self._keys.drop(f"{self._name}/{before}")
        return table

    def row(self, table: str, number: int) -> str:
        """A row of the table with the name that the answer had, read from the service once; raises CheckpointError if
        it is gone.
        """
        published, rows = self._published
        if not table or table == published:
            return rows[number] if table else ""
        rows_each = int(table.rpartition(".")[2])
        key = f"{self._name}/{table}/{number // rows_each}"
        if key not in self._blocks:
            text = self._keys.get(key)
            if text is None:
                raise CheckpointError(
                    f"what process 0 decided is gone from the coordination service: {key}"
                )
            prefix = f"{self._name}/{table}/"
            same = {one: block for one, block in self._blocks.items() if one.startswith(prefix)}
            self._blocks = same | {key: json.loads(text)}
        return self._blocks[key][number % rows_each]
