"""Another reader of what docs/format.md describes (second_reader.py) reads what ckpt wrote, today and in earlier versions.

If it fails, the page or the format has changed.
"""

import functools
import json
import os
import random
import shutil
from collections import OrderedDict
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_core as ckpt
from tests.contract.format import second_reader
from tests.contract.format.second_reader import CARRIED, TEXTS, Object, Reader
from tests.support.damage import flip
from tests.support.meshes import explicit_mesh
from tests.support.paths import ROOT
from tests.support.stores import keys_at

GOLDEN = ROOT / "tests/contract/format/golden"


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


def agrees(path: Path) -> Any:
    """What the reader reads, which must be what ckpt loads."""
    reader = Reader(path)
    found = reader.load()
    if reader.record["single"]:
        assert exactly(found) == exactly(plain(ckpt.load(path)))
    for name in () if reader.record["single"] else found:
        if reader.record["items"][name]["form"] in ("tree", "json"):
            assert exactly(found[name]) == exactly(plain(ckpt.load(path, item=name))), name
    reader.check()
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


@pytest.mark.parametrize(
    "golden",
    sorted(file.parent for file in GOLDEN.rglob("ckpt.json")),
    ids=lambda path: str(path.relative_to(GOLDEN)),
)
def test_golden_checkpoints(golden):
    pytest.importorskip("flax")
    try:
        agrees(golden)
    except ckpt.StructureMismatch as error:  # what ckpt does not load without a target
        if "is the function" not in str(error):
            raise
        Reader(golden).check()


@pytest.mark.parametrize(
    "options",
    [
        FAST,
        replace(FAST, compression="zstd"),
        replace(FAST, compression={"sharded": "zstd:3", "zeros": "zstd:5"}),
        replace(FAST, chunk_bytes=1024, target_data_file_bytes=1024),
    ],
    ids=["plain", "zstd", "each its own", "small chunks"],
)
def test_leaves_of_every_kind(options, tmp_path):
    ckpt.save(tmp_path / "c", state(), options=options)
    found = agrees(tmp_path / "c")
    assert exactly(found) == exactly(plain(state()))


@pytest.mark.parametrize(
    "value", [np.arange(6), 3, "text", {}], ids=["array", "int", "text", "empty"]
)
def test_a_tree_of_one_leaf_or_none(value, tmp_path):
    ckpt.save(tmp_path / "c", value, options=FAST)
    assert exactly(agrees(tmp_path / "c")) == exactly(plain(value))


def test_chunks_that_extend_beyond_the_array_blocks_and_levels_of_the_index(tmp_path):
    tree = {
        "prime": np.arange(200_003),
        "rows": np.arange(2_200_000, dtype=np.uint8).reshape(11, -1),
        "many": {f"leaf{number}": np.float32(number) for number in range(3_000)},
    }
    ckpt.save(tmp_path / "c", tree, options=replace(FAST, chunk_bytes=1_500_000))
    assert exactly(agrees(tmp_path / "c")) == exactly(plain(tree))


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
    found = agrees(tmp_path / "c")
    assert found["files"] == {"deep/a.bin": bytes(range(256)), "data.json": b"the user's own"}
    assert [*found] == [*items] and found["config"] == items["config"].value
    assert Reader(tmp_path / "c").record["metadata"] == {"run": 1}


class OfThisProcess:
    """A reader of data, say, whose state each process saves for itself."""

    per_process = True

    def __init__(self, state):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_the_state_of_a_process(tmp_path):
    kept = ("dtypes", "big-endian", "scalar", "plain", "random", "objects")
    host = {key: state()[key] for key in kept} | {"ints": state()["a", 1]}
    ckpt.save(tmp_path / "c", data=OfThisProcess(host), options=FAST)
    (found,) = agrees(tmp_path / "c")["data"]
    assert exactly(found) == exactly(plain(host))


def test_names_of_arrays_that_have_one_more_key_than_the_path(tmp_path):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    ckpt.save(tmp_path / "c", model=model, tree=nnx.Variable({"a": jnp.ones(2)}), options=FAST)
    agrees(tmp_path / "c")
    items = Reader(tmp_path / "c").record["items"]
    assert "value" in items["model"]["nodes"]
    assert items["tree"]["nodes"][0] == ["below", "value", 1]


def test_registered_classes_with_static_fields(tmp_path):
    layer = Layer(jnp.ones(3), 7, ("relu", 0.5, np.dtype("int8")))
    ckpt.save(tmp_path / "c", {"layer": layer, "act": jax.tree_util.Partial(abs)}, options=FAST)
    reader = Reader(tmp_path / "c")
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
    found = Reader(tmp_path / "run" / "2").load()
    assert exactly(found) == exactly(plain({**kept, "new": jnp.full(10, 2)}))


def test_a_checkpoint_in_an_object_store(tmp_path):
    url = f"memory://specification-{os.getpid()}/c"
    tree = {"w": np.arange(2000.0), "text": "t", "n": 3}
    ckpt.save(url, tree, options=FAST)
    store = keys_at(url)
    assert json.loads(store.get("ckpt.json") or b"")["record"]["small_files"]
    for key in store.list():
        if key == "ckpt.json" or "/d/" in key:  # all else is in the record
            path = tmp_path / "c" / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.get(key) or b"")
    found = agrees(tmp_path / "c")  # without the copies, too
    assert exactly(found) == exactly(plain(tree)) == exactly(plain(ckpt.load(url)))


@pytest.mark.parametrize("file", ["ckpt.json", "state/checksums/process_0", "the data"])
def test_one_wrong_bit_is_noticed(tmp_path, file):
    copied = Path(shutil.copytree(GOLDEN / "v1", tmp_path / "copied"))
    at = 40
    if file == "the data":
        place = Reader(copied).items["state"].database.places["params.long/c/0"]
        assert isinstance(place, tuple)
        file, at = f"state/{place[0]}", place[1] + 5
    flip(copied / file, at)
    with pytest.raises(AssertionError):
        Reader(copied).check()


def test_the_page_names_every_kind_and_entry(tmp_path):
    """What the record may hold is on the page."""
    layer = Layer(jnp.ones(3), 7, ("relu", 0.5, np.dtype("int8")))
    ckpt.save(tmp_path / "all", state=state(), layer=layer, files=ckpt.Files(GOLDEN / "files"))
    words = {*CARRIED, *TEXTS, "durations", "small_files", "notes", "statics", "part", "below"}
    for path in (GOLDEN / "v2", GOLDEN / "v1_nnx", tmp_path / "all"):
        record = Reader(path).record
        words |= {*record}
        for item in record["items"].values():
            words |= {*item, item["form"]} | {leaf[0] for leaf in item.get("leaf_types", ())}
            words |= {node[0] for node in item.get("nodes", ()) if isinstance(node, list)}
    assert words > {"dict", "list", "tuple", "namedtuple", "dataclass", "ordered", "custom", "key"}
    page = (ROOT / "docs" / "format.md").read_text()
    for word in words:
        assert f"`{word}`" in page, word


def test_the_reader_uses_nothing_of_ckpt_and_no_tensorstore():
    text = Path(second_reader.__file__).read_text()
    assert "import ckpt" not in text and "tensorstore" not in text
