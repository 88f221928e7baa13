"""The recipes that send events elsewhere run with the real client library, or with one that stands in for it."""

import importlib.util
import re
import subprocess
import sys
import textwrap

import pytest

from tests.support.children import environment
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "guide" / "recipes.md"
START = """
import os
import jax.numpy as jnp
import ckpt_core as ckpt
model = {"w": jnp.ones(4)}
os.environ.update(WANDB_MODE="offline", MLFLOW_TRACKING_URI="file:mlruns")
"""
SAVE = """
options = ckpt.Options(on_event=LISTENER)
with ckpt.Checkpointer("runs/listened", options=options, max_to_keep=1) as checkpointer:
    checkpointer.save(3, model)
    checkpointer.save(4, model)
    checkpointer.save(5, model)
    checkpointer.wait_until_finished()
    checkpointer.rollback_to(4)
"""
TRACKED = """
import mlflow, wandb
mlflow.start_run(), wandb.init(project="test")
"""
PROMETHEUS = """
from prometheus_client import generate_latest
text = generate_latest().decode()
assert "checkpoint_saved_bytes_total 48.0" in text, text
assert "checkpoint_save_failures_total 0.0" in text, text
"""
GONE = """
wanted = {name_of(os.path.abspath(f"runs/listened/{step}")): "deleted" for step in (3, 4, 5)}
found = {name: kind for name, kind in told.items() if name.startswith("checkpoint")}
assert wanted.items() <= found.items(), found
"""
WANDB = f"""
told = dict(wandb.run.summary)
name_of = "checkpoint {{}}".format
assert told["checkpoint/bytes"] == 16, told
{GONE}
wandb.finish()
"""
MLFLOW = f"""
found = mlflow.MlflowClient().get_run(mlflow.active_run().info.run_id).data
told, name_of = found.tags, lambda path: "checkpoint" + path.replace("/", ".")
assert found.metrics["checkpoint_secs"] > 0
{GONE}
"""
# What the recipes use of each library, with its rules; written where a library is not installed.
STAND_INS = {
    "wandb": """
    import types
    run = None
    def init(**_):
        global run
        run = types.SimpleNamespace(summary={})
    def log(values):
        run.summary.update(values)
    def finish():
        pass
    """,
    "mlflow": """
    import re, types
    _data = types.SimpleNamespace(tags={}, metrics={})
    _run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="1"), data=_data)
    def start_run():
        return _run
    active_run = start_run
    def log_metric(key, value, step=None, run_id=None):
        assert run_id == "1"
        _data.metrics[key] = value
    class MlflowClient:
        def set_tag(self, run_id, key, value):
            assert run_id == "1" and re.fullmatch(r"[-/\\w. ]{1,250}", key) and key[0] != "/", key
            _data.tags[key] = value
        def get_run(self, run_id):
            return _run
    """,
}


@pytest.mark.parametrize(
    ("library", "begins", "listener", "check"),
    [
        ("prometheus_client", "", "to_prometheus", PROMETHEUS),
        ("wandb", TRACKED, "to_wandb", WANDB),
        ("mlflow", TRACKED, "to_mlflow", MLFLOW),
    ],
)
def test_it_arrives(tmp_path, library, begins, listener, check):
    for name, text in STAND_INS.items():
        if importlib.util.find_spec(name) is None:
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    if library not in STAND_INS:
        pytest.importorskip(library)
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if f"def {listener}" in block]
    code = START + begins + block
    done = subprocess.run(
        [sys.executable, "-c", code + SAVE.replace("LISTENER", listener) + check],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
