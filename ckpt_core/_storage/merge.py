"""Merges the databases of several processes by their indexes, without copying data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckpt_core._storage._tensorstore import ts
from ckpt_core._storage.failures import settled
from ckpt_core._storage.location import NewDatabase


def merge(item: NewDatabase, process_count: int, context: Any) -> None:
    """Creates the item's database from those of all processes, without copying data.

    Called on process 0, after all processes have written.

    Args:
        item: the item's database.
        process_count: number of processes, each with a database ``ocdbt.process_<i>``.
        context: the context with which this process wrote: TensorStore copies index entries only
            between databases of one context.
    """
    processes = range(process_count)
    add(item, (item.of_process(process, process_count) for process in processes), context)


def add(item: NewDatabase, children: Iterable[NewDatabase], context: Any) -> None:
    """Adds what databases in folders of an item's database hold, without copying data; creates it if need be."""
    doing = "merging the processes' databases"
    parent = settled(ts.KvStore.open(item.spec(), context=context), doing)
    transaction: Any = ts.Transaction(atomic=True)
    target = parent.with_transaction(transaction)
    for database in children:
        child = settled(ts.KvStore.open(database.spec(), context=context), doing)
        settled(child.experimental_copy_range_to(target), doing)
    settled(transaction.commit_async(), doing)
