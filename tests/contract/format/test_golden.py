"""Checkpoints that released versions wrote load as they were saved, and runs of them go on."""

import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.testing import assert_same
from tests.contract.format.release_golden import GOLDEN, MAKERS

METADATA = {"run": "golden", "numbers": [1, 2.5, None]}


class Moments(NamedTuple):
    mu: Any
    nu: Any


# The checkpoint names the class by the module that it was in when it was written.
sys.modules.setdefault("test_golden", sys.modules[__name__])


def tree() -> dict[str, Any]:
    """What was saved: integers and their bits only, so that every platform makes the same."""
    count = np.arange(24)
    signed = (count % 16 - 8).reshape(4, 6)
    return {
        "params": {
            "f32": jnp.asarray((count - 7.5).reshape(4, 6), jnp.float32),
            "bf16": jnp.asarray(count / 8, jnp.bfloat16),
            "int4": jnp.asarray(signed, jnp.int4),
            "flags": jnp.asarray(count % 3 == 0),
            "special": jnp.asarray([np.nan, np.inf, -np.inf, -0.0], jnp.float32),
            "empty": jnp.zeros((0, 3), jnp.float16),
            "long": jnp.arange(60, dtype=jnp.int32),
        },
        "optimizer": (
            Moments([jnp.float32(1.5)], {0: jnp.int32(3), 10: jnp.uint8(4)}),
            (),
            None,
            {},
        ),
        "key": jax.random.key(5, impl="threefry2x32"),
        "keys": jax.random.split(jax.random.key(6, impl="rbg"), 3),
        "numpy": {
            "f64": np.array([[1 / 3, -1e300]]),
            "e4m3": np.arange(5).astype(ml_dtypes.float8_e4m3fn),
            "complex": np.array([1 + 2j], np.complex64),
            "scalar": np.int16(-3),
            "generator": np.random.Generator(np.random.PCG64(7)),
        },
        "plain": [7, -(2**70), 1 / 3, True, "text ~/ü\n", b"\x00\xff", 1 - 2j],
        "a/b": {"~": 1},
    }


@pytest.fixture(name="lying", params=["v1", "v2"])
def where_it_lies(request: pytest.FixtureRequest) -> Path:
    return GOLDEN / request.param


@pytest.fixture(params=["where it lies", "a read-only copy"])
def golden(request: pytest.FixtureRequest, lying: Path, tmp_path: Path) -> Path:
    if request.param == "where it lies":
        return lying
    copied = Path(shutil.copytree(lying, tmp_path / "copied"))
    for path in [*copied.rglob("*"), copied]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    return copied


def test_loads_without_a_target(golden):
    loaded = ckpt.load(golden)
    assert_same(loaded, tree())
    assert isinstance(loaded["optimizer"][0], Moments)


def test_loads_into_a_target(golden):
    fresh = jax.tree.map(lambda leaf: leaf, tree())
    assert_same(ckpt.load(golden, fresh), tree())
    abstract = jax.eval_shape(lambda: tree()["params"])
    loaded = ckpt.load(golden, {"params": abstract}, unexpected="ignore")
    assert_same(loaded, {"params": tree()["params"]})
    restored = ckpt.restore(golden, state=fresh)
    assert_same(restored["state"], tree())
    assert restored.metadata == METADATA


def test_verifies(golden):
    report = ckpt.verify(golden)
    assert report.ok and report.problems == () and report.checked_bytes > 0


def test_inspects(golden, lying):
    info = ckpt.inspect(golden)
    assert (
        f"v{info.format_version}" == lying.name
        and info.metadata == METADATA
        and list(info.items) == ["state"]
    )
    leaves = {leaf.path: leaf for leaf in info.items["state"].leaves}
    assert leaves["params/int4"].dtype == "int4" and leaves["params/f32"].shape == (4, 6)
    assert "a~1b/~0" in leaves


def test_every_file_is_here(lying):
    """Git and packagers drop files that they take for rubbish, and what is empty."""
    recorded = ckpt.inspect(lying).files
    for name, size in recorded.items():
        assert (lying / name).stat().st_size == size, name
    there = {str(path.relative_to(lying)) for path in lying.rglob("*") if path.is_file()}
    assert there == {*recorded, "ckpt.json"}
    assert sum(path.stat().st_size for path in lying.rglob("*") if path.is_file()) < 50_000


RELEASES = sorted(path for path in GOLDEN.iterdir() if (path / "plain").is_dir())


def restored(path: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is in the checkpoint, in objects that held other values; and what it should be."""
    target = MAKERS[name](1)
    found = ckpt.restore(path / name, items=target)
    return {key: found[key] for key in target}, MAKERS[name](3)


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_every_byte(release):
    assert {path.name for path in release.iterdir()} == {*MAKERS}
    for name in MAKERS:
        assert ckpt.verify(release / name).ok
        assert ckpt.inspect(release / name).metadata == {"by": name}


def test_nnx(release):
    pytest.importorskip("flax")
    assert_same(*restored(release, "nnx"))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_keras(release):
    pytest.importorskip("tests.support.keras_models")
    found, wanted = restored(release, "keras")
    pairs = zip(
        [*found["model"].variables, *found["model"].optimizer.variables],
        [*wanted["model"].variables, *wanted["model"].optimizer.variables],
        strict=True,
    )
    for one, other in pairs:
        assert np.asarray(one.value).tobytes() == np.asarray(other.value).tobytes(), one.path


def test_torch(release):
    pytest.importorskip("torch")
    found, wanted = restored(release, "torch")
    states = [one["module"].state_dict() for one in (found, wanted)]
    assert states[0].keys() == states[1].keys()
    assert all(bool((states[0][key] == states[1][key]).all()) for key in states[0])


# The golden was written with another version of Grain than the oldest supported one.
@pytest.mark.filterwarnings("ignore:the position was saved by Grain:UserWarning")
def test_grain(release):
    pytest.importorskip("grain")
    found, wanted = restored(release, "grain")
    for _ in range(20):
        np.testing.assert_array_equal(next(found["data"]), next(wanted["data"]))


def test_equinox(release):
    eqx = pytest.importorskip("equinox")
    found, wanted = restored(release, "equinox")
    assert bool(eqx.tree_equal(found["model"], wanted["model"]))


def test_plain(release):
    found = ckpt.load(release / "plain")
    wanted = MAKERS["plain"](3)
    assert found["state"]["w"].tobytes() == wanted["state"]["w"].tobytes()
    assert (found["state"]["step"], found["state"]["text"]) == (3, "a.b/c")
    assert found["vocabulary"].read("vocabulary.txt") == b"one two\n"
    assert found["config"] == {"layers": [1, 2], "name": None}
    assert jax.tree.structure(found["state"]) == jax.tree.structure(wanted["state"])


EVERY_FOURTH = ckpt.Options(persist_policy=ckpt.when.every_steps(4), local_max_to_keep=2)


@pytest.fixture(name="root")
def make_root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "tiers", tmp_path / "tiers"))


def small_tree(value: int) -> dict[str, Any]:
    return {"w": np.full(3, value), "n": value}


def start(root: Path, local: str = "", **more: Any) -> ckpt.Checkpointer:
    if local:
        more |= {"local_directory": root / local, "options": EVERY_FOURTH}
    return ckpt.Checkpointer(root / "run", asynchronous=False, **more)


def found_by(root: Path) -> dict[int, int]:
    """All persistent steps that a reader finds; it goes on from the newest one."""
    with start(root, read_only=True) as reader:
        values = {step: int(reader.load(step)["n"]) for step in reader.all_steps()}
        restored = reader.restore_latest(state=small_tree(-1))
        assert (restored.step, restored["state"]["n"]) == max(values.items())
        assert reader.inspect(max(values)).metadata == {"value": values[max(values)]}
    return values


def test_what_is_found(root):
    assert found_by(root) == {0: 0, 4: 4}
    for folder in (root / "run").rglob("ckpt.json"):
        assert ckpt.verify(folder.parent).ok, folder


@pytest.mark.parametrize("local", ["", "new"])
def test_it_goes_on(root, local):
    with start(root, local) as checkpointer:
        restored = checkpointer.restore_latest(state=small_tree(-1))
        assert restored is not None and restored["state"]["n"] == 4
        for step in (5, 6, 7, 8):
            assert checkpointer.save(step, small_tree(step), metadata={"value": step})
    new = [8] if local else [5, 6, 7, 8]
    assert found_by(root) == {0: 0, 4: 4} | {step: step for step in new}


@pytest.mark.parametrize("back", ["rollback", "restore"])
@pytest.mark.parametrize("local", ["", "new"])
def test_it_goes_back(root, back, local):
    with start(root, local) as checkpointer:
        if back == "rollback":
            assert checkpointer.rollback_to(0) == [4]
            assert found_by(root) == {0: 0}
        else:
            assert checkpointer.restore(0, state=small_tree(-1))["state"]["n"] == 0
        for step in (1, 2, 3, 4):
            assert checkpointer.save(step, small_tree(1000), metadata={"value": 1000})
    new = [4] if local else [1, 2, 3, 4]
    assert found_by(root) == {0: 0} | dict.fromkeys(new, 1000)
