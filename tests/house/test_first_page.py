"""The three lines per framework on the site's first page run, twice: the second run goes on where the first one ended."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.house.test_readme import run_codes
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "index.md"
TAB = re.compile(r'^=== "([^"]+)"\n\n    ```python\n(.*?)^    ```$', re.MULTILINE | re.DOTALL)
BEFORE = {
    "Flax NNX": """
import grain, optax
from flax import nnx
model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
data = iter(grain.MapDataset.range(8).to_iter_dataset())
""",
    "Keras": """
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras, numpy
from ckpt_keras import OrbaxCheckpointCallback, load_model
x, y = numpy.ones((2, 8, 4))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
model.compile("adam", "mse")
""",
    "torchax": """
import optax, torch
from ckpt_torchax import shim
shim.install()
import torchax
from torchax.interop import call_jax
torchax.enable_globally()
env = torchax.default_env()
model = torch.nn.Linear(2, 2).to("jax")
opt_state = call_jax(optax.adam(1e-3).init, dict(model.named_parameters()))
""",
    "Equinox": """
import equinox, jax, optax
model = equinox.nn.Linear(2, 2, key=jax.random.key(0))
opt_state = optax.adam(1e-3).init(equinox.filter(model, equinox.is_array))
""",
    "Plain JAX": "import jax\nstate = {'w': jax.numpy.ones(2)}\n",
    "Orbax's names": "from ckpt_orbax import v1 as ocp\nimport jax\nstate = {'w': jax.numpy.ones(2)}\n",
}
RUN_AGAIN = {
    "Keras",
    "Orbax's names",
}  # that say themselves, in a way of their own, what they resumed


def test_there_is_a_tab_for_each_framework() -> None:
    assert [name for name, _ in TAB.findall(PAGE.read_text())] == list(BEFORE)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.always] * (name == "Flax NNX")) for name in BEFORE],
)
def test_its_lines_run_and_resume(name: str, tmp_path: Path) -> None:
    lines = textwrap.dedent(dict(TAB.findall(PAGE.read_text()))[name])
    start = "import ckpt_core as ckpt\ntotal_steps = 3\n" + BEFORE[name]
    first = run_codes([start, lines], PAGE, tmp_path)
    assert first.returncode == 0, first.stderr
    if name in RUN_AGAIN:
        return
    again = "assert restored is not None and restored.step == 0"
    second = run_codes([start, lines, again], PAGE, tmp_path)
    assert second.returncode == 0, second.stderr
