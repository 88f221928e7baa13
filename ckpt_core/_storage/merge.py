"""One database out of several, by their indexes alone: no data is copied."""

from __future__ import annotations

from typing import Any

import tensorstore as ts

from ckpt_core._storage.database import Location, database_spec, system_error


def merge(item: Location, process_count: int, context: Any, *, target_data_file_bytes: int) -> None:
    """Makes the item's database out of those of all processes, without copying any data.

    Must use the context in which this process wrote: TensorStore copies index entries between
    databases only within one context.
    """
    try:
        parent_spec = database_spec(item, target_data_file_bytes=target_data_file_bytes)
        parent: Any = ts.KvStore.open(parent_spec, context=context).result()
        transaction: Any = ts.Transaction(atomic=True)
        target = parent.with_transaction(transaction)
        for process in range(process_count):
            spec = database_spec(
                item / f"ocdbt.process_{process}", target_data_file_bytes=target_data_file_bytes
            )
            child: Any = ts.KvStore.open(spec, context=context).result()
            child.experimental_copy_range_to(target).result()
        transaction.commit_async().result()
    except Exception as error:
        raise system_error(error, "merging the processes' databases") from error
