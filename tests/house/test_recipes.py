"""The recipes that send metrics elsewhere run with the real client library, where it is installed."""

import re
import subprocess
import sys

import pytest

from tests.support.children import environment
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "guide" / "recipes.md"
BLOCK = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
START = """
import jax.numpy as jnp
import ckpt_core as ckpt
model = {"w": jnp.ones(4)}
"""
SAVE = """
with ckpt.Checkpointer("runs/listened", options=ckpt.Options(on_event=LISTENER)) as checkpointer:
    checkpointer.save(3, model)
"""
PROMETHEUS = """
from prometheus_client import generate_latest
text = generate_latest().decode()
assert "checkpoint_saved_bytes_total 16.0" in text, text
assert "checkpoint_save_failures_total 0.0" in text, text
"""
OPENTELEMETRY = """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
"""
READ = """
[point] = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
assert point.count == 1 and point.attributes["step"] == 3
"""
MLFLOW = """
import os
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # the small client has no other
import mlflow
mlflow.set_tracking_uri("file:mlruns")
run = mlflow.start_run()
"""
LOGGED = """
[metric] = mlflow.MlflowClient().get_metric_history(run.info.run_id, "checkpoint_secs")
assert metric.step == 3 and metric.value > 0
"""
WANDB = """
import wandb
run = wandb.init(mode="offline", project="ckpt")
"""
SUMMED = """
assert run.summary["checkpoint/step"] == 3 and run.summary["checkpoint/bytes"] == 16
"""


@pytest.mark.parametrize(
    ("client", "before", "after"),
    [
        ("prometheus_client", "", PROMETHEUS),
        ("opentelemetry.sdk", OPENTELEMETRY, READ),
        ("wandb", WANDB, SUMMED),
        ("mlflow", MLFLOW, LOGGED),
    ],
)
def test_it_arrives(client, before, after, tmp_path):
    pytest.importorskip(client)
    name = client.partition("_")[0].partition(".")[0]
    [block] = [
        piece
        for block in BLOCK.findall(PAGE.read_text())
        for piece in re.split(r"\n\n\n(?=def to_wandb|def to_mlflow)", block)
        if f"to_{name}" in piece
    ]
    code = START + before + block + SAVE.replace("LISTENER", f"to_{name}") + after
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
