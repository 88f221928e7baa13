"""Makes the golden checkpoints of a released version: one by each framework, in tests/contract/format/golden/VERSION.

    python -m tests.contract.format.release_golden

Once for each release, and never again for that version: later versions must load what that one wrote. Values are
whole numbers, which every platform makes the same.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ckpt_core as ckpt

GOLDEN = Path(__file__).parent / "golden"


def numbers(shape: tuple[int, ...], start: int) -> Any:
    return (np.arange(int(np.prod(shape))) + start).reshape(shape)


def nnx(start: int) -> dict[str, Any]:
    """A model and its optimizer."""
    from tests.contract.format.test_golden_nnx import numbered, objects

    model, optimizer = numbered(objects(start), start)
    return {"model": model, "optimizer": optimizer}


def keras(start: int) -> dict[str, Any]:
    """A model that was compiled and built."""
    from tests.support.keras_models import keras as k

    model = k.Sequential(
        [k.Input((3,)), k.layers.Dense(4), k.layers.Dropout(0.5), k.layers.Dense(2)]
    )
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    for position, variable in enumerate([*model.variables, *model.optimizer.variables]):
        variable.assign(numbers(tuple(variable.shape), start + position).astype(variable.dtype))
    return {"model": model}


def torch(start: int) -> dict[str, Any]:
    """A module on the CPU with parameters and buffers, and its optimizer."""
    import torch as t

    module = t.nn.Sequential(t.nn.Linear(3, 4), t.nn.BatchNorm1d(4))
    with t.no_grad():
        for position, (_, tensor) in enumerate(module.state_dict().items()):
            tensor.copy_(t.tensor(numbers(tuple(tensor.shape), start + position)))
    return {"module": module}


def grain(start: int) -> dict[str, Any]:
    """An iterator that has given so many batches."""
    import grain as g

    data = iter(g.MapDataset.range(64).seed(0).shuffle().repeat().batch(4).to_iter_dataset())
    for _ in range(start):
        next(data)
    return {"data": data}


def equinox(start: int) -> dict[str, Any]:
    """A module, with functions in its fields."""
    import equinox as eqx
    import jax

    model = eqx.nn.MLP(2, 3, width_size=4, depth=1, key=jax.random.key(0))
    leaves, treedef = jax.tree.flatten(model)
    counted = [
        jax.numpy.asarray(numbers(leaf.shape, start + n), leaf.dtype)
        if eqx.is_array(leaf)
        else leaf
        for n, leaf in enumerate(leaves)
    ]
    return {"model": treedef.unflatten(counted)}


def plain(start: int) -> dict[str, Any]:
    """A tree, files and plain values."""
    folder = GOLDEN / "files"
    return {
        "state": {"w": numbers((2, 3), start).astype(np.float32), "step": start, "text": "a.b/c"},
        "vocabulary": ckpt.Files(folder),
        "config": ckpt.Json({"layers": [1, 2], "name": None}),
    }


MAKERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "nnx": nnx,
    "keras": keras,
    "torch": torch,
    "grain": grain,
    "equinox": equinox,
    "plain": plain,
}

if __name__ == "__main__":
    # saved elsewhere, and moved: files say where they were saved, and that is to be no folder of a developer
    made = Path(tempfile.gettempdir()) / "ckpt-golden" / ckpt.__version__
    for name in sys.argv[1:] or MAKERS:
        ckpt.save(made / name, items=MAKERS[name](3), metadata={"by": name}, overwrite=True)
        shutil.rmtree(GOLDEN / ckpt.__version__ / name, ignore_errors=True)
        shutil.move(made / name, GOLDEN / ckpt.__version__ / name)
