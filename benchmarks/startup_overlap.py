"""Compares two start-ups of a training script, restore then compile, and both at once: python benchmarks/startup_overlap.py

Each run is a new process that has imported everything and initialized its devices, like a script at
that point; it compiles without a cache. The two ways take turns; prints medians in seconds.
"""

from __future__ import annotations

import tempfile

from shared import MIB, fresh, in_turn, middle, options, spread, timed

WAYS = ("load alone", "compile alone", "load, then compile", "load_async while compiling")


def save(path: str, layers: int, side: int) -> None:
    import jax.numpy as jnp

    import ckpt_core as ckpt

    tree = {f"layer{n:03}": jnp.full((side, side), n, jnp.float32) for n in range(layers)}
    ckpt.save(path, tree)
    ckpt.save(path + "-warm", jnp.ones(8))


def start_up(path: str, way: str, layers: int, side: int) -> float:
    import jax
    import jax.numpy as jnp

    import ckpt_core as ckpt

    jax.config.update("jax_enable_compilation_cache", False)
    jnp.zeros(1).block_until_ready()
    ckpt.load(path + "-warm")

    def loss(params, x):
        for number in range(layers):  # not scanned: every layer is compiled
            x = x + jnp.tanh(x @ params[f"layer{number:03}"]) * (1 + number)
        return (x**2).mean()

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

    def described(*shape: int):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    abstract = {f"layer{n:03}": described(side, side) for n in range(layers)}

    def work() -> None:
        pending = ckpt.load_async(path) if way == "load_async while compiling" else None
        if (way.startswith("load a") and pending is None) or way == "load, then compile":
            jax.block_until_ready(ckpt.load(path))
        if "compil" in way:
            jax.jit(step).lower(abstract, described(8, side)).compile()
        if pending is not None:
            jax.block_until_ready(pending.result())

    return timed(work)[0]


def main() -> None:
    given = options(__doc__, mib=(512, "size of the parameters"), layers=24, repeats=5)
    side = int((given.mib * MIB / 4 / given.layers) ** 0.5)
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        path = f"{folder}/step"
        fresh(save, path, given.layers, side)
        size = given.layers, side
        secs = in_turn(WAYS, given.repeats, lambda way: fresh(start_up, path, way, *size))
    for way, found in secs.items():
        print(f"{way:28} {spread(found, '.3f')} s")
    apart, together = (middle(secs[way]) for way in WAYS[2:])
    print(f"overlapping saves {1 - together / apart:.0%} of the start-up")


if __name__ == "__main__":
    main()
