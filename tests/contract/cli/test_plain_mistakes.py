"""What somebody meets who has just installed it: plain mistakes, and what comes back as what."""

from __future__ import annotations

import dataclasses
import os
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

STATE = {"w": np.ones(3)}


@pytest.mark.parametrize(
    ("package", "missing", "extra"),
    [
        ("ckpt_flax_nnx", "flax", "flax"),
        ("ckpt_flax_nnx", "optax", "flax"),
        ("ckpt_grain", "grain", "grain"),
    ],
)
def test_a_missing_framework_names_the_extra(run_python, package: str, missing: str, extra: str):
    pytest.importorskip(package)
    code = f"""
import json, sys
sys.modules[{missing!r}] = None
try:
    import {package}
    reported = None
except ModuleNotFoundError as error:
    reported = [str(error), error.name]
print(json.dumps(reported))
"""
    reported = run_python(code)
    if reported is None:
        assert missing == "optax"  # imported when it is needed
    else:
        assert reported == [f"{package} needs {missing}: pip install 'ckpt-core[{extra}]'", missing]


def test_settings_in_a_dict_are_spelled_out(tmp_path: Path):
    wrong: Any = {"durable": False, "chunk_bytes": 4096}
    spelled = r"options=ckpt_core\.Options\(durable=False, chunk_bytes=4096\)"
    for call in (
        lambda: ckpt.save(tmp_path / "one", STATE, options=wrong),
        lambda: ckpt.load(tmp_path / "one", options=wrong),
        lambda: ckpt.Checkpointer(tmp_path / "run", options=wrong),
    ):
        with pytest.raises(TypeError, match=spelled):
            call()


@pytest.mark.parametrize("state", [STATE, [1, 2], np.ones(3), jnp.ones(3), 7, None, b"bytes"])
def test_a_state_in_the_place_of_the_path_is_reported(state: Any, tmp_path: Path):
    path = str(tmp_path / "one")
    for call in (
        lambda: ckpt.save(state, path),
        lambda: ckpt.save_async(state, path),
        lambda: ckpt.load(state, path),
        lambda: ckpt.inspect(state),
        lambda: ckpt.restore(state, state=path),
    ):
        with pytest.raises(TypeError, match=r"the path comes first, as in save\(path, state\)"):
            call()
    assert os.listdir(tmp_path) == []


def test_a_file_is_no_checkpoint_and_says_what_reads_it(tmp_path: Path):
    np.savez(tmp_path / "weights.npz", w=np.ones(3))
    for call in (ckpt.load, ckpt.inspect, ckpt.verify):
        with pytest.raises(ckpt.CheckpointNotFound, match=r"a file of numpy.*ckpt import"):
            call(tmp_path / "weights.npz")
    with pytest.raises(ckpt.CheckpointExists, match="is a file: a checkpoint is a directory"):
        ckpt.save(tmp_path / "weights.npz", STATE, overwrite=True)
    assert np.load(tmp_path / "weights.npz")["w"].tolist() == [1, 1, 1]


def test_a_foreign_folder_is_never_advised_to_be_overwritten(tmp_path: Path):
    folder = tmp_path / "run/12"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work")
    with ckpt.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        for call in (
            lambda: checkpointer.save(12, STATE),
            lambda: ckpt.save(folder, STATE),
            lambda: ckpt.save(folder, STATE, overwrite=True),
        ):
            with pytest.raises(
                ckpt.CheckpointExists, match=r"holds no checkpoint \(thesis\.tex\)"
            ) as e:
                call()
            assert "pass overwrite=True" not in str(e.value)
    with pytest.raises(ckpt.CheckpointNotFound, match=r"holds thesis\.tex, and nothing that ckpt"):
        ckpt.load(folder)
    assert (folder / "thesis.tex").read_text() == "years of work"
    ckpt.save(tmp_path / "one", STATE)
    with pytest.raises(ckpt.CheckpointExists, match="pass overwrite=True to replace it"):
        ckpt.save(tmp_path / "one", STATE)  # there it is the right advice


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


def test_what_lay_on_one_device_and_does_again_is_not_resharded(tmp_path: Path):
    tree = {"w": jnp.arange(16.0), "k": jax.random.key(0)}
    ckpt.save(tmp_path / "one", model=tree)
    assert ckpt.restore(tmp_path / "one", model=tree).report.resharded == ()
    moved = {**tree, "w": jax.device_put(tree["w"], sharded(8))}
    assert ckpt.restore(tmp_path / "one", model=moved).report.resharded == ("model/w",)


@pytest.mark.parametrize(
    ("file", "reported"),
    [("x.npz", "file of numpy.*ckpt import"), ("x.pt", "ckpt import"), ("x", "a file")],
)
def test_a_file_is_no_directory_of_steps(file: str, reported: str, tmp_path: Path):
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(NotADirectoryError, match=reported) as refused:
        ckpt.Checkpointer(tmp_path / file)
    assert refused.value.filename == str(tmp_path / file)


@pytest.mark.parametrize("value", [0, -1, "10", 1.5, True])
@pytest.mark.parametrize("name", ["max_to_keep", "keep_period", "save_interval_steps"])
def test_numbers_that_are_none_are_named(name: str, value: Any, tmp_path: Path):
    kind = ValueError if type(value) is int else TypeError
    arguments = {"max_to_keep": 2, name: value}
    with pytest.raises(kind, match=rf"^{name} must be .*, got {value!r}"):
        ckpt.Checkpointer(tmp_path, **arguments)


def test_what_was_saved_by_name_is_restored_by_name(tmp_path: Path):
    with ckpt.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        checkpointer.save(0, model=STATE, opt=STATE)
        for call in (checkpointer.restore_latest, lambda state: checkpointer.restore(0, state)):
            with pytest.raises(
                ckpt.CheckpointNotFound, match=r"by its name \(model=..., opt=...\)"
            ):
                call(STATE)
    ckpt.save(tmp_path / "one", STATE)
    with pytest.raises(ckpt.CheckpointNotFound, match="pass one target without a name"):
        ckpt.restore(tmp_path / "one", model=STATE)


def test_missing_is_an_error_or_kept(tmp_path: Path):
    ckpt.save(tmp_path / "one", STATE)
    with pytest.raises(ValueError, match="missing must be 'error' or 'keep', got 'ignore'"):
        ckpt.load(tmp_path / "one", STATE, missing="ignore")
