"""Our database, signed again, so that what lies in it is believed so far."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crc32c
import tensorstore as ts

from tests.contract.faults.crafted import by_hand
from tests.contract.faults.crafted.by_hand import GIB, Case, missing, node, varint, zstd_zeros
from tests.contract.faults.crafted.signed import read_record, sign, write_record


def _rewritten(
    name: str, base: str, change: Callable[[bytes], bytes], says: str = "", key: str = "large/c/0"
) -> Case:
    """A case in whose database one value is another one; all of it is signed."""

    def make(path: Path) -> None:
        store: Any = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/state/"}).result()
        store.write(key, change(bytes(store.read(key).result().value))).result()
        sign(path)

    return Case(f"database-{name}{base}", make, base=base, says=says)


def _terabyte_chunk(base: str, says: str) -> Case:
    """A case in which record and `zarr.json` agree about a leaf that is not what is stored."""
    shape = [2**38]

    def make(path: Path) -> None:
        record = read_record(path)
        item = record["items"]["state"]
        item["leaf_types"][item["leaves"][-1]][2:4] = [shape, shape]
        write_record(path, record)
        metadata = {"shape": shape, "chunk_grid": by_hand.grid(*shape)}
        rewrite = lambda data: json.dumps(json.loads(data) | metadata).encode()  # noqa: E731
        _rewritten("", base, rewrite, key="large/zarr.json").make(path)

    return Case(f"database-terabyte-chunk{base}", make, base=base, says=says)


def _root(
    name: str, node: Callable[[], bytes], says: str, *, record: bool = True, **lies: int
) -> Case:
    """A case whose index has another root; without a record it is of Orbax. Lies are of `put_root`."""

    def make(path: Path) -> None:
        item = path / "state"
        shutil.rmtree(item / "d", ignore_errors=True)
        (item / "manifest.ocdbt").unlink()
        if not record:
            (path / "ckpt.json").unlink()
            (item / "_METADATA").write_bytes(by_hand.ONE_ARRAY)
            (path / "_CHECKPOINT_METADATA").write_text("{}")
        put_root(item, node(), **lies)
        if record:
            _sign_sparse(path)

    return Case(f"index-{name}{'' if record else '-orbax'}", make, says=says)


def put_root(item: Path, node: bytes, *, length: int = 0, grown: int = 0) -> None:
    """A database of one key, whose root is then replaced: the manifest says this length, and the file grows to that size."""
    config = {"compression": None, "max_inline_value_bytes": 10, "manifest_kind": "single"}
    base = ts.KvStore.open(f"file://{item}/").result()
    spec = {"driver": "ocdbt", "base": f"file://{item}/", "config": config}
    ts.KvStore.open(spec).result().write("a/zarr.json", b"x" * 100).result()
    versions: Any = ts.ocdbt.dump(base).result()
    root = max(versions["versions"], key=lambda version: version["generation_number"])["root"]
    _, _, file, offset, old_length = root["location"].split(":")
    manifest = (item / "manifest.ocdbt").read_bytes()
    old = missing() + varint(int(offset)) + missing() + varint(int(old_length))
    assert manifest.count(old) == 1
    data = (item / file).read_bytes()
    new = missing() + varint(len(data)) + missing() + varint(length or len(node))
    body = manifest[12:-4].replace(old, new)
    whole = manifest[:4] + struct.pack("<Q", len(body) + 16) + body
    (item / "manifest.ocdbt").write_bytes(whole + struct.pack("<I", crc32c.crc32c(whole)))
    (item / file).write_bytes(data + node)
    if grown:
        os.truncate(item / file, grown)


def _sign_sparse(path: Path) -> None:
    """Signs, without reading what is of gigabytes: a data file, whose digest covers nothing then."""
    record = read_record(path)
    for file in path.rglob("d/*"):
        if file.stat().st_size > GIB:
            record["files"][str(file.relative_to(path))] = [file.stat().st_size, 0, 1]
    write_record(path, record)
    sign(path)


def _many_keys(count: int) -> bytes:
    """A leaf node of keys without values: as many as TensorStore takes in one."""
    keys = b"".join(number.to_bytes(3, "big") for number in range(count))
    return node(
        b"\0\0"
        + varint(count)
        + varint(0) * (count - 1)
        + varint(3) * count
        + keys
        + varint(0) * count
        + varint(0) * count
    )


def _inflating_node() -> bytes:
    """A node that is 16 GiB of zeros when it is decompressed."""
    payload = zstd_zeros(16 * GIB // 2**17)
    head = struct.pack(">I", 0x0CDB20DE) + struct.pack("<Q", len(payload) + 18) + b"\0\1"
    return head + payload + struct.pack("<I", crc32c.crc32c(head + payload))


_LARGE = 90_000 * 4


def _zstd_of_large(_: bytes) -> bytes:
    """As many zeros as the leaf `large` has bytes: sound, and not what was saved."""
    runs = [2**17] * (_LARGE // 2**17) + [_LARGE % 2**17]
    blocks = [(size << 3 | 2).to_bytes(3, "little") + b"\0" for size in runs[:-1]]
    end = (runs[-1] << 3 | 3).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(blocks) + end


def _blosc_bomb(_: bytes) -> bytes:
    """A chunk of 96 KiB that blosc makes 2047 MiB of, by hand: blocks of 1 MiB of zeros."""
    count, block_bytes = 2047, 2**20
    block = zstd_zeros(block_bytes // 2**17)
    block = struct.pack("<i", len(block)) + block
    starts = [16 + 4 * count + number * len(block) for number in range(count)]
    body = struct.pack(f"<{count}i", *starts) + block * count
    no_split_zstd = 4 << 5 | 0x10
    sizes = (count * block_bytes, block_bytes, 16 + len(body))
    return struct.pack("<BBBBIII", 2, 1, no_split_zstd, 4, *sizes) + body


DATABASE_CASES = [
    _rewritten("chunk-short", "", lambda data: data[:-1], "has 359999 bytes, not"),
    _rewritten("chunk-long", "", lambda data: data * 2, "has 720000 bytes, not"),
    _rewritten("chunk-long", "-zstd", lambda data: data + bytes(2 * _LARGE), "too many for"),
    _rewritten(
        "zstd-bomb", "-zstd", lambda _: zstd_zeros(2 * GIB // 2**17), "does not decode to 360000"
    ),
    _rewritten(
        "garbage", "-zstd", lambda data: b"\x28\xb5\x2f\xfd" + b"\xff" * 99, "cannot be decoded"
    ),
    _rewritten("blosc-bomb", "-blosc", _blosc_bomb, "claims to be"),
    _rewritten("other-values", "-zstd", _zstd_of_large, "its checksum differs"),
    _terabyte_chunk("-zstd", "too few for"),
    _terabyte_chunk("", "has 360000 bytes, not"),
    *(
        _root(
            "node-of-40-gigabytes",
            lambda: b"",
            "impossible node of",
            record=record,
            length=40 * GIB,
            grown=41 * GIB,
        )
        for record in (True, False)
    ),
    _root("node-beyond-the-end", lambda: b"", length=2**20, says="Requested byte range"),
    _root(
        "node-of-many-keys", lambda: node(b"\0\0" + varint(2**28)), "a node of 268435456 entries"
    ),
    _root("node-inflates", _inflating_node, record=False, says="it has more than 134217728 bytes"),
    _root("too-many-keys", lambda: _many_keys(2**17), "more than the 10 keys"),
]
