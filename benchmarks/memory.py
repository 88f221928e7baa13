"""Measures the resident memory of saves and loads, in multiples of the state: python benchmarks/memory.py

Each case is a new process that has done the same with a small state before, so that everything is imported; the peak is
that of the whole process (``VmHWM``, which begins anew right before the measured call), less what it held before. For a load
the state itself is new memory, so 1.00 is the least; for a save, and for a restore into objects that have their values, 0.00 is.
Linux only.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from typing import Any

from shared import MIB, fresh, header, options, row

CASES = {
    "save": "plain",
    "load": "plain",
    "load, cast to bfloat16": "plain",
    "restore into an NNX model": "nnx",
    "restore into an abstract NNX model": "nnx",
    "restore into a Keras model": "keras",
    "restore into a torchax module": "torchax",
    "load into a torchax module on the meta device": "torchax",
}
"""What is measured, and whose state it is; each needs the checkpoint of the first case of its kind."""


def grown(work: Callable[[], Any]) -> int:
    """By how many bytes the process grew at most."""
    from ckpt_core.bench._measure import reset_peak, resident

    gc.collect()
    before, _ = resident()
    reset_peak()
    kept = work()
    _, peak = resident()
    del kept
    return peak - before


def state(kind: str, count: int, side: int, where: str | None = None) -> Any:
    """A tree or a model of ``count`` matrices; ``where`` is "abstract" or torch's "meta" where it has no values."""
    import jax.numpy as jnp
    import numpy as np

    if kind == "plain":
        rng = np.random.default_rng(0)
        arrays = (rng.standard_normal((side, side), np.float32) for _ in range(count))
        return {f"w{n:03}": jnp.asarray(array) for n, array in enumerate(arrays)}
    if kind == "nnx":
        from flax import nnx

        class Model(nnx.Module):
            def __init__(self, rngs):
                made = (nnx.Linear(side, side, use_bias=False, rngs=rngs) for _ in range(count))
                self.layers = nnx.List(list(made))

        def make() -> Any:
            return Model(nnx.Rngs(0))

        return nnx.eval_shape(make) if where else make()
    if kind == "keras":
        import keras

        dense = [keras.layers.Dense(side, use_bias=False) for _ in range(count)]
        return keras.Sequential([keras.Input((side,)), *dense])
    import torch

    linear = (torch.nn.Linear(side, side, bias=False, device=where) for _ in range(count))
    model = torch.nn.Sequential(*linear)
    return model if where else model.to("jax")


def measure(case: str, folder: str, count: int, side: int) -> int:
    """Bytes of new memory at the peak of a case, after the same with a small state."""
    import jax
    import jax.numpy as jnp

    import ckpt_core as ckpt

    kind = CASES[case]
    if kind == "torchax":
        from ckpt_torchax import shim

        shim.install()
        import torchax

        import ckpt_torchax

        torchax.enable_globally()
    found = 0
    for leaves, size, name in ((2, 64, f"small-{kind}"), (count, side, kind)):
        path = f"{folder}/{name}"
        if case == "save":
            tree = state(kind, leaves, size)
            found = grown(lambda path=path, tree=tree: ckpt.save(path, tree, overwrite=True))
        elif case == "load":
            found = grown(lambda path=path: jax.block_until_ready(ckpt.load(path)))
        elif kind == "plain":
            described = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
            like = {f"w{n:03}": described for n in range(leaves)}
            found = grown(
                lambda path=path, like=like: jax.block_until_ready(ckpt.load(path, like, cast=True))
            )
        elif "meta" in case:
            model = state(kind, leaves, size, "meta")
            found = grown(lambda path=path, model=model: ckpt_torchax.load_into(path, model))
        else:
            where = "abstract" if "abstract" in case else None
            model = state(kind, leaves, size, where)
            if where is None:
                ckpt.save(path, model=model, overwrite=True)
            found = grown(lambda path=path, model=model: ckpt.restore(path, model=model))
    return found


def main() -> None:
    given = options(
        __doc__,
        gib=(2.0, "size of the state"),
        leaf_mib=64.0,
        only=(",".join(CASES).replace(", ", " "), "cases, by commas"),
    )
    side = int((given.leaf_mib * MIB / 4) ** 0.5)
    count = max(1, round(given.gib * 1024 / given.leaf_mib))
    header("case", "new resident memory at the peak, of the state")
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        for case in CASES:
            if case.replace(", ", " ") in given.only.split(","):
                found = fresh(measure, case, folder, count, side, KERAS_BACKEND="jax")
                row(case, f"{found / (count * side * side * 4):.3f}")


if __name__ == "__main__":
    main()
