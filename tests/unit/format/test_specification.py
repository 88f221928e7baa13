"""A second reader, written from docs/format.md alone: numpy, json and zstandard, and nothing of ckpt.

It reads the golden checkpoints and one of today's code. If it fails, the page or the format has changed.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import zstandard

import ckpt_core as ckpt
from ckpt_core._format import treedef
from ckpt_core._tree import leaves
from tests.contract.format import test_golden, test_golden_nnx
from tests.support.stores import keys_at

TEXTS = {"str", "bigint", "generator", "random_state", "py_random"}
AS_BYTES = {"uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"}
WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
CONTAINERS: frozenset[str] = vars(treedef)["_KINDS"]
NONE = 2**64 - 1


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def inflated(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


class Frame:
    """The content of a manifest or a node."""

    def __init__(self, data: bytes, magic: str) -> None:
        assert data[:4].hex() == magic and int.from_bytes(data[4:12], "little") == len(data)
        assert int.from_bytes(data[-4:], "little") == crc32c(data[:-4])
        assert data[12] == 0
        self.data = inflated(data[14:-4]) if data[13] else data[14:-4]
        self.at = 0

    def bytes(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        value = 0
        for shift in itertools.count(0, 7):
            (byte,) = self.bytes(1)
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise AssertionError

    def numbers(self, count: int) -> list[int]:
        return [self.number() for _ in range(count)]

    def texts(self, shared: list[int], added: list[int]) -> list[bytes]:
        found = [b""]
        for start, more in zip(shared, added, strict=True):
            found.append(found[-1][:start] + self.bytes(more))
        return found[1:]

    def files(self, base: bytes) -> list[tuple[bytes, bytes]]:
        """(path, base of a node in it) of each entry of the file table."""
        count = self.number()
        if not count:
            return []
        shared, added = [0, *self.numbers(count - 1)], self.numbers(count)
        lengths = self.numbers(count)
        paths = self.texts(shared, added)
        return [(base + p, base + p[:n]) for p, n in zip(paths, lengths, strict=True)]

    def references(self, files: list[tuple[bytes, bytes]], count: int) -> list[Any]:
        places, offsets, sizes = self.numbers(count), self.numbers(count), self.numbers(count)
        self.numbers(3 * count)
        return [
            None if offset == size == NONE else (*files[place], offset, size)
            for place, offset, size in zip(places, offsets, sizes, strict=True)
        ]


class Database:
    """The keys of an OCDBT database, and where their values are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[str, tuple[str, int, int] | bytes] = {}
        frame = Frame((folder / "manifest.ocdbt").read_bytes(), "0cdb3a2a")
        frame.bytes(16)
        kind, _, _ = frame.numbers(3)
        assert kind == 0
        frame.bytes(1)
        if frame.number():
            frame.bytes(4)
        files = frame.files(b"")
        generations = frame.numbers(frame.number())
        frame.bytes(len(generations))
        roots = frame.references(files, len(generations))
        root = roots[generations.index(max(generations))]
        if root is not None:
            self._node(root, b"")

    def _range(self, file: str, offset: int, size: int) -> bytes:
        assert ".." not in file.split("/") and not file.startswith("/")
        with open(self.folder / file, "rb") as opened:
            opened.seek(offset)
            data = opened.read(size)
        assert len(data) == size
        return data

    def _node(self, place: tuple[bytes, bytes, int, int], before: bytes) -> None:
        file, base, offset, size = place
        frame = Frame(self._range(file.decode(), offset, size), "0cdb20de")
        (height,) = frame.bytes(1)
        files = frame.files(base)
        count = frame.number()
        shared, added = [0, *frame.numbers(count - 1)], frame.numbers(count)
        lengths = frame.numbers(count) if height else []
        keys = frame.texts(shared, added)
        if height:
            below = frame.references(files, count)
            for key, length, child in zip(keys, lengths, below, strict=True):
                self._node(child, before + key[:length])
            return
        sizes, kinds = frame.numbers(count), frame.bytes(count)
        elsewhere = sum(kinds)
        places, offsets = frame.numbers(elsewhere), frame.numbers(elsewhere)
        where = iter(zip(places, offsets, strict=True))
        for key, size_, kind in zip(keys, sizes, kinds, strict=True):
            name = (before + key).decode()
            if kind:
                position, start = next(where)
                self.places[name] = (files[position][0].decode(), start, size_)
            else:
                self.places[name] = frame.bytes(size_)

    def read(self, key: str) -> bytes:
        place = self.places[key]
        return place if isinstance(place, bytes) else self._range(*place)


class Item:
    """The leaves of an item of the form `tree`, by path."""

    def __init__(self, checkpoint: Path, name: str, record: dict[str, Any]) -> None:
        self.folder = checkpoint / {"metrics": "metrics.tree"}.get(name, name)
        item = record["items"][name]
        self.nodes, self.statics = iter(item["nodes"]), item.get("statics", [])
        self.leaves = iter(item["leaves"])
        strings = self.folder / "_strings.json"
        self.strings = json.loads(strings.read_text()) if strings.exists() else {}
        self.database = Database(self.folder) if (self.folder / "manifest.ocdbt").exists() else None
        self.checksums: dict[str, list[int]] = {}
        for file in sorted(self.folder.glob("checksums/process_*")):
            told = json.loads(file.read_bytes())
            self.block_bytes = told["block_bytes"]
            self.checksums |= told["chunks"]
        self.tree = self._node(())
        assert next(self.nodes, self) is self and next(self.leaves, self) is self

    def _node(self, stored: tuple[Any, ...]) -> Any:
        node = next(self.nodes)
        if node is None:
            return None
        if node == 0 or isinstance(node, str):
            return self._leaf((*stored, node) if node else stored)
        kind, name, keys = node
        if kind == "below":
            return self._node((*stored, name))
        if isinstance(keys, int):
            children = [self._node((*stored, key)) for key in range(keys)]
            return tuple(children) if kind == "tuple" else children
        keys = [tuple(key) if isinstance(key, list) else key for key in keys]
        return {key: self._node((*stored, key)) for key in keys}

    def _leaf(self, stored: tuple[Any, ...]) -> Any:
        kind, dtype, shape, chunk, _, _, *_ = next(self.leaves)
        name = ".".join(map(str, stored))
        if kind in TEXTS:
            node: Any = self.strings
            for part in name.split("/"):
                node = node[part.replace("~1", "/").replace("~0", "~")]
            return int(node, 16) if kind == "bigint" else node
        if kind == "key":
            dtype, shape = "uint32", [*shape, WORDS[dtype]]
        array = self._array(name, "uint8" if dtype in AS_BYTES else dtype, shape, chunk)
        if kind == "bytes":
            return array.tobytes()
        return array.item() if kind in ("bool", "int", "float", "complex") else array

    def _array(self, name: str, dtype: str, shape: list[int], chunk: list[int]) -> np.ndarray:
        assert self.database is not None
        prefix = f"{name}/" if name else ""
        stored = json.loads(self.database.read(prefix + "zarr.json"))
        assert stored["data_type"] == dtype and stored["shape"] == shape
        assert stored["chunk_grid"]["configuration"]["chunk_shape"] == chunk
        codecs = [codec["name"] for codec in stored["codecs"]]
        assert codecs in (["bytes"], ["bytes", "zstd"])
        array = np.zeros(shape, np.dtype(getattr(ml_dtypes, dtype, dtype)))
        if not array.size:
            return array
        grid = [range(-(-size // step)) for size, step in zip(shape, chunk, strict=True)]
        for index in itertools.product(*grid):
            key = prefix + "/".join(("c", *map(str, index)))
            data = self.database.read(key)
            data = inflated(data) if "zstd" in codecs else data
            self._check(key, data, chunk, array.itemsize)
            values = np.frombuffer(data, array.dtype).reshape(chunk)
            starts = [at * step for at, step in zip(index, chunk, strict=True)]
            stops = map(min, shape, (a + b for a, b in zip(starts, chunk, strict=True)))
            place = tuple(map(slice, starts, stops))
            room = array[place].shape
            array[place] = values[tuple(map(slice, room))]
        return array

    def _check(self, key: str, data: bytes, chunk: list[int], itemsize: int) -> None:
        assert len(data) == math.prod(chunk) * itemsize
        row = itemsize * math.prod(chunk[1:])
        step = max(1, self.block_bytes // row) * row
        sums = [crc32c(data[start : start + step]) for start in range(0, len(data), step)]
        assert sums == self.checksums[key], f"{key}: damaged"


def record_of(checkpoint: Path) -> dict[str, Any]:
    """The record, whose checksum and files are right."""
    data = (checkpoint / "ckpt.json").read_bytes()
    head, body = data[:30], data[30:-2]
    assert head[:11] == b'{"crc32c":"' and head[19:] == b'","record":' and data[-2:] == b"}\n"
    assert int(head[11:19], 16) == crc32c(body)
    record = json.loads(body.decode(errors="surrogatepass"))
    assert record["format_version"] == 1
    for name, (size, crc, is_data) in record["files"].items():
        content = (checkpoint / name).read_bytes()
        assert len(content) == size
        if is_data:
            content = outside_of_chunks(checkpoint, name, content)
        assert zlib.crc32(content) == crc, name
    return record


def outside_of_chunks(checkpoint: Path, name: str, content: bytes) -> bytes:
    folder = checkpoint / name.split("/")[0]
    kept = bytearray(content)
    drop = sorted(
        (place[1], place[2])
        for key, place in Database(folder).places.items()
        if isinstance(place, tuple)
        and f"{folder.name}/{place[0]}" == name
        and not key.endswith("zarr.json")
    )
    for start, size in reversed(drop):
        del kept[start : start + size]
    return bytes(kept)


def read(checkpoint: Path) -> Any:
    """The state, or the items, of a checkpoint."""
    record = record_of(checkpoint)
    found = {}
    for name, item in record["items"].items():
        if item["form"] == "tree":
            found[name] = Item(checkpoint, name, record).tree
        elif item["form"] == "json":
            found[name] = json.loads((checkpoint / name / "data.json").read_bytes())
        elif item["form"] == "files":
            mine = [file for file in record["files"] if file.startswith(f"{name}/")]
            found[name] = {
                file.partition("/")[2]: (checkpoint / file).read_bytes()
                for file in mine
                if file.partition("/")[2] not in item["notes"]
            }
    return found["state"] if record["single"] else found


def flat(value: Any) -> list[tuple[str, Any]]:
    """Paths (as far as every container has them) and leaves; arrays as their bytes."""
    if isinstance(value, dict):
        pairs = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, test_golden.Moments):
        pairs = list(value._asdict().items())
    elif isinstance(value, (list, tuple)):
        pairs = [(str(key), part) for key, part in enumerate(value)]
    else:
        return [("", plain(value))]
    return [(f"{key}/{path}", leaf) for key, part in pairs for path, leaf in flat(part)]


def plain(value: Any) -> Any:
    if isinstance(value, np.random.Generator):
        return "a generator"
    if isinstance(value, str) and value.startswith('{"state":'):
        return "a generator"
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        array = np.asarray(value)
        return (str(array.dtype), array.shape, array.tobytes())
    return (type(value).__name__, value)


def test_the_golden_checkpoint():
    assert flat(read(test_golden.GOLDEN)) == flat(test_golden.tree())


def test_the_golden_checkpoint_of_nnx_objects():
    names = ("model", "optimizer")
    want = {name: ckpt.load(test_golden_nnx.GOLDEN, item=name) for name in names}
    assert flat(read(test_golden_nnx.GOLDEN)) == flat(want)


@pytest.fixture
def today(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """What the golden checkpoints lack: chunks, compression, several levels of index, other items."""
    (tmp_path / "vocabulary.txt").write_text("a b c")
    numbers = np.arange(70_000, dtype=np.int32)
    state = {
        "chunked": numbers.reshape(7, 100, 100),
        "squeezed": numbers,
        "many": {f"leaf{number}": np.float32(number) for number in range(3_000)},
        "metrics": [1, "~1/~0", (2.5, None)],
    }
    options = ckpt.Options(
        chunk_bytes=60_000, compression={"**/squeezed": "zstd", "squeezed": "zstd"}, durable=False
    )
    ckpt.save(
        tmp_path / "today",
        state=state,
        config=ckpt.Json({"layers": 3}),
        words=ckpt.Files(tmp_path / "vocabulary.txt"),
        bare=np.float64(1.5),
        items={"metrics": {"loss": np.ones(3)}},
        options=options,
    )
    want = {
        "state": state,
        "config": {"layers": 3},
        "words": {"vocabulary.txt": b"a b c"},
        "bare": np.float64(1.5),
        "metrics": {"loss": np.ones(3)},
    }
    return tmp_path / "today", want


def test_a_checkpoint_of_today(today: tuple[Path, dict[str, Any]]):
    path, want = today
    found = read(path)
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert flat(found[name]) == flat(value), name


def test_a_checkpoint_of_an_nnx_model(tmp_path: Path):
    from flax import nnx

    model = test_golden_nnx.Net(nnx.Rngs(3))
    ckpt.save(tmp_path / "nnx", model=model)
    assert flat(read(tmp_path / "nnx")["model"]) == flat(ckpt.load(tmp_path / "nnx")["model"])
    stored = Database(tmp_path / "nnx" / "model").places
    assert "heads.0.kernel.value/zarr.json" in stored


def test_small_files_in_the_record():
    """As in a bucket, where no file of the step exists before the record."""
    url = "memory://specification/step"
    ckpt.save(url, {"w": np.arange(3)}, overwrite=True)
    body = json.loads(keys_at(url).get("ckpt.json") or b"")["record"]
    content = inflated(base64.b64decode(body["small_files"]))
    line, _, rest = content.partition(b"\n")
    sizes = json.loads(line)
    assert "state/_METADATA" in sizes and sum(sizes.values()) == len(rest)


@pytest.mark.parametrize("file", ["ckpt.json", "state/checksums/process_0", "the data"])
def test_one_wrong_bit_is_noticed(tmp_path: Path, file: str):
    copied = Path(shutil.copytree(test_golden.GOLDEN, tmp_path / "copied"))
    if file == "the data":
        place = Database(copied / "state").places["params.long/c/0"]
        assert isinstance(place, tuple)
        file, at = f"state/{place[0]}", place[1] + 5
    else:
        at = 40
    data = bytearray((copied / file).read_bytes())
    data[at] ^= 1
    (copied / file).write_bytes(data)
    with pytest.raises(AssertionError):
        read(copied)


def test_the_page_names_every_kind_and_entry():
    """What the record may hold is on the page."""
    page = (Path(__file__).parents[3] / "docs" / "format.md").read_text()
    assert vars(leaves)["_BYTE_CARRIED"] == AS_BYTES and TEXTS == leaves.TEXT_KINDS
    record = record_of(test_golden.GOLDEN)
    entries = {*record, *record["items"]["state"], "durations", "small_files", "notes", "statics"}
    entries.add("part")
    for word in {*leaves.KINDS, *CONTAINERS, *AS_BYTES, *entries}:
        assert f"`{word}`" in page, word
