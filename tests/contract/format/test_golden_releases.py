"""What each released version wrote, by every framework, loads bit for bit; and directories of steps from before steps had lineages in their tokens."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.testing import assert_same
from tests.contract.format.release_golden import GOLDEN, MAKERS

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


def tree(value: int) -> dict[str, Any]:
    return {"w": np.full(3, value), "n": value}


def start(root: Path, local: str = "", **more: Any) -> ckpt.Checkpointer:
    if local:
        more |= {"local_directory": root / local, "options": EVERY_FOURTH}
    return ckpt.Checkpointer(root / "run", asynchronous=False, **more)


def found_by(root: Path) -> dict[int, int]:
    """All persistent steps that a reader finds; it goes on from the newest one."""
    with start(root, read_only=True) as reader:
        values = {step: int(reader.load(step)["n"]) for step in reader.all_steps()}
        restored = reader.restore_latest(state=tree(-1))
        assert restored is not None
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
        restored = checkpointer.restore_latest(state=tree(-1))
        assert restored is not None and restored["state"]["n"] == 4
        for step in (5, 6, 7, 8):
            assert checkpointer.save(step, tree(step), metadata={"value": step})
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
            assert checkpointer.restore(0, state=tree(-1))["state"]["n"] == 0
        for step in (1, 2, 3, 4):
            assert checkpointer.save(step, tree(1000), metadata={"value": 1000})
    new = [4] if local else [1, 2, 3, 4]
    assert found_by(root) == {0: 0} | dict.fromkeys(new, 1000)
