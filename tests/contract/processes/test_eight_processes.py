"""Eight processes of one device each, and what they saved on fewer of more devices."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.launch import launch, reports

CASES = """
devices = np.array(jax.devices())
assert len(devices) == 8
cube = Mesh(devices.reshape(2, 2, 2), ("x", "y", "z"))
flat = Mesh(devices[::-1], ("a",))
SPECS = {
    "rows": (flat, P("a")),
    "cube": (cube, P("x", "y")),
    "corner": (cube, P(("z", "x"), "y")),
    "halves": (cube, P(None, "z")),
    "copied": (cube, P()),
    "some": (Mesh(devices[2:5], ("a",)), P("a")),
}
def values(number):
    return np.arange(24 * 16, dtype=np.float32).reshape(24, 16) + 1000 * number

def shardings(shift):
    chosen = list(SPECS.values())
    return {
        name: NamedSharding(*chosen[(number + shift) % len(chosen)])
        for number, name in enumerate(SPECS)
    }

def tree():
    found = {
        name: jax.make_array_from_callback(
            (24, 16), sharding, lambda where, n=number: values(n)[where], dtype=np.float32
        )
        for number, (name, sharding) in enumerate(shardings(0).items())
    }
    words = np.arange(16, dtype=np.uint32).reshape(8, 2)
    keys = jax.make_array_from_callback(
        (8, 2), NamedSharding(flat, P("a", None)), lambda where: words[where]
    )
    return {**found, "keys": jax.random.wrap_key_data(keys)}

def wrong(shift, options):
    like = {
        name: jax.ShapeDtypeStruct((24, 16), np.float32, sharding=sharding)
        for name, sharding in shardings(shift).items()
    }
    loaded = ckpt.load(f"{directory}/one", like, unexpected="ignore", options=options)
    return [
        [shift, name]
        for number, name in enumerate(SPECS)
        if loaded[name].sharding != like[name].sharding
        or not all(
            (np.asarray(shard.data) == values(number)[shard.index]).all()
            for shard in loaded[name].addressable_shards
        )
    ]
sharing = ckpt.Options(timeout_secs=40, broadcast=True)
"""

SAVE = """
state = tree()
ckpt.save(f"{directory}/one", state, options=options)
keys = ckpt.load(f"{directory}/one", state, options=options)["keys"]
words = jax.random.key_data(keys)
same = np.asarray(words.addressable_data(0)).tolist() == np.asarray(
    jax.random.key_data(state["keys"]).addressable_data(0)
).tolist()
report(wrong=wrong(1, options) + wrong(2, sharing), same=same)
"""

LOAD = """
bad = [found for shift in range(6) for chosen in (options, sharing) for found in wrong(shift, chosen)]
report(wrong=bad)
"""


def save_on_eight(directory: Path) -> None:
    told = reports(launch(CASES + SAVE, directory, processes=8, devices=1, limit_secs=150))
    assert told == [{"wrong": [], "same": True}] * 8


def test_eight_processes_and_one(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    save_on_eight(directory)
    assert ckpt.verify(directory / "one").ok
    values = np.arange(24 * 16, dtype=np.float32).reshape(24, 16)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    spec = jax.sharding.PartitionSpec("b", "a")
    loaded = ckpt.load(
        directory / "one", sharding=jax.sharding.NamedSharding(mesh, spec), only="*o*"
    )
    assert sorted(loaded) == ["copied", "corner", "rows", "some"]
    for number, name in ((0, "rows"), (2, "corner"), (4, "copied"), (5, "some")):
        assert (np.asarray(loaded[name]) == values + 1000 * number).all(), name


@pytest.mark.slow
def test_eight_processes_to_eight_four_two_and_one(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    save_on_eight(directory)
    for processes in (8, 4, 2, 1):
        told = reports(
            launch(
                CASES + LOAD, directory, processes=processes, devices=8 // processes, limit_secs=150
            )
        )
        assert told == [{"wrong": []}] * processes, processes
