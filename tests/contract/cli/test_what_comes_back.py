"""What somebody meets who has just installed it: plain mistakes, and what comes back as what."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt_core as ckpt


@dataclass
class Plain:
    w: Any
    n: int = 0


@dataclass(frozen=True)
class Frozen:
    inner: Any
    b: Any = None


@jax.tree_util.register_dataclass
@dataclass
class Registered:
    w: Any
    n: Any = 0


@dataclass
class OtherOrder:
    first: Any
    second: Any


jax.tree_util.register_dataclass(OtherOrder, ["second", "first"], [])


@dataclass
class WithMeta:
    w: Any
    name: Any = None


jax.tree_util.register_dataclass(WithMeta, ["w"], ["name"])


class Pair(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize(
    "value",
    [
        Plain(1.5, 2),
        Frozen(Plain([1, 2])),
        Registered(1.5, 2),
        OtherOrder(1, 2),
        {"deep": [Registered(Pair(1, Frozen(2)), 3)]},
        WithMeta(1.5, ("x", 2)),
    ],
    ids=repr,
)
def test_dataclasses_come_back_as_what_they_were(value: Any, tmp_path: Path):
    ckpt.save(tmp_path / "one", value)
    found = ckpt.load(tmp_path / "one")
    assert type(found) is type(value) and found == value


def test_what_cannot_be_made_again_comes_back_as_a_dict_of_its_fields(tmp_path: Path, monkeypatch):
    ckpt.save(tmp_path / "meta", WithMeta(1.5, ["a list"]))
    assert ckpt.load(tmp_path / "meta") == {"w": 1.5}  # the name of it is in no checkpoint
    ckpt.save(tmp_path / "gone", {"p": Plain(1.5), "r": Registered(2.5, 1)})
    for cls in (Plain, Registered):
        changed = dataclasses.make_dataclass(cls.__name__, ["w", "n", "new"])
        monkeypatch.setattr(sys.modules[__name__], cls.__name__, changed)
    assert ckpt.load(tmp_path / "gone") == {"p": {"w": 1.5, "n": 0}, "r": {"w": 2.5, "n": 1}}


def sharded(count: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:count]), ("x",)), PartitionSpec("x"))


@pytest.mark.parametrize(
    ("saved", "spec"), [(8, PartitionSpec("x")), (8, PartitionSpec()), (2, PartitionSpec("x"))]
)
def test_the_report_says_that_eight_devices_became_one(saved: int, spec: Any, tmp_path: Path):
    sharding = NamedSharding(sharded(saved).mesh, spec)
    tree = {"w": jax.device_put(jnp.arange(16.0), sharding), "n": np.ones(2), "s": 3}
    ckpt.save(tmp_path / "one", model=tree)
    for target, expected in (
        (jnp.zeros(16), ("model/w",)),  # on the default device, chosen by nobody
        (jax.device_put(jnp.zeros(16), jax.devices()[3]), ("model/w",)),
        (jax.ShapeDtypeStruct((16,), jnp.float32), None),
        (np.zeros(16, np.float32), None),
        (jax.device_put(jnp.zeros(16), sharding), ()),
    ):
        restored = ckpt.restore(tmp_path / "one", model={**tree, "w": target})
        if expected is not None:
            assert restored.report.resharded == expected
        assert np.asarray(restored["model"]["w"]).tolist() == list(range(16))
