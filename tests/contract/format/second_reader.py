"""A second reader of checkpoints, written from docs/format.md alone: numpy, json and zstandard, and nothing of ckpt."""

import base64
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path as Folder
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import zstandard

Path = tuple[Any, ...]
WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
CARRIED = {"uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"}
TEXTS = {"str", "bigint", "generator", "random_state", "py_random"}
NONE = 2**64 - 1
TABLE = [0] * 256
for number in range(256):
    TABLE[number] = number
    for _ in range(8):
        TABLE[number] = TABLE[number] >> 1 ^ (0x82F63B78 if TABLE[number] & 1 else 0)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def inflated(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


def from_json(data: bytes) -> Any:
    return json.loads(data.decode(errors="surrogatepass"))


# ---- the array database --------------------------------------------------------------------------


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

    def __init__(self, manifest: bytes, folder: Folder) -> None:
        self.folder = folder
        self.places: dict[str, tuple[str, int, int] | bytes] = {}
        frame = Frame(manifest, "0cdb3a2a")
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


# ---- the record and its items --------------------------------------------------------------------


class Object(NamedTuple):
    """An object of a class, which is not imported; an OrderedDict, a key or random state likewise."""

    kind: str
    name: str
    value: Any


class Reader:
    """A checkpoint in a directory."""

    def __init__(self, path: Folder) -> None:
        self.path = path
        data = (path / "ckpt.json").read_bytes()
        body = data[30:-2]
        assert data == b'{"crc32c":"%08x","record":%b}\n' % (crc32c(body), body)
        self.record = from_json(body)
        assert self.record["format_version"] in (1, 2)
        self.small: dict[str, bytes] = {}
        if packed := self.record.get("small_files"):
            line, _, content = inflated(base64.b64decode(packed)).partition(b"\n")
            for name, size in json.loads(line).items():
                self.small[name], content = content[:size], content[size:]
            assert not content
        self.items = {name: Item(self, name) for name in self.record["items"]}

    def file(self, name: str) -> bytes:
        if name in self.small:
            return self.small[name]
        folder, users = name.partition("/")[0], False
        for item in self.items.values():
            users |= item.record["form"] == "files" and item.folder == folder
        if self.small and "/d/" not in name and not users:
            apart = name.replace("!", "!1").replace("/", "!0")
            name = f".attempt.{self.record['token']}.{apart}"
        return (self.path / name).read_bytes()

    def load(self) -> Any:
        found = {name: item.load() for name, item in self.items.items()}
        return next(iter(found.values())) if self.record["single"] else found

    def check(self) -> None:
        """Every file and every chunk is there, nothing else, and as the checksums say."""
        chunks: dict[str, list[tuple[int, int]]] = {}
        for item in self.items.values():
            if item.record["form"] == "tree":
                item.check()
                for place in item.chunk_places():
                    chunks.setdefault(f"{item.folder}/{place[0]}", []).append(place[1:])
        for name, (size, crc, is_data) in self.record["files"].items():
            content = bytearray(self.file(name))
            assert len(content) == size, name
            for start, length in sorted(chunks.get(name, ()), reverse=True) if is_data else ():
                del content[start : start + length]  # chunks have checksums of their own
            assert zlib.crc32(content) == crc, name


class Item:
    """One item; its leaves are read when it is loaded."""

    def __init__(self, reader: Reader, name: str) -> None:
        self.reader, self.folder = reader, "metrics.tree" if name == "metrics" else name
        self.record = reader.record["items"][name]
        self.leaves = self.record["leaves"]
        if reader.record["format_version"] == 2:
            self.leaves = [self.record["leaf_types"][at] for at in self.leaves]

    def load(self) -> Any:
        read, folder, count = self.reader.file, self.folder, self.record["process_count"]
        match self.record["form"]:
            case "json":
                return from_json(read(f"{folder}/data.json"))
            case "files":
                mine = (file.split("/", 1) for file in self.reader.record["files"])
                names = {name[1] for name in mine if name[0] == folder and len(name) == 2}
                notes = self.record.get("notes", ())
                return {name: read(f"{folder}/{name}") for name in names - {*notes}}
            case "process":
                states = (f"{folder}/exact/process_{i}-of-{count}.json" for i in range(count))
                return [exact(from_json(read(state))) for state in states]
        leaves = iter(self.leaves)

        def leaf(there: Path) -> Any:
            kind, dtype, shape, chunk, detail, *_ = next(leaves)
            name = ".".join(map(str, there))
            stored = self._text(name) if kind in TEXTS else self._array(name, chunk)
            return value_of(kind, dtype, shape, detail, stored)

        return build(self.record["nodes"], leaf)

    def check(self) -> None:
        """All chunks against their checksums, of which there are no others."""
        told: dict[str, list[int]] = {}
        for process in range(self.record["process_count"]):
            file = from_json(self.reader.file(f"{self.folder}/checksums/process_{process}"))
            assert not file["chunks"].keys() & told.keys()
            told |= file["chunks"]
        found: dict[str, list[int]] = {}
        for name, chunk in self._arrays():
            for key, _, data, itemsize in self._chunks(name, chunk):
                assert len(data) == math.prod(chunk) * itemsize
                row = itemsize * math.prod(chunk[1:])
                step = max(1, file["block_bytes"] // row) * row
                blocks = (data[start : start + step] for start in range(0, len(data), step))
                found[key] = [crc32c(block) for block in blocks]
        assert found == told

    def chunk_places(self) -> Iterator[tuple[str, int, int]]:
        for key, place in self.database.places.items() if [*self._arrays()] else ():
            if isinstance(place, tuple) and not key.endswith("zarr.json"):
                yield place

    def _arrays(self) -> Iterator[tuple[str, list[int]]]:
        paths: list[Path] = []
        build(self.record["nodes"], paths.append)
        for there, (kind, _, _, chunk, *_) in zip(paths, self.leaves, strict=True):
            if kind not in TEXTS:
                yield ".".join(map(str, there)), chunk

    @cached_property
    def database(self) -> Database:
        manifest = self.reader.file(f"{self.folder}/manifest.ocdbt")
        return Database(manifest, self.reader.path / self.folder)

    def _text(self, name: str) -> Any:
        found = from_json(self.reader.file(f"{self.folder}/_strings.json"))
        for part in name.split("/"):
            found = found[part.replace("~1", "/").replace("~0", "~")]
        return found

    def _zarr(self, name: str) -> Any:
        return json.loads(self.database.read(f"{name}/zarr.json" if name else "zarr.json"))

    def _chunks(self, name: str, chunk: list[int]) -> Iterator[tuple[str, Path, bytes, int]]:
        """Key, index and bytes of each chunk, and how many an element has."""
        zarr = self._zarr(name)
        assert zarr["chunk_grid"]["configuration"]["chunk_shape"] == chunk
        codecs = [codec["name"] for codec in zarr["codecs"]]
        assert codecs in (["bytes"], ["bytes", "zstd"])
        sides = [range(-(-n // step)) for n, step in zip(zarr["shape"], chunk, strict=True)]
        itemsize = dtype_of(zarr["data_type"]).itemsize
        for index in itertools.product(*sides):
            key = "/".join([*([name] if name else []), "c", *map(str, index)])
            data = self.database.read(key)
            yield key, index, inflated(data) if "zstd" in codecs else data, itemsize

    def _array(self, name: str, chunk: list[int]) -> np.ndarray[Any, Any]:
        zarr = self._zarr(name)
        array = np.zeros(zarr["shape"], dtype_of(zarr["data_type"]))
        for _, index, data, _ in self._chunks(name, chunk):
            place = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, chunk, strict=True))
            room = tuple(map(slice, array[place].shape))
            array[place] = np.frombuffer(data, array.dtype).reshape(chunk)[room]
        return array


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def as_tuple(value: Any) -> Any:
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value


def build(nodes: list[Any], leaf: Callable[[Path], Any]) -> Any:
    """The tree; ``leaf`` makes each leaf, in order, from its path in Orbax's tree."""
    left = iter(nodes)

    def one(there: Path) -> Any:
        node = next(left)
        if node is None:
            return None
        if node == 0 or isinstance(node, str):
            return leaf((*there, node) if node else there)
        kind, name, keys = node
        if kind == "below":
            return one((*there, name))
        keys = map(as_tuple, range(keys) if isinstance(keys, int) else keys)
        children = {key: one((*there, key)) for key in keys}
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(children.values())
        return children if kind == "dict" else Object(kind, name, children)

    return one(())


def stored_as(kind: str, dtype: str, shape: list[int]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype and shape of the array in which a value is carried."""
    if kind == "key":
        return np.dtype(np.uint32), (*shape, WORDS[dtype])
    return dtype_of("uint8" if dtype in CARRIED else dtype), tuple(shape)


def value_of(kind: str, dtype: str, shape: list[int], detail: str, stored: Any) -> Any:
    """A leaf from what is stored of it."""
    if kind == "str":
        return stored
    if kind == "bigint":
        return int(stored, 16)
    if kind in TEXTS:
        return Object(kind, detail, json.loads(stored))
    assert (stored.dtype, stored.shape) == stored_as(kind, dtype, shape)
    if kind == "key":
        return Object(kind, dtype, stored)
    if kind in ("int", "float", "bool", "complex"):
        return stored.item()
    if kind == "bytes":
        return stored.tobytes()
    return Object(kind, detail, stored.view(dtype_of(dtype)))


def exact(value: Any) -> Any:
    """The state of a process."""
    leaves = iter(value["leaves"])

    def leaf(_: Path) -> Any:
        found = next(leaves)
        if not isinstance(found, list):
            return found
        kind, dtype, shape, detail, data = found
        if kind not in TEXTS:
            stored, extent = stored_as(kind, dtype, shape)
            data = np.frombuffer(base64.b64decode(data), stored).reshape(extent)
        return value_of(kind, dtype, shape, detail, data)

    return build(value["nodes"], leaf)
