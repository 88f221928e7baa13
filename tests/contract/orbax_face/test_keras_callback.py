"""Keras' own tests of its Orbax callback, with ``ckpt_orbax`` as the module that Keras imports."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap

import pytest

from tests.support.children import compiling_once, with_devices

pytest.importorskip("absl.testing.parameterized")
if importlib.util.find_spec("keras") is None:  # importing it would choose its backend
    pytest.skip("Keras is not installed", allow_module_level=True)


PROGRAM = """
    import json, os, sys, types, unittest

    import ckpt_orbax

    orbax = types.ModuleType("orbax")
    orbax.checkpoint = ckpt_orbax  # no package: nothing else of Orbax can be imported
    sys.modules |= {"orbax": orbax, "orbax.checkpoint": ckpt_orbax}

    from absl import flags

    flags.FLAGS.mark_as_parsed()
    import keras.src.callbacks.orbax_checkpoint_test as theirs

    suite = unittest.defaultTestLoader.loadTestsFromTestCase(theirs.OrbaxCheckpointTest)
    done = unittest.TextTestRunner(stream=sys.stderr).run(suite)
    bad = {case.id().split(".")[-1].split()[0]: text for case, text in done.failures + done.errors}
    with open(sys.argv[1], "w") as file:
        json.dump([done.testsRun, bad], file)
    os._exit(0)
"""

NEEDS_TENSORFLOW = {"test_checkpoint_with_assets0", "test_checkpoint_with_assets1"}


def test_kerass_own_suite(tmp_path):
    answer = tmp_path / "answer.json"
    environment = with_devices(8) | compiling_once(tmp_path / "cache")
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(answer)],
        env=environment | {"KERAS_BACKEND": "jax", "TEST_TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert answer.exists(), child.stderr
    count, bad = json.loads(answer.read_text())
    assert count >= 22
    unexpected = {name: text for name, text in bad.items() if name not in NEEDS_TENSORFLOW}
    assert not unexpected, "\n".join(unexpected.values())
    assert all("TensorFlow" in bad.get(name, "TensorFlow") for name in NEEDS_TENSORFLOW)
