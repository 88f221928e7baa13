"""Another reader of what docs/format.md describes, by TensorStore: items of all forms, compression, stores, links.

The reader is the first part of this file. It uses nothing of ckpt.
"""

import base64
import functools
import json
import math
import os
import random
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from pathlib import Path as Folder
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zstandard
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core._format import process_state
from tests.support.meshes import explicit_mesh
from tests.support.paths import ROOT
from tests.support.stores import keys_at

# ---- the reader, written from docs/format.md -----------------------------------------------------

Path = tuple[Any, ...]
WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
CARRIED = {"uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"}
TEXTS = {"str", "bigint", "generator", "random_state", "py_random"}
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


def from_json(data: bytes) -> Any:
    return json.loads(data.decode(errors="surrogatepass"))


class Object(NamedTuple):
    """An object of a class, which is not imported; an OrderedDict, a key or random state likewise."""

    kind: str
    name: str
    value: Any


class Reader:
    """A checkpoint in a directory; ``scratch`` is a folder for manifests that are in the record."""

    def __init__(self, path: Folder, scratch: Folder) -> None:
        self.path, self.scratch = path, scratch
        data = (path / "ckpt.json").read_bytes()
        body = data[30:-2]
        assert data == b'{"crc32c":"%08x","record":%b}\n' % (crc32c(body), body)
        self.record = from_json(body)
        assert self.record["format_version"] == 1
        self.small: dict[str, bytes] = {}
        if packed := self.record.get("small_files"):
            frame = (
                zstandard.ZstdDecompressor().decompressobj().decompress(base64.b64decode(packed))
            )
            line, _, content = frame.partition(b"\n")
            for name, size in json.loads(line).items():
                self.small[name], content = content[:size], content[size:]
            assert not content

    def file(self, name: str) -> bytes:
        if name in self.small:
            return self.small[name]
        folder, users = name.partition("/")[0], False
        for item, value in self.record["items"].items():
            users |= value["form"] == "files" and folder_of(item) == folder
        if self.small and "/d/" not in name and not users:
            apart = name.replace("!", "!1").replace("/", "!0")
            name = f".attempt.{self.record['token']}.{apart}"
        return (self.path / name).read_bytes()

    def load(self) -> Any:
        items = {name: Item(self, name).load() for name in self.record["items"]}
        return next(iter(items.values())) if self.record["single"] else items


def folder_of(item: str) -> str:
    return "metrics.tree" if item == "metrics" else item


class Item:
    def __init__(self, reader: Reader, name: str) -> None:
        self.reader, self.folder = reader, folder_of(name)
        self.record = reader.record["items"][name]

    def load(self) -> Any:
        read, folder, count = self.reader.file, self.folder, self.record["process_count"]
        match self.record["form"]:
            case "json":
                return from_json(read(f"{folder}/data.json"))
            case "files":
                inside = (
                    name for name in self.reader.record["files"] if name.startswith(f"{folder}/")
                )
                names = {name.removeprefix(f"{folder}/") for name in inside}
                return {
                    name: read(f"{folder}/{name}")
                    for name in names - {*self.record.get("notes", ())}
                }
            case "process":
                states = (f"{folder}/exact/process_{i}-of-{count}.json" for i in range(count))
                return [exact(from_json(read(state))) for state in states]
        leaves = iter(self.record["leaves"])

        def leaf(there: Path) -> Any:
            kind, dtype, shape, _, detail, *_ = next(leaves)
            return value_of(kind, dtype, shape, detail, self.stored(kind, array_name(there)))

        return build(self.record["nodes"], leaf)

    @cached_property
    def store(self) -> dict[str, Any]:
        """The database, as TensorStore's specification."""
        found = {"driver": "ocdbt", "base": f"file://{self.reader.path}/{self.folder}/"}
        manifest = f"{self.folder}/manifest.ocdbt"
        if manifest in self.reader.record["files"]:
            place = self.reader.scratch / manifest
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(self.reader.file(manifest))
            found["manifest"] = f"file://{place.parent}/"
        return found

    def stored(self, kind: str, name: str) -> Any:
        """The array of a leaf, or its text."""
        if kind in TEXTS:
            found = from_json(self.reader.file(f"{self.folder}/_strings.json"))
            for part in name.split("/"):
                found = found[part.replace("~1", "/").replace("~0", "~")]
            return found
        kvstore = {**self.store, "path": f"{name}/" if name else ""}
        spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
        return ts.open(spec, open=True).result().read().result()


def as_tuple(value: Any) -> Any:
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value


def array_name(path: Path) -> str:
    return ".".join(map(str, path))


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
    name = "uint8" if dtype in CARRIED else dtype
    return np.dtype(getattr(ml_dtypes, name, name)), tuple(shape)


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
    return Object(kind, detail, stored.view(getattr(ml_dtypes, dtype, dtype)))


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


# ---- the checksums, by the same page ---------------------------------------------------------------


def check(reader: Reader) -> None:
    """Every file and every chunk is there, nothing else, and as the checksums say."""
    for name, (size, crc, is_data) in reader.record["files"].items():
        data = reader.file(name)
        assert len(data) == size and (is_data or zlib.crc32(data) == crc), name
    for name, item in reader.record["items"].items():
        if item["form"] == "tree":
            check_chunks(Item(reader, name))


def check_chunks(item: Item) -> None:
    told: dict[str, list[int]] = {}
    for process in range(item.record["process_count"]):
        file = from_json(item.reader.file(f"{item.folder}/checksums/process_{process}"))
        assert not file["chunks"].keys() & told.keys()
        told |= file["chunks"]
    found: dict[str, list[int]] = {}
    paths: list[Path] = []
    build(item.record["nodes"], paths.append)
    for there, (kind, _, _, chunk, *_) in zip(paths, item.record["leaves"], strict=True):
        if kind in TEXTS:
            continue
        name = array_name(there)
        array = item.stored(kind, name)
        grid = [-(-size // step) for size, step in zip(array.shape, chunk, strict=True)]
        for index in np.ndindex(*grid):
            starts = zip(index, chunk, strict=True)
            part = array[tuple(slice(i * step, i * step + step) for i, step in starts)]
            stored = np.zeros(chunk, array.dtype)
            stored[tuple(map(slice, part.shape))] = part
            rows = file["block_bytes"] // (stored.itemsize * math.prod(chunk[1:]))
            rows = max(1, rows) if chunk else 1
            blocks = (
                (stored[at : at + rows] for at in range(0, chunk[0], rows)) if chunk else [stored]
            )
            key = "/".join([*([name] if name else []), "c", *map(str, index)])
            found[key] = [crc32c(block.tobytes()) for block in blocks]
    assert found == told


# ---- what ckpt loads, in the form of the reader -----------------------------------------------------


class Moments(NamedTuple):
    mu: Any
    nu: Any


@dataclass
class Schedule:
    rate: float
    steps: list[int]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["width", "rest"]
)
@dataclass
class Layer:
    w: Any
    width: int
    rest: tuple[Any, ...]


def plain(value: Any) -> Any:
    """A loaded value as the reader gives it."""
    if isinstance(value, jax.Array):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            impl = {"fry": "threefry2x32"}.get(name := str(value.dtype)[4:-1], name)
            return Object("key", impl, np.asarray(jax.random.key_data(value)))
        return Object(
            "jax", "weak" if value.weak_type and not value.shape else "", np.asarray(value)
        )
    if isinstance(value, np.ndarray):
        native = value.astype(value.dtype.newbyteorder("="))
        return Object("numpy", "" if value.dtype.isnative else ">", native)
    if isinstance(value, np.generic):
        return Object("numpy_scalar", "", np.asarray(value))
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        seed = {key: getattr(bits.seed_seq, key) for key in SEED}
        state = {"state": bits.state, "seed": seed | {"spawn_key": [*seed["spawn_key"]]}}
        return Object("generator", type(bits).__name__, state)
    if isinstance(value, np.random.RandomState):
        return Object("random_state", "", lists(value.get_state(legacy=False)))
    if isinstance(value, random.Random):
        return Object("py_random", "", json.loads(json.dumps(value.getstate())))
    if isinstance(value, dict):
        children = {key: plain(part) for key, part in value.items()}
        return Object("ordered", "", children) if type(value) is OrderedDict else children
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Object("namedtuple", class_of(value), plain(value._asdict()))
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if is_dataclass(value):
        return Object("dataclass", class_of(value), plain(vars(value)))
    return value


SEED = ("entropy", "spawn_key", "pool_size", "n_children_spawned")


def class_of(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: lists(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.name}
    return value


def exactly(value: Any) -> Any:
    """Something that is equal only to what has the same types and bits."""
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.name, value.shape, value.tobytes())
    if isinstance(value, Object):
        return ("object", value.kind, value.name.rpartition(":")[2], exactly(value.value))
    if isinstance(value, dict):
        return ("dict", [(key, exactly(part)) for key, part in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [*map(exactly, value)])
    return (type(value).__name__, repr(value))


def agrees(path: Folder, scratch: Folder) -> Any:
    """What the reader reads, which must be what ckpt loads."""
    reader = Reader(path, scratch)
    found = reader.load()
    if reader.record["single"]:
        assert exactly(found) == exactly(plain(ckpt.load(path)))
    for name in () if reader.record["single"] else found:
        if reader.record["items"][name]["form"] in ("tree", "json"):
            assert exactly(found[name]) == exactly(plain(ckpt.load(path, item=name))), name
    check(reader)
    return found


FAST = ckpt.Options(durable=False)


def state() -> dict[str, Any]:
    """Leaves of every kind and of many dtypes, sharded and not."""
    mesh = explicit_mesh((2, 4), ("x", "y"))
    spread = NamedSharding(mesh, PartitionSpec("x", "y"))
    dtypes = ["bool", "int2", "int4", "uint2", "uint4", "float6_e2m3fn", "float8_e4m3", "bfloat16"]
    dtypes += ["float4_e2m1fn", "float8_e8m0fnu", "complex128", "uint64", "float16"]
    return {
        "sharded": jax.device_put(jnp.arange(96.0).reshape(8, 12), spread),
        "rows": jax.device_put(jnp.arange(24), NamedSharding(mesh, PartitionSpec(("x", "y")))),
        "weak": jnp.sin(1.5),
        "dtypes": {name: np.arange(3).astype(getattr(ml_dtypes, name, name)) for name in dtypes},
        "big-endian": np.arange(5, dtype=">f8"),
        "zeros": np.zeros((40, 3)),
        "empty": np.zeros((0, 4), np.int8),
        "scalar": np.float32(0.1),
        "keys": jax.random.split(jax.random.key(1), (2, 2)),
        "rbg": jax.random.key(1, impl="rbg"),
        "plain": (1, -1.5, float("nan"), True, 2j, b"\x00b", "t\ud800", 2**64, None, [], {}),
        "random": [np.random.default_rng(3), np.random.RandomState(4), random.Random(5)],
        ("a", 1): {7: "seven", "8/~1": "text", -1: 1},
        "objects": [Moments(1, {"x": np.ones(2)}), Schedule(0.5, [1, 2]), OrderedDict(b=1, a=2)],
    }


# ---- the tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "golden",
    sorted(file.parent for file in (ROOT / "tests/contract/format/golden").rglob("ckpt.json")),
    ids=str,
)
def test_golden_checkpoints(golden, tmp_path):
    pytest.importorskip("flax")
    try:
        agrees(golden, tmp_path)
    except ckpt.StructureMismatch as error:  # what ckpt does not load without a target
        if "is the function" not in str(error):
            raise
        check(Reader(golden, tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        FAST,
        replace(FAST, compression="zstd"),
        replace(FAST, compression={"sharded": "blosc:zstd:3", "zeros": "zstd:5"}),
        replace(FAST, chunk_bytes=1024, target_data_file_bytes=1024),
    ],
    ids=["plain", "zstd", "each its own", "small chunks"],
)
def test_leaves_of_every_kind(options, tmp_path):
    ckpt.save(tmp_path / "c", state(), options=options)
    found = agrees(tmp_path / "c", tmp_path)
    assert exactly(found) == exactly(plain(state()))


@pytest.mark.parametrize(
    "value", [np.arange(6), 3, "text", {}], ids=["array", "int", "text", "empty"]
)
def test_a_tree_of_one_leaf_or_none(value, tmp_path):
    ckpt.save(tmp_path / "c", value, options=FAST)
    assert exactly(agrees(tmp_path / "c", tmp_path)) == exactly(plain(value))


def test_chunks_that_extend_beyond_the_array_and_blocks(tmp_path):
    tree = {
        "prime": np.arange(1_000_003),
        "rows": np.arange(2_200_000, dtype=np.uint8).reshape(11, -1),
    }
    ckpt.save(tmp_path / "c", tree, options=replace(FAST, chunk_bytes=3_000_000))
    assert exactly(Reader(tmp_path / "c", tmp_path).load()) == exactly(plain(tree))


def test_several_items(tmp_path):
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "a.bin").write_bytes(bytes(range(256)))
    (source / "data.json").write_text("the user's own")
    items = {
        "model": {"w": np.ones((2, 3))},
        "metrics": {"loss": [0.5]},
        "files": ckpt.Files(source),
    }
    items["config"] = ckpt.Json({"layers": [1, None, "x"]})
    ckpt.save(tmp_path / "c", items=items, metadata={"run": 1}, options=FAST)
    found = agrees(tmp_path / "c", tmp_path)
    assert found["files"] == {"deep/a.bin": bytes(range(256)), "data.json": b"the user's own"}
    assert [*found] == [*items] and found["config"] == items["config"].value
    assert Reader(tmp_path / "c", tmp_path).record["metadata"] == {"run": 1}


def test_the_state_of_a_process(tmp_path):
    grain = pytest.importorskip("grain")
    iterator = iter(grain.MapDataset.range(20).shuffle(seed=1).batch(2).to_iter_dataset())
    next(iterator)
    ckpt.save(tmp_path / "c", data=iterator, options=FAST)
    (found,) = agrees(tmp_path / "c", tmp_path)["data"]
    assert found["grain"] == iterator.get_state()
    kept = ("dtypes", "big-endian", "scalar", "plain", "random", ("a", 1), "objects")
    host = {key: state()[key] for key in kept}
    assert exactly(exact(from_json(process_state.dump_exact(host)))) == exactly(plain(host))


def test_names_of_arrays_that_have_one_more_key_than_the_path(tmp_path):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    ckpt.save(tmp_path / "c", model=model, tree=nnx.Variable({"a": jnp.ones(2)}), options=FAST)
    agrees(tmp_path / "c", tmp_path)
    items = Reader(tmp_path / "c", tmp_path).record["items"]
    assert "value" in items["model"]["nodes"]
    assert items["tree"]["nodes"][0] == ["below", "value", 1]


def test_registered_classes_with_static_fields(tmp_path):
    layer = Layer(jnp.ones(3), 7, ("relu", 0.5, np.dtype("int8")))
    ckpt.save(tmp_path / "c", {"layer": layer, "act": jax.tree_util.Partial(abs)}, options=FAST)
    reader = Reader(tmp_path / "c", tmp_path)
    found = reader.load()
    assert found["layer"].kind == "custom" and found["layer"].name == class_of(layer)
    assert exactly(found["layer"].value) == exactly({"w": plain(layer.w)})
    (entry, *_) = reader.record["items"]["state"]["statics"]
    static = ["tuple", "relu", ["float", (0.5).hex()], ["dtype", "int8"]]
    assert entry == [1, {"fields": {"width": 7, "rest": static}}]


def test_data_that_did_not_change_is_linked(tmp_path):
    kept = {"large": jnp.arange(2_000_000.0), "small": jnp.ones(3)}
    with ckpt.Checkpointer(tmp_path / "run", options=FAST) as checkpointer:
        for step in range(3):
            checkpointer.save(step, {**kept, "new": jnp.full(10, step)})
    assert [*(tmp_path / "run").rglob("ocdbt.linked")]
    found = Reader(tmp_path / "run" / "2", tmp_path).load()
    assert exactly(found) == exactly(plain({**kept, "new": jnp.full(10, 2)}))


def test_a_checkpoint_in_an_object_store(tmp_path):
    url = f"memory://specification-{os.getpid()}/c"
    tree = {"w": np.arange(2000.0), "text": "t", "n": 3}
    ckpt.save(url, tree, options=FAST)
    store = keys_at(url)
    copies = json.loads(store.get("ckpt.json") or b"")["record"]
    for key in store.list():
        if key == "ckpt.json" or "/d/" in key:  # all else is in the record
            path = tmp_path / "c" / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.get(key) or b"")
    assert copies["small_files"]
    reader = Reader(tmp_path / "c", tmp_path / "scratch")
    assert exactly(reader.load()) == exactly(plain(tree)) == exactly(plain(ckpt.load(url)))
    assert exactly(plain(ckpt.load(tmp_path / "c"))) == exactly(
        plain(tree)
    )  # without the copies, too
    check(reader)


def test_damage_is_seen_by_the_reader_too(tmp_path):
    ckpt.save(tmp_path / "c", {"w": np.arange(2000.0)}, options=FAST)
    name = next(
        name for name in Reader(tmp_path / "c", tmp_path).record["files"] if "process_0/d" in name
    )
    data = bytearray((tmp_path / "c" / name).read_bytes())
    data[1000] ^= 1
    (tmp_path / "c" / name).write_bytes(data)
    with pytest.raises(AssertionError):
        check(Reader(tmp_path / "c", tmp_path))
    with pytest.raises(AssertionError):
        check_chunks(Item(Reader(tmp_path / "c", tmp_path), "state"))


def test_the_reader_is_short_and_uses_nothing_of_ckpt():
    text = Folder(__file__).read_text()
    reader = text[text.index("# ---- the reader") : text.index("# ---- the checksums")]
    assert (
        "ckpt_core" not in reader and "ckpt.load" not in reader and len(reader.splitlines()) <= 200
    )
