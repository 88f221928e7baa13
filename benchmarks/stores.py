"""Measures saves and loads in a bucket beside plain transfers of the same bytes: python benchmarks/stores.py

The servers are the tests': SeaweedFS for S3, one of Google's JSON API, in other processes of this machine than the tools.
So nothing here is the speed of a cloud; it shows what a library costs beside a server that answers at once. In
each round every tool saves and loads in turn. The requests are counted in a run of their own, through a
proxy. Needs boto3 or gcsfs for their rows, and Orbax with gcsfs for its. ``TMPDIR=/dev/shm`` leaves the disk out.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import MIB, fresh, header, middle, options, row, spread, timed  # isort: skip

import numpy as np
import tensorstore as ts

import ckpt_core as ckpt
from tests.support import fault_proxy, gcs_server, s3_server

THREADS = 10  # as many as boto3's managed transfers take
SIZES = {"4 x 16 MiB": (4, 16 * MIB), "16 x 32 MiB": (16, 32 * MIB), "2,000 x 4 KiB": (2000, 4096)}
TINY = {"4 x 64 KiB": (4, 65536)}
PLACES = "bench/"
HOME = "CKPT_BENCH_SEAWEED"  # where SeaweedFS has its files
_places = itertools.count()


@dataclass(frozen=True)
class State:
    """Arrays that nobody can compress, and their bytes, one by one and together."""

    arrays: dict[str, np.ndarray]
    parts: dict[str, bytes]
    blob: bytes


@dataclass(frozen=True)
class Tool:
    """A way to save and load at a place; ``load`` gives arrays or bytes, by name or together."""

    name: str
    save: Callable[[str, State], Any]
    load: Callable[[str, State], Any]
    plain: bool = True


def make_state(count: int, leaf_bytes: int) -> State:
    random = np.random.default_rng(0)
    arrays = {f"leaf{n:05}": random.random(leaf_bytes // 8) for n in range(count)}
    parts = {name: array.tobytes() for name, array in arrays.items()}
    return State(arrays, parts, b"".join(parts.values()))


def checked(state: State, found: Any) -> None:
    if isinstance(found, dict):
        found = b"".join(np.asarray(found[name]).tobytes() for name in state.parts)
    assert found == state.blob, "other bytes came back"


# ---------------------------------------------------------------------------------------------- tools


def ours(root: str) -> Tool:
    return Tool(
        "ckpt",
        lambda place, state: ckpt.save(f"{root}/{place}", state.arrays),
        lambda place, _: ckpt.load(f"{root}/{place}"),
        plain=False,
    )


def tensorstore(spec: dict[str, Any]) -> Tool:
    """TensorStore's own puts and gets, below which ckpt cannot come."""

    def keys(place: str) -> ts.KvStore:
        return ts.KvStore.open({**spec, "path": f"{place}/"}).result()

    def save(place: str, state: State) -> None:
        store = keys(place)
        for written in [store.write(name, data) for name, data in state.parts.items()]:
            written.result()

    def load(place: str, state: State) -> dict[str, bytes]:
        store = keys(place)
        reads = {name: store.read(name) for name in state.parts}
        return {name: np.frombuffer(read.result().value) for name, read in reads.items()}

    return Tool("TensorStore, an object for each leaf", save, load)


def with_boto3(url: str) -> list[Tool]:
    import boto3
    from botocore.config import Config

    config = Config(max_pool_connections=THREADS)
    client: Any = boto3.client("s3", endpoint_url=url, config=config)
    pool = ThreadPoolExecutor(THREADS)
    bucket = s3_server.BUCKET

    def save_all(place: str, state: State) -> None:
        client.upload_fileobj(io.BytesIO(state.blob), bucket, place)

    def load_all(place: str, _: State) -> bytes:
        found = io.BytesIO()
        client.download_fileobj(bucket, place, found)
        return found.getvalue()

    def put(key: str, data: bytes) -> None:
        client.put_object(Bucket=bucket, Key=key, Body=data)

    def get(key: str) -> Any:
        return np.frombuffer(client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def save_each(place: str, state: State) -> None:
        names = [f"{place}/{name}" for name in state.parts]
        list(pool.map(put, names, state.parts.values()))

    def load_each(place: str, state: State) -> dict[str, Any]:
        names = [f"{place}/{name}" for name in state.parts]
        return dict(zip(state.parts, pool.map(get, names), strict=True))

    return [
        Tool("boto3, one object", save_all, load_all),
        Tool("boto3, an object for each leaf", save_each, load_each),
    ]


def with_gcsfs(url: str, bucket: str) -> list[Tool]:
    import gcsfs

    files: Any = gcsfs.GCSFileSystem(token="anon", endpoint_url=url, use_listings_cache=False)

    def save_each(place: str, state: State) -> None:
        files.pipe({f"{bucket}/{place}/{name}": data for name, data in state.parts.items()})

    def load_each(place: str, state: State) -> dict[str, Any]:
        found = files.cat([f"{bucket}/{place}/{name}" for name in state.parts])
        return {key.rpartition("/")[2]: np.frombuffer(data) for key, data in found.items()}

    return [
        Tool(
            "gcsfs, one object",
            lambda place, state: files.pipe_file(f"{bucket}/{place}", state.blob),
            lambda place, _: files.cat_file(f"{bucket}/{place}"),
        ),
        Tool("gcsfs, an object for each leaf", save_each, load_each),
    ]


def with_orbax(root: str) -> Tool:
    import gcsfs  # noqa: F401 (Orbax needs it for buckets)
    import orbax.checkpoint as ocp
    from absl import logging

    logging.set_verbosity(logging.FATAL)
    checkpointer = ocp.StandardCheckpointer()

    def save(place: str, state: State) -> None:
        checkpointer.save(f"{root}/{place}", state.arrays)
        checkpointer.wait_until_finished()

    return Tool(
        "Orbax", save, lambda place, _: checkpointer.restore(f"{root}/{place}"), plain=False
    )


def tools_of(store: str, url: str, bucket: str) -> tuple[list[Tool], Callable[[], Any]]:
    """The tools for a server, and what deletes all; a line on standard error for each that is not installed."""
    makers: list[Callable[[], list[Tool]]]
    if store == "S3":
        root = f"s3://{bucket}"
        os.environ |= {"AWS_ENDPOINT_URL": url, **s3_server.USER}
        spec = {"driver": "s3", "endpoint": url, "aws_region": "us-east-1"}
        makers = [lambda: with_boto3(url)]
    else:
        root = f"gs://{bucket}"
        os.environ |= {"TENSORSTORE_GCS_HTTP_URL": url, "STORAGE_EMULATOR_HOST": url}
        os.environ |= {"GCE_METADATA_ROOT": "127.0.0.1:1", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "0"}
        spec = {"driver": "gcs"}
        makers = [lambda: with_gcsfs(url, bucket), lambda: [with_orbax(root)]]
    spec["bucket"] = bucket
    found = [ours(root), tensorstore(spec)]
    everything = ts.KvStore.open({**spec, "path": PLACES}).result()
    for make in makers:
        try:
            found += make()
        except ModuleNotFoundError as error:
            print(f"{store}: {error}: pip install {error.name}", file=sys.stderr)

    def empty() -> None:
        everything.delete_range(ts.KvStore.KeyRange()).result()
        if store == "S3":
            s3_server.compact(Path(os.environ[HOME]))

    return found, empty


# ------------------------------------------------------------------------------------------ measuring

Row = dict[str, Any]


def measure(
    store: str, url: str, bucket: str, sizes: list[str], rounds: int, count: bool
) -> list[Row]:
    """A row for each size and tool, with seconds, or with requests where ``url`` is a proxy's."""
    rows: list[Row] = []
    tools, empty = tools_of(store, url, bucket)
    for size in sizes:
        state = make_state(*(SIZES | TINY)[size])
        found: list[Row] = [
            {"store": store, "size": size, "tool": tool.name, "plain": tool.plain, "mib": len(state.blob) / MIB,
             "save": [], "load": []} for tool in tools
        ]  # fmt: skip
        for turn in range(rounds + 1):
            for tool, one in zip(tools, found, strict=True):
                place = f"{PLACES}{os.getpid()}-{next(_places)}"
                for verb, work in (("save", tool.save), ("load", tool.load)):
                    if count:
                        fault_proxy.counted(url)
                    secs, result = timed(
                        lambda work=work, place=place, state=state: work(place, state)
                    )
                    if turn:  # the first connects, and imports
                        one[verb].append(fault_proxy.counted(url) if count else secs)
                    print(store, size, tool.name, verb, f"{secs:.2f} s", file=sys.stderr)
                checked(state, result)
                del result
                empty()
        rows += found
    return rows


@contextlib.contextmanager
def server(store: str) -> Iterator[tuple[str, str]]:
    """URL and bucket."""
    if store == "GCS":
        with gcs_server.running() as served:
            yield served.url, served.bucket
        return
    with tempfile.TemporaryDirectory() as home, s3_server.running(Path(home), 1024) as url:
        os.environ[HOME] = home
        yield url, s3_server.BUCKET


def cells_of(found: Row, counts: Row, verb: str, best: float) -> list[str]:
    secs, (seen,) = found[verb], counts[verb]
    moved = {"save": seen.pop("up") / MIB, "load": seen.pop("down") / MIB}
    speed = f"{spread(secs)} s, {found['mib'] / middle(secs):.0f} MiB/s"
    requests = sum(seen.values())
    return [speed, f"{best / middle(secs):.2f}", f"{requests}", f"{moved[verb]:.0f}"]


def main() -> None:
    given = options(
        __doc__,
        directory=False,
        sizes=([*SIZES], f"of {', '.join(SIZES | TINY)}"),
        stores=["S3", "GCS"],
        rounds=5,
    )
    of_it = ("of the fastest plain one", "requests")
    header("", "save", *of_it, "MiB up", "load", "of it", "requests", "MiB down")
    for store in given.stores:
        if store == "S3" and s3_server.program() is None:
            print(f"S3: {s3_server.MISSING}", file=sys.stderr)
            continue
        with server(store) as (url, bucket):
            rows = fresh(measure, store, url, bucket, given.sizes, given.rounds, False)
            with fault_proxy.proxied(url) as proxy:
                counts = fresh(measure, store, proxy.url, bucket, given.sizes, 1, True)
        for found, seen in zip(rows, counts, strict=True):
            rivals = [r for r in rows if r["plain"] and r["size"] == found["size"]]
            best = {v: min(middle(r[v]) for r in rivals) for v in ("save", "load")}
            cells = (cells_of(found, seen, verb, best[verb]) for verb in ("save", "load"))
            row(f"{store}, {found['size']}: {found['tool']}", *itertools.chain(*cells))


if __name__ == "__main__":
    main()
