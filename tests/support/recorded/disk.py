"""What is seen of ckpt from outside, as text: python -m tests.support.outside > before.txt

Run it before and after a change that must not be seen, and compare the two texts. It has what 40 checkpoints of
every layout leave on disk (names, records, chunks; without tokens and times), the operations on files and the
requests to a bucket of some saves and loads, in their order, and every public signature.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

import ckpt_core as ckpt
from tests.support import gcs_server
from tests.support.meshes import explicit_mesh


class Moments(NamedTuple):
    """A container with named fields, as Optax' states are."""

    mu: Any
    nu: Any


PACKAGES = "ckpt_core ckpt_flax_nnx ckpt_grain ckpt_keras ckpt_orbax ckpt_orbax.v1 ckpt_torchax"
VOLATILE = re.compile(
    r"[0-9a-f]{16,}|/[^ '\"]*/checkpoints\b|bucket-[0-9a-f]{8}|(?<=TOKEN-)[0-9a-f]{8}"
    r"|(?<=process )\d+ on .*|(?<=\\\\n)[0-9a-f]{8}-\d+-\d+"
)
"""Tokens, names of data files that are drawn, and the place."""
TIMES = {"created_unix_secs", "durations", "versions", "topology", "crc32c"}


# ------------------------------------------------------------------------------------- checkpoints


def sharded(shape: tuple[int, ...], *axes: str | None) -> jax.Array:
    sharding = jax.sharding.NamedSharding(
        explicit_mesh((4, 2), ("x", "y")), jax.sharding.PartitionSpec(*axes)
    )
    return jax.device_put(jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape), sharding)


def trees() -> dict[str, Any]:
    """A tree of every kind of leaf, container, key and sharding."""
    one = jnp.arange(6.0).reshape(2, 3)
    numbers = [
        jnp.asarray(np.arange(8), name) for name in ["int8", "uint8", "int16", "int32", "uint32"]
    ]
    return {
        "one_array": one,
        "dict": {"a": one, "b": {"c": one + 1}},
        "list": [one, (one, one + 1)],
        "named_tuple": Moments(one, {"x": one}),
        "none_and_empty": {"n": None, "d": {}, "l": [], "t": (), "a": one},
        "plain_values": {"i": 3, "f": 1.5, "b": True, "s": "text", "c": 1 + 2j, "a": one},
        "numpy": {"a": np.arange(4), "s": np.float32(2), "f": np.asfortranarray(np.ones((3, 2)))},
        "integers": numbers,
        "small_floats": [jnp.ones(5, jnp.bfloat16), jnp.ones(5, jnp.float16)],
        "eight_bits": jnp.ones(5, jnp.float8_e4m3fn),
        "four_bits": jnp.ones(6, jnp.int4),
        "complex": jnp.ones(3, jnp.complex64),
        "keys": {"k": jax.random.key(7), "raw": jax.random.PRNGKey(7)},
        "many_keys": jax.random.split(jax.random.key(1), 4),
        "zero_size": {"z": jnp.zeros((0, 3)), "s": jnp.float32(1)},
        "integer_keys": {0: one, 10: one, 2: one},
        "odd_names": {"a.b": one, "c/d": one, "e f": one, "é": one, "": one},
        "sharded": {
            "w": sharded((8, 4), "x", "y"),
            "r": sharded((8, 4), "x"),
            "all": sharded((8,)),
        },
        "sharded_unevenly": sharded((8, 6), "y", None),
        "host_random": {"g": np.random.default_rng(3), "a": one},
        "shared": (lambda leaf: {"a": leaf, "b": leaf})(jnp.arange(9.0)),
        "large": {"a": jnp.arange(1_000_000, dtype=jnp.float32)},
        "many_small": {f"leaf{i:03}": jnp.full(3, float(i)) for i in range(150)},
        "deep": _nested(30, one),
    }


def _nested(depth: int, leaf: Any) -> Any:
    return leaf if depth == 0 else {"n": _nested(depth - 1, leaf)}


def checkpoints(root: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names of checkpoints, each with what saves it below ``root``."""
    for name, tree in trees().items():
        yield name, lambda name=name, tree=tree: ckpt.save(root / name, tree)
    one, large = {"a": jnp.arange(6.0)}, {"a": jnp.arange(3_000_000, dtype=jnp.float32)}
    options = {
        "compressed": ckpt.Options(compression="zstd"),
        "compressed_in_part": ckpt.Options(compression={"*": "zstd"}),
        "small_chunks": ckpt.Options(chunk_bytes=2**20),
        "small_files": ckpt.Options(target_data_file_bytes=2**20),
        "no_checksums": ckpt.Options(checksums=False),
        "not_durable": ckpt.Options(durable=False),
    }
    for name, chosen in options.items():
        yield name, lambda name=name, chosen=chosen: ckpt.save(root / name, large, options=chosen)
    yield "items", lambda: ckpt.save(root / "items", model=one, step=jnp.int32(3), opt=[one])
    yield (
        "metadata",
        lambda: ckpt.save(root / "metadata", one, metadata={"k": [1, None, "x"]}),
    )
    yield "json", lambda: ckpt.save(root / "json", model=one, config=ckpt.Json({"a": [1, 2]}))
    (root.parent / "file.bin").write_bytes(b"some bytes" * 100)
    yield (
        "files",
        lambda: ckpt.save(root / "files", model=one, extra=ckpt.Files(root.parent / "file.bin")),
    )
    yield "overwritten", lambda: (ckpt.save(root / "overwritten", one), _again(root))
    yield "written_in_pieces", lambda: _in_pieces(root / "written_in_pieces")
    yield "run", lambda: _run(root / "run")
    yield "run_with_tiers", lambda: _run(root / "run_with_tiers", local=root / "local")
    yield "nnx", lambda: _nnx(root / "nnx")
    yield "random_of_a_run", lambda: ckpt.save(root / "random_of_a_run", rng=jax.random.key(0))


def _again(root: Path) -> None:
    ckpt.save(root / "overwritten", {"a": jnp.arange(7.0)}, overwrite=True)


def _in_pieces(path: Path) -> None:
    with ckpt.writer(path) as writer:
        for layer in range(3):
            writer.add("params", {f"layer_{layer}": {"kernel": np.ones((2, 2))}})


def _run(path: Path, local: Path | None = None) -> None:
    tree = {"w": jnp.arange(2000.0), "n": jnp.int32(0)}
    with ckpt.Checkpointer(path, max_to_keep=2, local_directory=local) as run:
        for step in range(4):
            run.save(step, {**tree, "n": jnp.int32(step)}, metrics={"loss": 1.0 / (step + 1)})
            run.wait_until_finished()


def _nnx(path: Path) -> None:
    import optax
    from flax import nnx

    model = nnx.Sequential(
        nnx.Linear(3, 4, rngs=nnx.Rngs(0)),
        nnx.Dropout(0.1, rngs=nnx.Rngs(1)),
        nnx.BatchNorm(4, rngs=nnx.Rngs(2)),
    )
    ckpt.save(path, model=model, optimizer=nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))


def describe(path: Path) -> Iterator[str]:
    """What stands on disk: names, records, chunks by key."""
    for folder, folders, names in sorted(os.walk(path)):
        folders.sort()
        for name in sorted(names):
            file = Path(folder, name)
            shown = steady(file.relative_to(path).as_posix())
            yield f"  {shown} {_content(file)}"
        if "manifest.ocdbt" in names:
            yield from _chunks(folder)


def _content(file: Path) -> str:
    if "/d/" in file.as_posix() or file.name == "manifest.ocdbt":
        return "data"  # the order in it is that of threads
    text = file.read_bytes()
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        return json.dumps(_steady_json(value), sort_keys=True)
    return steady(repr(text)) if len(text) < 400 else f"{len(text)} bytes"


def steady(text: str) -> str:
    """The text without what differs between two runs of one program."""
    return VOLATILE.sub("TOKEN", VOLATILE.sub("TOKEN", text))


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
        yield f"    {VOLATILE.sub('TOKEN', key.decode())} {hashlib.sha256(value).hexdigest()[:16]}"


# ------------------------------------------------------------------------------- calls and requests


def requests() -> Iterator[str]:
    """What some calls ask of a bucket; of equal requests side by side in different order the sorted one."""
    with gcs_server.running() as server:
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = server.url
        os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "test"
        run = f"gs://{server.bucket}/run"
        tree = {"a": jnp.arange(6.0), "b": {"c": jnp.arange(1000.0)}}
        calls: dict[str, Callable[[], object]] = {
            "save": lambda: ckpt.save(f"gs://{server.bucket}/one", tree),
            "load": lambda: ckpt.load(f"gs://{server.bucket}/one"),
            "save to a run": lambda: _bucket_run(run, tree),
            "restore_latest": lambda: ckpt.Checkpointer(run, read_only=True).restore_latest(tree),
        }
        for name, call in calls.items():
            server.requests.clear()
            call()
            yield f"{name}: {len(server.requests)} requests"
            shown = [f"{r.kind} {VOLATILE.sub('TOKEN', r.name)}" for r in server.requests]
            yield from (f"  {text}" for text in sorted(shown))


def _bucket_run(run: str, tree: Any) -> None:
    with ckpt.Checkpointer(run) as checkpointer:
        for step in range(2):
            checkpointer.save(step, tree)


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


def main() -> None:
    """Prints all of it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "checkpoints")
        root.mkdir()
        for name, save in checkpoints(root):
            print(f"# {name}")
            with contextlib.redirect_stderr(io.StringIO()):
                save()
            print(*describe(root / name), sep="\n")
        print("# local", *describe(root / "local"), sep="\n")
    print("# requests", *requests(), sep="\n")
    print("# signatures", *signatures(), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
