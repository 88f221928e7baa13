"""One program on Orbax and on ckpt_orbax, in one process, in turn: python benchmarks/orbax_face.py

The states of peers.yaml but for the single leaf; ``--divide 4`` takes a quarter of their leaves. Each
round saves, saves in the background, loads, and loads into a target, with new arrays for each library,
and compares what came back bit for bit. Each library is first in every other round; the first round is
not counted, and earlier writes are synced before each measurement. Prints a Markdown table: medians,
and in brackets the fastest and the slowest. The directory must be on a real disk.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from shared import ROOT, header, middle, options, row, spread  # isort: skip

import jax
import numpy as np

from ckpt_core import bench

LIBRARIES = {"Orbax": "orbax.checkpoint.experimental.v1", "ckpt_orbax": "ckpt_orbax.v1"}
MEASURES = ("save", "save_async, blocked", "save_async, in all", "load", "load, target")
TIME = "0_basics/time_s"


@dataclasses.dataclass(frozen=True)
class FaceOptions(bench.BenchmarkOptions):
    library: str | list[str] = "ckpt_orbax"


@bench.benchmark_options(FaceOptions)
class Face(bench.BenchmarksGenerator):
    """Calls of Orbax's second API, the same on both."""

    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        ocp: Any = importlib.import_module(LIBRARIES[context.options.library])
        state, directory, metrics = context.pytree, context.path, bench.Metrics()
        target = jax.tree.map(ocp.arrays.to_shape_dtype_struct, state)
        with bench.settle(), metrics.measure("save", ["time"]):
            ocp.save(directory / "saved", state)
        with bench.settle(), metrics.measure("save_async, in all", ["time"]):
            with metrics.measure("save_async, blocked", ["time"]):
                response = ocp.save_async(directory / "later", state)
            response.result()
        for measure, arguments in (("load", ()), ("load, target", (target,))):
            with bench.settle(), metrics.measure(measure, ["time"]):
                loaded = jax.block_until_ready(ocp.load(directory / "later", *arguments))
            assert jax.tree.structure(loaded) == jax.tree.structure(state)
            for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
                assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), (
                    "other bytes came back"
                )
            del loaded
        leaves = jax.tree.leaves(state)
        size = f"{len(leaves):,} leaves, {sum(leaf.nbytes for leaf in leaves) / 2**20:.0f} MiB"
        return bench.TestResult(metrics, {"size": size})


def fewer(spec: Any, divide: int) -> Any:
    """A state with fewer leaves."""
    if isinstance(spec, dict):
        return {name: fewer(part, divide) for name, part in spec.items()}
    return dataclasses.replace(spec, count=spec.count and max(1, spec.count // divide))


def main() -> None:
    given = options(
        __doc__,
        rounds=(5, "counted rounds"),
        divide=(1, "only 1/n of the leaves"),
        only=("", "states whose names have one of these texts, by semicolons"),
    )
    from absl import logging

    logging.set_verbosity(logging.FATAL)  # Orbax's warnings about each load without a target
    texts = list(filter(None, given.only.split(";")))
    peers = bench.load_suite(ROOT / "benchmarks" / "peers.yaml")
    faces = bench.parse_suite(
        f"suite_name: faces\nnum_repeats: {given.rounds}\nremove_repeated_dir: true\nbenchmarks:\n"
        f"- {{generator: {__name__}.Face, options: {{library: {[*LIBRARIES]}}}}}"
    )
    header("state", "", "Orbax, s", "ckpt_orbax, s", "times as fast", words=2)
    for config in peers.checkpoints:
        if not any(text in config.name for text in texts) if texts else config.name == "1 x 1 GiB":
            continue
        state = dataclasses.replace(config, spec=fewer(config.spec, given.divide))
        suite = dataclasses.replace(faces, checkpoints=(state,))
        with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=given.directory) as scratch:
            result = bench.run_suite(suite, bench.RunSettings(Path(scratch)), report)
        title = f"{config.name}: {result.cases[0].notes['size']}"
        theirs, ours = (case.by_operation() for case in result.cases)
        for measure in MEASURES:
            secs = [found[measure][TIME].values for found in (theirs, ours)]
            ratio = middle(secs[0]) / middle(secs[1])
            row(title, measure, *(spread(one, ".3f") for one in secs), f"{ratio:.1f}")
            title = ""


def report(case: Any, run: Any) -> None:
    """Prints which run has ended; a failed one ends the script."""
    print(f"{case.group}: {run.kind} {run.repeat}: {case.label}", file=sys.stderr)
    if run.error is not None:
        sys.exit(run.details)


if __name__ == "__main__":
    main()
