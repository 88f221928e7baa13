"""Publishes weights of bfloat16 that AdamW changes, and follows them: python benchmarks/publishing.py

For each learning rate the same weights, a step apart: bytes of a delta beside those of a full save, how long ``publish`` blocks
beside ``save_async``, and an update beside full saves and loads. Medians, and minimum and maximum in brackets. ``--picture FILE``
draws the bytes over versions.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shared import header, options, row, spread, timed  # isort: skip

import jax
import jax.numpy as jnp

import ckpt_core as ckpt

LEAVES = 20
WARM = 12  # steps, in which Adam's updates are larger than later
State = dict[str, jax.Array]
PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 380 226" width="400" height="238" role="img" aria-labelledby="title desc">
<title id="title">Bytes of each version: anchors are whole, deltas small</title>
<desc id="desc">24 versions one step of AdamW apart at a learning rate of {rate}. Versions 0, 8 and 16 have an anchor of all bytes; each but the first has a delta of two or three percent.</desc>
<style>
text {{ font: 13px Helvetica, Arial, sans-serif; fill: #1f2430; }}
.card {{ fill: #fff; stroke: #c5cad6; }} .anchor {{ fill: #3f51b5; }} .delta {{ fill: #2e7d32; }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #e2e4ea; }} .card {{ fill: #1e2129; stroke: #4a5163; }} .anchor {{ fill: #9fa8da; }} .delta {{ fill: #81c784; }}
}}
</style>
<rect class="card" x=".5" y=".5" width="379" height="225" rx="8"/>
<text x="14" y="24">bytes written for each version, learning rate {rate}</text>
{bars}
<text x="14" y="188">version 0</text><text x="366" y="188" text-anchor="end">23</text>
<rect class="anchor" x="14" y="203" width="10" height="10"/><text x="30" y="213">anchor</text>
<rect class="delta" x="100" y="203" width="10" height="10"/><text x="116" y="213">delta to the version before</text>
</svg>
"""


@jax.jit
def adamw(params: State, moments: Any, key: jax.Array, rate: float) -> tuple[State, Any]:
    """A step on gradients that are half noise."""
    first, second, count = moments
    count = count + 1
    made: list[State] = [{}, {}, {}]
    for number, (name, value) in enumerate(params.items()):
        noise = jax.random.normal(jax.random.fold_in(key, number), value.shape)
        gradient = noise + value
        one = 0.9 * first[name] + 0.1 * gradient
        two = 0.999 * second[name] + 0.001 * gradient**2
        update = (one / (1 - 0.9**count)) / (jnp.sqrt(two / (1 - 0.999**count)) + 1e-8)
        for into, new in zip(made, (value - rate * (update + 0.01 * value), one, two), strict=True):
            into[name] = new
    return made[0], (made[1], made[2], count)


def versions(count: int, values: int, rate: float) -> Iterator[State]:
    """Weights of bfloat16 after each of so many steps, after some that warm up."""
    key = jax.random.key(0)
    shape = (values // LEAVES,)
    params = {
        f"layer{n}": 0.02 * jax.random.normal(jax.random.fold_in(key, n), shape)
        for n in range(LEAVES)
    }
    zeros = {name: jnp.zeros(shape) for name in params}
    moments = (zeros, dict(zeros), 0)
    for step in range(count + WARM):
        params, moments = adamw(params, moments, jax.random.fold_in(key, 100 + step), rate)
        if step >= WARM:
            yield jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def size(path: Path) -> int:
    """Bytes below a directory, or of a file."""
    return sum(one.stat().st_size for one in [path, *path.rglob("*")] if one.is_file())


def wait(follower: ckpt.Follower, version: int) -> None:
    """Until a version is there and read."""
    while follower.update(timeout_secs=60) != version:
        pass


Clock = Callable[[str, Callable[[], Any]], None]


def run(folder: Path, values: int, rate: float, rounds: int) -> dict[str, list[float]]:
    """What each version took, in ms, and the bytes of its delta, in % of a full save."""
    found: dict[str, list[float]] = {}

    def clock(name: str, work: Callable[[], Any]) -> None:
        found.setdefault(name, []).append(1000 * timed(work)[0])

    follower = ckpt.Follower(folder / "published")
    live = dict.fromkeys(
        map("layer{}".format, range(LEAVES)), jnp.zeros(values // LEAVES, jnp.bfloat16)
    )
    with ckpt.Publisher(folder / "published") as publisher:
        for version, state in enumerate(versions(rounds + 2, values, rate)):
            if version == 2:
                found.clear()  # the first delta warms up
            full_bytes = peers(folder, jax.block_until_ready(state), clock)
            clock("publish blocks", functools.partial(publisher.publish, version, state))
            wait(ckpt.Follower(folder / "published"), version)  # so that reading is measured alone
            clock("read", functools.partial(wait, follower, version))
            clock("set", functools.partial(follower.update, live))
            assert all((live[name] == leaf).all() for name, leaf in state.items())
            for delta in (folder / "published").glob(f".ckpt-delta-{version}-*"):
                found.setdefault("bytes", []).append(100 * size(delta) / full_bytes)
    return found


def peers(folder: Path, state: State, clock: Clock) -> int:
    """Full saves and loads of the same weights; bytes of ours."""
    from orbax.checkpoint import v1 as ocp
    from safetensors.flax import load_file, save_file

    path = folder / "full"
    pending: list[Any] = []
    clock("save_async blocks", lambda: pending.append(ckpt.save_async(path, state)))
    pending[0].result()
    clock("ckpt load", lambda: jax.block_until_ready(ckpt.load(path, state)))
    full_bytes = size(path)
    file = folder / "full.safetensors"

    def save_and_sync() -> None:
        save_file(state, file)
        with file.open("rb") as opened:
            os.fsync(opened.fileno())

    clock("safetensors save", save_and_sync)
    clock("safetensors load", lambda: jax.block_until_ready(load_file(file)))
    clock("Orbax save", lambda: ocp.save(f"{folder}/orbax", state))
    clock("Orbax load", lambda: jax.block_until_ready(ocp.load(f"{folder}/orbax", state)))
    for one in (path, folder / "orbax"):
        shutil.rmtree(one)
    return full_bytes


def picture(folder: Path, values: int, rate: float) -> str:
    """The bytes of 24 versions, of which every eighth is an anchor, too, as SVG."""
    published, bars, follower = (
        folder / "published",
        list[str](),
        ckpt.Follower(folder / "published"),
    )
    with ckpt.Publisher(published, anchor_every=8) as publisher:
        for version, state in enumerate(versions(24, values, rate)):
            publisher.publish(version, state)
            wait(follower, version)
            for kind, name in (("anchor", f"{version}"), ("delta", f".ckpt-delta-{version}-*")):
                for one in published.glob(name):
                    high = max(1, round(120 * size(one) / (2 * values)))
                    at = 16 + 14.6 * version + (7 if kind == "delta" else 0)
                    bars.append(
                        f'<rect class="{kind}" x="{at:.1f}" y="{168 - high}" width="6" height="{high}"/>'
                    )
    return PICTURE.format(bars="\n".join(bars), rate=f"{rate:g}")


def main() -> None:
    """Prints the table, or writes the picture."""
    given = options(
        __doc__, rates=[3e-6, 3e-5, 3e-4], mb=(200, "of weights"), rounds=(5, "counted"), picture=""
    )
    values = given.mb * 500_000
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        if given.picture:
            Path(given.picture).write_text(picture(Path(folder), values, given.rates[0]))
            return
        for number, rate in enumerate(given.rates):
            found = run(Path(folder, str(number)), values, rate, given.rounds)
            if not number:
                header(
                    "learning rate",
                    *(f"{name}, %" if name == "bytes" else f"{name}, ms" for name in found),
                )
            row(f"{rate:g}", *(spread(took, ".1f") for took in found.values()))


if __name__ == "__main__":
    main()
