"""What checkpoints of every layout leave on disk, without tokens and times; and every public signature."""

import contextlib
import hashlib
import importlib
import inspect
import json
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec as P

import ckpt_core as ckpt
from tests.support.meshes import explicit_mesh
from tests.support.recorded import steady
from tests.support.trees import SPECS, Moments, every_bit_pattern, numbers, sharded

PACKAGES = "ckpt_core ckpt_flax_nnx ckpt_grain ckpt_keras ckpt_orbax ckpt_orbax.v1 ckpt_torchax"
DTYPES = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 complex128 bfloat16 int2 "
    "uint2 int4 uint4 float4_e2m1fn float6_e2m3fn float6_e3m2fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
TIMES = {"created_unix_secs", "durations", "versions", "topology", "crc32c"}


def trees() -> dict[str, Any]:
    """A tree of every kind of leaf, container, key and sharding."""
    one = numbers((2, 3))
    every = {name: every_bit_pattern(name) for name in DTYPES.split()}
    mesh = explicit_mesh((4, 2), ("x", "y"))
    explicit = jax.device_put(numbers((8, 6)), NamedSharding(mesh, P("y", None)))
    deep = one
    for _ in range(30):
        deep = {"n": deep}
    return {
        "one_array": jnp.array(one),
        "dict": {"a": one, "b": {"c": one + 1}},
        "list": [one, (one, one + 1)],
        "named_tuple": Moments(one, {"x": one}),
        "none_and_empty": {"n": None, "d": {}, "l": [], "t": (), "a": one},
        "plain_values": {"i": 3, "f": 1.5, "b": True, "s": "text", "c": 1 + 2j, "bytes": b"bytes"},
        "scalars": {"s": np.float32(2), "c": np.complex128(1 + 2j), "j": jnp.float32(1)},
        "F_order": {"n": np.asfortranarray(one), "j": jnp.asarray(np.asfortranarray(one))},
        "every_dtype": every,
        "every_dtype_of_jax": {n: jnp.asarray(a) for n, a in every.items() if "t6_" not in n},
        "keys": {"k": jax.random.key(7), "raw": jax.random.PRNGKey(7)},
        "many_keys": jax.random.split(jax.random.key(1, impl="rbg"), 4),
        "zero_size": {"z": jnp.zeros((0, 3)), "n": np.zeros((2, 0), np.int8)},
        "integer_keys": {0: one, 10: one, 2: one},
        "odd_names": {"a.b": one, "c/d": one, "e f": one, "é": one, "": one},
        "sharded": {name: sharded(numbers((8, 4)), "4x2", name) for name in SPECS},
        "sharded_explicitly": explicit,
        "random": [np.random.default_rng(3), np.random.RandomState(3), random.Random(3)],
        "shared": (lambda leaf: {"a": leaf, "b": leaf})(jnp.arange(9.0)),
        "large": {"a": numbers((1_000_000,))},
        "many_small": {f"leaf{i:03}": np.full(3, float(i)) for i in range(150)},
        "deep": deep,
    }


def checkpoints(root: Path) -> Iterator[tuple[str, Callable[[str], object]]]:
    """Names of checkpoints, each with what saves it at a path."""
    for name, tree in trees().items():
        yield name, lambda path, tree=tree: ckpt.save(path, tree)
    one, large = {"a": jnp.arange(6.0)}, {"a": numbers((3_000_000,))}
    options: dict[str, dict[str, Any]] = {
        "compressed_in_part": {"compression": {"*": "zstd"}},
        "small_chunks": {"chunk_bytes": 2**20},
        "small_files": {"target_data_file_bytes": 2**20},
        "no_checksums": {"checksums": False},
        "not_durable": {"durable": False},
        "flat": {"flat": True},
    }
    for codec in ("zstd", "zstd:5", "blosc", "blosc:snappy:5", "blosc:zlib:1"):
        options[codec] = {"compression": codec}
    for name, more in options.items():
        yield name, lambda path, more=more: ckpt.save(path, large, options=ckpt.Options(**more))
    yield "items", lambda path: ckpt.save(path, model=one, step=jnp.int32(3), opt=[one])
    yield "metadata", lambda path: ckpt.save(path, one, metadata={"k": [1, None, "x"]})
    (root.parent / "file.bin").write_bytes(b"some bytes" * 100)
    beside = {"config": ckpt.Json({"a": [1, 2]}), "extra": ckpt.Files(root.parent / "file.bin")}
    yield "json_and_files", lambda path: ckpt.save(path, model=one, **beside)
    yield "overwritten", lambda path: [ckpt.save(path, one, overwrite=True) for _ in range(2)]
    yield "written_in_pieces", _in_pieces
    yield "run", _run
    yield "run_with_tiers", lambda path: _run(path, local=root / "local")
    yield "local", lambda path: None  # what the one before has left there
    yield "linked", lambda path: _run(path, frozen=jnp.arange(400_000.0))


def left() -> Iterator[str]:
    """What stands on disk after each."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "checkpoints")
        root.mkdir()
        for name, save in checkpoints(root):
            save(f"{root}/{name}")
            yield from (f"# {name}", *describe(root / name))


def _in_pieces(path: str) -> None:
    with ckpt.writer(path) as writer:
        for layer in range(3):
            writer.add("params", {f"layer_{layer}": {"kernel": np.ones((2, 2))}})


def _run(path: str, local: Path | None = None, **frozen: Any) -> None:
    with ckpt.Checkpointer(path, max_to_keep=2, local_directory=local) as run:
        for step in range(4):
            tree = {"w": jnp.arange(2000.0), "n": jnp.int32(step), **frozen}
            run.save(step, tree, metrics={"loss": 1.0 / (step + 1)})
            run.wait_until_finished()


def describe(path: Path) -> Iterator[str]:
    """What stands on disk: names, records, chunks by key."""
    for folder, folders, names in sorted(os.walk(path)):
        folders.sort()
        for name in sorted(names):
            file = Path(folder, name)
            shown = steady(file.relative_to(path).as_posix())
            links = f"{file.stat().st_nlink} links, " if file.stat().st_nlink > 1 else ""
            yield f"  {shown} {links}{_content(file)}"
        if "manifest.ocdbt" in names:
            yield from _chunks(folder)


def _content(file: Path) -> str:
    if "/d/" in file.as_posix() or file.name in ("manifest.ocdbt", ".ckpt-secret"):
        return "data"  # the order in it is that of threads, or it is drawn
    text = file.read_bytes()
    with contextlib.suppress(ValueError):
        return json.dumps(_steady_json(json.loads(text)), sort_keys=True)
    return steady(repr(text)) if len(text) < 400 else f"{len(text)} bytes"


def _steady_json(value: Any, key: str = "") -> Any:
    """JSON without tokens, times and sizes of files whose content has them."""
    if isinstance(value, dict):
        if key == "files":
            return sorted({steady(name) for name in value})
        return {steady(k): _steady_json(v, k) for k, v in value.items() if k not in TIMES}
    if isinstance(value, list):
        return [_steady_json(one, key) for one in value]
    if key.endswith(("nsecs", "timestamp", "token", "parent")) or key.startswith("init_"):
        return "TIME"
    return steady(value) if isinstance(value, str) else value


def _chunks(folder: str) -> Iterator[str]:
    base = {"driver": "file", "path": f"{folder}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    for key in sorted(store.list().result()):
        value = store.read(key).result().value
        yield f"    {steady(key.decode())} {hashlib.sha256(value).hexdigest()[:16]}"


def signatures() -> Iterator[str]:
    """Every public name, with its signature and those of its public methods."""
    for package in PACKAGES.split():
        with contextlib.suppress(ImportError):
            module = importlib.import_module(package)
            for name in sorted(getattr(module, "__all__", None) or dir(module)):
                if not name.startswith("_"):
                    yield from _signature(f"{package}.{name}", getattr(module, name), deep=True)


def _signature(name: str, value: Any, *, deep: bool) -> Iterator[str]:
    try:
        text = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    except (TypeError, ValueError):
        text = ""
    yield f"{name}{text}"
    if deep and isinstance(value, type):
        for member in sorted(vars(value)):
            if not member.startswith("_"):
                yield from _signature(f"{name}.{member}", vars(value)[member], deep=False)
