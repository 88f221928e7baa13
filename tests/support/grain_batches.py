"""Grain datasets as iterators over batches of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

grain = pytest.importorskip("grain")

READ = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)


@pytest.fixture(name="opened")
def make_opened() -> Iterator[Callable[[Any], Any]]:
    """Turns a dataset into an iterator, closed at the end."""
    iterators: list[Any] = []

    def open_iterator(dataset: Any) -> Any:
        iterators.append(iter(dataset.batch(2).to_iter_dataset(READ)))
        return iterators[-1]

    yield open_iterator
    for iterator in iterators:
        iterator.close()
