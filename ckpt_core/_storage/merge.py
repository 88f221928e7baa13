"""One database out of several, by their indexes alone: no data is copied."""

from __future__ import annotations

from typing import Any

from ckpt_core._storage._tensorstore import ts
from ckpt_core._storage.writer import Location, database_spec, settled


def merge(item: Location, process_count: int, context: Any, *, target_data_file_bytes: int) -> None:
    """Makes the item's database out of those of all processes, without copying any data.

    Must use the context in which this process wrote: TensorStore copies index entries between
    databases only within one context.
    """
    doing = "merging the processes' databases"
    parent_spec = database_spec(item, target_data_file_bytes=target_data_file_bytes)
    parent = settled(ts.KvStore.open(parent_spec, context=context), doing)
    transaction: Any = ts.Transaction(atomic=True)
    target = parent.with_transaction(transaction)
    for process in range(process_count):
        spec = database_spec(
            item / f"ocdbt.process_{process}", target_data_file_bytes=target_data_file_bytes
        )
        child = settled(ts.KvStore.open(spec, context=context), doing)
        settled(child.experimental_copy_range_to(target), doing)
    settled(transaction.commit_async(), doing)
