"""Keras' own tests of its callback, run with ours in its place and Keras' own loaders as they are.

They are imported from the Keras that is installed. 18 of the 22 of Keras 3.15.1 pass; the others are
named below, with the reason, and must fail in just that way. What is adapted: the default of
``max_to_keep``, and that the hidden file which names the writer is not counted as a checkpoint.
"""

import os

import pytest

from tests.support import keras_models as km

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("absl.testing.parameterized")

theirs = pytest.importorskip("keras.src.callbacks.orbax_checkpoint_test")
compiled_once = km.compiled_once
pytestmark = km.OF_ORBAX
NEEDS_TENSORFLOW = "StringLookup needs TensorFlow, on any backend"
BY_DESIGN = "fit(epochs=1) trains on where two epochs are done: ours counts them, and says so"
EXPECTED = {
    "test_checkpoint_with_assets0": (ImportError, NEEDS_TENSORFLOW),
    "test_checkpoint_with_assets1": (ImportError, NEEDS_TENSORFLOW),
    "test_training_resumption_1": (UserWarning, BY_DESIGN),
    "test_training_resumption_2": (UserWarning, BY_DESIGN),
}


class OursForTheirs(km.OrbaxCheckpointCallback):
    """Our callback with the one default that differs."""

    def __init__(self, *args, max_to_keep=1, **kwargs):
        super().__init__(*args, max_to_keep=max_to_keep, **kwargs)


class TestKerasOwnSuite(theirs.OrbaxCheckpointTest):
    pass


def _names():
    return [name for name in dir(theirs.OrbaxCheckpointTest) if name.startswith("test_")]


def _expect(name):
    """A copy of one of their tests in our class, marked: theirs stays as it is."""
    inherited = getattr(theirs.OrbaxCheckpointTest, name)
    error, reason = EXPECTED[name]

    def test(self):
        inherited(self)

    test.__name__ = name
    return pytest.mark.xfail(raises=error, reason=reason, strict=True)(test)


for _name in EXPECTED:
    setattr(TestKerasOwnSuite, _name, _expect(_name))


class OsWithoutHidden:
    """``os`` as their module sees it."""

    def __getattr__(self, name):
        return getattr(os, name)

    def listdir(self, path):
        return [name for name in os.listdir(path) if not name.startswith(".")]


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    monkeypatch.setattr(theirs, "OrbaxCheckpoint", OursForTheirs)
    monkeypatch.setattr(theirs, "os", OsWithoutHidden())


def test_none_of_theirs_is_missing():
    assert set(EXPECTED) <= set(_names())
    assert len(_names()) >= 22
