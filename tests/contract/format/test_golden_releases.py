"""What each released version wrote, by every framework, loads bit for bit."""

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
