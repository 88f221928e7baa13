"""The children that open checkpoints of which a file was grown beyond all memory."""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import jax
import numpy as np

import ckpt_core as ckpt


def _tree(step: int) -> dict[str, Any]:
    return {
        "w": jax.device_put(np.full((300, 300), step, np.float32)),
        "small": jax.device_put(np.full(3, step, np.float32)),
        "text": f"step {step}",
    }


def make(path: str) -> None:
    """Two steps, with metadata of the run, and the name of the run as for a local tier."""
    import grain

    data = iter(grain.MapDataset.range(100))
    with ckpt.Checkpointer(
        path, asynchronous=False, local_directory=f"{path}-local", save_interval_steps=1
    ) as checkpointer:
        checkpointer.write_run_metadata({"by": "grown"})
        for step in range(2):
            next(data)
            checkpointer.save(step, state=_tree(step), data=data, metrics={"loss": 1.0 - step})
    shutil.rmtree(f"{path}-local")


def open_all(jobs: list[tuple[str, str]]) -> None:
    """Every reader on every directory of steps, whose newest step may be damaged."""
    warnings.simplefilter("ignore")
    for name, directory in jobs:
        before = _read_bytes()
        step = f"{directory}/1"
        results = {
            "inspect": _said(lambda step=step: ckpt.inspect(step)),
            "load": _said(lambda step=step: jax.block_until_ready(ckpt.load(step, item="state"))),
            "as_numpy": _said(lambda step=step: ckpt.load(step, item="state", as_numpy=True)),
            "verify": _said(lambda step=step: ckpt.verify(step)),
        }
        with ckpt.Checkpointer(
            directory, read_only=True, best_metric="loss", best_mode="min"
        ) as checkpointer:
            results["all_steps"] = str(checkpointer.all_steps())
            results["best_step"] = str(checkpointer.best_step())
            results["step_metadata"] = _said(lambda c=checkpointer: (c.metadata(1), c.metrics(1)))
            restored = checkpointer.restore_latest(items={"state": _tree(7)})
            results["restore_latest"] = f"step {restored.step}" if restored else "none"
            if restored:
                restored["state"]
        read_bytes = _read_bytes() - before
        child.report(file=name, results=results, read_bytes=read_bytes, rss_bytes=_peak_bytes())


def go_on(directory: str) -> None:
    """What a job does that goes on with a run."""
    warnings.simplefilter("ignore")

    def train() -> None:
        with ckpt.Checkpointer(
            directory, asynchronous=False, local_directory=f"{directory}-local"
        ) as checkpointer:
            checkpointer.save(2, state=_tree(2))

    def save() -> None:
        with ckpt.Checkpointer(directory, asynchronous=False) as checkpointer:
            checkpointer.save(3, state=_tree(3))

    results = [_said(lambda: ckpt.inspect(f"{directory}/1")), _said(train), _said(save)]
    child.report(results=results, rss_bytes=_peak_bytes())


def without_record(path: str) -> None:
    """Makes a checkpoint one as Orbax writes them: no record, and no marker that asks for it."""
    os.unlink(f"{path}/ckpt.json")
    for file in Path(path).rglob("_*METADATA"):
        value = json.loads(file.read_bytes())
        value["custom_metadata"] = {}
        file.write_text(json.dumps(value))
    shutil.rmtree(f"{path}/data", ignore_errors=True)
    ckpt.load(path)


def open_one(path: str) -> None:
    results = {
        "inspect": _said(lambda: ckpt.inspect(path)),
        "load": _said(lambda: jax.block_until_ready(ckpt.load(path))),
        "as_numpy": _said(lambda: ckpt.load(path, as_numpy=True)),
    }
    child.report(results=results, rss_bytes=_peak_bytes())


def _said(call: Callable[[], Any]) -> str:
    try:
        result = call()
    except ckpt.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"untyped {type(error).__name__}: {error}"[:300]
    problems = getattr(result, "problems", None)
    return f"problems {'; '.join(map(str, problems))}" if problems else "ok"


def _peak_bytes() -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _read_bytes() -> int:
    """What system calls have read so far, from wherever."""
    with open("/proc/self/io") as counts:
        return int(next(line for line in counts if line.startswith("rchar")).split()[1])
