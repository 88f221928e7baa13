"""The children that open checkpoints made to harm, or a file of which was grown beyond all memory: every reader on each.

What must not happen (an abort, a hang, much memory, a file outside) is for the parent to see; here
each call is only classed: "ok", "good", "problems ..." of `verify`, the name and text of a
`CheckpointError`, or "untyped ...".
"""

import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import child
import jax
import numpy as np
from child import differences

import ckpt_core as ckpt

GOOD = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": [np.int32(7), "text", 1.5],
    "large": np.arange(90_000, dtype=np.float32),
}


def make(path: str) -> None:
    """Saves the good checkpoint that the cases are made from; compressed, and as a step too."""
    ckpt.save(path, GOOD)
    for codec in ("zstd", "blosc"):
        ckpt.save(f"{path}-{codec}", GOOD, options=ckpt.Options(compression=codec))
    with ckpt.Checkpointer(f"{path}-steps", asynchronous=False) as checkpointer:
        checkpointer.save(0, GOOD)


READERS: dict[str, Callable[[str], Any]] = {
    "inspect": lambda path: ckpt.inspect(path),
    "as_numpy": lambda path: ckpt.load(path, as_numpy=True),
    "load": lambda path: jax.block_until_ready(ckpt.load(path)),
    "like": lambda path: ckpt.load(path, GOOD),
    "verify": lambda path: ckpt.verify(path),
}


def open_all(cases: list[tuple[str, str]], readers: list[str] | None = None) -> None:
    """Opens every `(name, path)`; the name is reported first, so that a crash has one, and the seconds of a core."""
    for name, path in cases:
        child.report(opening=name)
        started = time.process_time()
        results = {one: _class(partial(READERS[one], path)) for one in readers or READERS}
        child.report(opened=name, results=results, secs=time.process_time() - started)


def open_steps(directory: str) -> None:
    """What a resuming trainer does with a directory whose only step is hostile."""

    def resume() -> Any:
        with ckpt.Checkpointer(directory, read_only=True) as checkpointer:
            return checkpointer.restore_latest(state=GOOD)

    child.report(opened=directory, results={"restore_latest": _class(resume)})


# ---- grown files ---------------------------------------------------------------------------------


def _tree(step: int) -> dict[str, Any]:
    return {
        "w": jax.device_put(np.full((300, 300), step, np.float32)),
        "small": jax.device_put(np.full(3, step, np.float32)),
        "text": f"step {step}",
    }


def make_run(path: str) -> None:
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

    results = [_class(lambda: ckpt.inspect(f"{directory}/1")), _class(train), _class(save)]
    child.report(results=results)


def without_record(path: str) -> None:
    """Makes a checkpoint one as Orbax writes them: no record, and no marker that asks for it."""
    os.unlink(f"{path}/ckpt.json")
    for file in Path(path).rglob("_*METADATA"):
        value = json.loads(file.read_bytes())
        value["custom_metadata"] = {}
        file.write_text(json.dumps(value))
    shutil.rmtree(f"{path}/data", ignore_errors=True)
    ckpt.load(path)


# ---- what became of a call -----------------------------------------------------------------------


def _class(call: Callable[[], Any]) -> str:
    result: Any
    try:
        result = call()
    except ckpt.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"untyped {type(error).__name__}: {error}"[:300]
    if isinstance(result, dict):
        return "ok" if differences(result, GOOD) else "good"
    if hasattr(result, "problems"):
        return "ok" if result.ok else f"problems {'; '.join(map(str, result.problems))}"
    return "ok"
