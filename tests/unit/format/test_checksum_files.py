"""The text of a checksum file, which is put together a few hundred chunks at a time."""

from __future__ import annotations

import gc
import json

import pytest

from ckpt_core._format.checksums import Checksums, dump_checksums
from ckpt_core._layout.chunks import BLOCK_BYTES


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 512, 1000])
def test_it_is_that_of_one_call_of_json(count: int) -> None:
    chunks = {f'a"\\ü\udc80/{n}/c/0': (n, 2**32 - 1)[: 1 + n % 2] for n in range(count)}
    data = dump_checksums(chunks)
    whole = {"block_bytes": BLOCK_BYTES, "chunks": chunks}
    text = json.dumps(whole, separators=(",", ":"), ensure_ascii=False)
    assert data == text.encode(errors="surrogatepass")
    read = Checksums(data, "file")
    assert [*read.keys] == [*chunks]
    assert all(read.get(key) == [*sums] for key, sums in chunks.items())


def test_it_leaves_the_garbage_collector_nothing_to_look_after() -> None:
    """json alone made a tuple of every entry first: collections that went through all objects of the process."""
    chunks = {f"leaf{n}/c": (n,) for n in range(20_000)}
    gc.collect()
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    gc.callbacks.append(note)
    try:
        dump_checksums(chunks)
    finally:
        gc.callbacks.remove(note)
    assert len(collections) < 10, collections
