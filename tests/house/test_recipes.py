"""The recipe that sends metrics to Prometheus runs with the real client library."""

import re
import subprocess
import sys

import pytest

from tests.support.children import environment
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "guide" / "recipes.md"
START = """
import jax.numpy as jnp
import ckpt_core as ckpt
model = {"w": jnp.ones(4)}
"""
SAVE = """
with ckpt.Checkpointer("runs/listened", options=ckpt.Options(on_event=to_prometheus)) as checkpointer:
    checkpointer.save(3, model)

from prometheus_client import generate_latest
text = generate_latest().decode()
assert "checkpoint_saved_bytes_total 16.0" in text, text
assert "checkpoint_save_failures_total 0.0" in text, text
"""


def test_it_arrives(tmp_path):
    pytest.importorskip("prometheus_client")
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if "to_prometheus" in block]
    done = subprocess.run(
        [sys.executable, "-c", START + block + SAVE],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
