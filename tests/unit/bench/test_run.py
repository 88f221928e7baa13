"""The run loop and its generators: what runs, how often, what is recorded when something fails."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import bench
from ckpt_core.bench._check import WrongData, check_equal
from ckpt_core.bench._core import Skipped
from ckpt_core.bench._results import SuiteResult
from ckpt_core.bench.generators import SaveLoadOptions
from ckpt_core.bench.libraries import NAMES, Library, library, make_library


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """What the rest of a busy machine has to write does not count here."""
    monkeypatch.setattr(os, "sync", lambda: None)


CALLS: list[tuple[str, int | None]] = []


@dataclass(frozen=True)
class ProbeOptions(bench.BenchmarkOptions):
    name: str | list[str] = "a"


@bench.benchmark_options(ProbeOptions)
class Probe(bench.BenchmarksGenerator):
    """Measures nothing in particular, and misbehaves when asked to."""

    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        name = context.options.name
        CALLS.append((name, context.repeat_index))
        assert list(context.path.iterdir()) == []
        (context.path / "file").write_text(name)
        if context.local_path is not None:
            (context.local_path / "file").write_text(name)
        if name == "fails":
            raise KeyError("planted")
        if name == "absent":
            raise bench.Skipped("is not here")
        if name == "interrupts" and context.repeat_index == 0:
            raise KeyboardInterrupt
        metrics = bench.Metrics()
        with metrics.measure("nothing", ["time"]):
            pass
        return bench.TestResult(metrics=metrics, notes={"durable": "yes"})


# The guide's own example of a class, but for where its imports come from (recipe B).
@dataclass(frozen=True)
class SaveRestoreOptions(bench.BenchmarkOptions):
    use_ocdbt: bool | list[bool] = True

    def is_valid(self) -> bool:
        return True


@bench.benchmark_options(SaveRestoreOptions)
class SaveRestoreBenchmark(bench.BenchmarksGenerator):
    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        from orbax.checkpoint import v1 as ocp

        metrics = bench.Metrics()
        options = context.options
        pytree = context.pytree
        abstract = jax.tree.map(ocp.arrays.to_shape_dtype_struct, pytree)
        path = context.path / "ckpt"
        with ocp.Context(
            array_options=ocp.options.ArrayOptions(
                saving=ocp.options.ArrayOptions.Saving(use_ocdbt=options.use_ocdbt)
            )
        ):
            with metrics.measure("save"):
                ocp.save(str(path), pytree)
            with metrics.measure("load"):
                _ = ocp.load(str(path), abstract)
        return bench.TestResult(metrics=metrics)


def run(text: str, output: Path, listener: Any = None, **settings: Any) -> SuiteResult:
    suite = bench.parse_suite(text, "suite.yaml")
    return bench.run_suite(suite, bench.RunSettings(output, **settings), listener)


def probe(names: str, more: str = "") -> str:
    CALLS.clear()
    return (
        f"suite_name: probes\n{more}\nbenchmarks:\n- generator: {__name__}.Probe\n"
        f"  options: {{name: {names}}}\n"
    )


def test_cases_take_turns_and_the_first_round_does_not_count(tmp_path: Path):
    result = run(probe("[a, b]", "num_repeats: 2"), tmp_path)
    assert CALLS == [("a", None), ("b", None), ("b", 0), ("a", 0), ("a", 1), ("b", 1)]
    for case in result.cases:
        assert [run.kind for run in case.runs] == ["warm-up", "counted", "counted"]
        assert case.by_operation()["nothing"]["0_basics/time_s"].n == 2
        assert case.by_operation()["checkpoint"]["5_inventory/files_count"].median == 1
        assert case.notes == {"durable": "yes"}


def test_sequential_and_without_warm_up(tmp_path: Path):
    run(probe("[a, b]", "num_repeats: 2\nwarmup_repeats: 0\norder: sequential"), tmp_path)
    assert CALLS == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_a_failure_is_recorded_and_the_rest_goes_on(tmp_path: Path):
    result = run(probe("[fails, a]", "num_repeats: 2"), tmp_path)
    bad, good = result.cases
    assert result.failed == [bad] and len(bad.errors) == 3 and bad.by_operation() == {}
    assert bad.errors[0] == "KeyError: 'planted'"
    assert 'raise KeyError("planted")' in (bad.runs[0].details or "")
    assert good.by_operation()["nothing"]["0_basics/time_s"].n == 2


def test_what_cannot_run_is_skipped_with_its_reason(tmp_path: Path):
    result = run(probe("[absent, a]", "num_repeats: 2"), tmp_path)
    assert [case.skipped for case in result.cases] == ["is not here", None]
    assert [name for name, _ in CALLS].count("absent") == 1
    assert result.failed == []


def test_ctrl_c_leaves_what_ran(tmp_path: Path):
    result = run(probe("[a, interrupts]", "num_repeats: 3\norder: sequential"), tmp_path)
    assert result.interrupted
    complete, cut = result.cases
    assert complete.by_operation()["nothing"]["0_basics/time_s"].n == 3
    assert cut.by_operation() == {} and len(cut.runs) == 1  # its warm-up


def test_directories_are_fresh_and_removed_on_request(tmp_path: Path):
    output, local = tmp_path / "out", tmp_path / "local"
    text = probe("a", "num_repeats: 2")
    (case,) = run(text, output, local_directory=local).cases
    kept = {f"{case.name}/{where}/file" for where in ("warmup_0", "repeat_0", "repeat_1")}
    for root in (output, local):
        assert {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()} == kept
    run(text, output)  # again into the same: each test_fn finds an empty directory
    assert os.listdir(tmp_path) == ["out", "local"] or set(os.listdir(tmp_path)) == {"out", "local"}
    run(text, output, local_directory=local, remove_repeated_dir=True)
    assert not any(p.is_file() for root in (output, local) for p in root.rglob("*"))


def test_only_some_cases(tmp_path: Path):
    run(probe("[abc, abd, x]"), tmp_path, only="*=ab*", repeats=1)
    assert {name for name, _ in CALLS} == {"abc", "abd"}
    with pytest.raises(bench.ConfigError, match="no case matches 'y'"):
        run(probe("[abc]"), tmp_path, only="y")


def test_the_listener_gets_each_run(tmp_path: Path):
    seen: list[tuple[str, str]] = []
    run(
        probe("[a, absent, fails]"),
        tmp_path,
        lambda case, run: seen.append((case.label, run.skipped or run.error or run.kind)),
    )
    assert seen == [
        ("name=a", "warm-up"),
        ("name=absent", "is not here"),
        ("name=fails", "KeyError: 'planted'"),
        ("name=fails", "KeyError: 'planted'"),
        ("name=a", "counted"),
    ]


DATA = """
suite_name: data
checkpoint_config:
  spec:
    w: {dtype: float64, shape: [8, 4], sharding: [data, null]}
    many: {dtype: bfloat16, shape: [3], count: 11}
    deep: {ints: {dtype: int8, shape: [2, 2]}, flags: {dtype: bool, shape: [5]}}
    n: int
    s: str
mesh_configs:
- {mesh_axes: [data, model], ici_parallelism: {data: 4, model: 2}}
- {mesh_axes: [data], ici_parallelism: {data: 3}}
- mesh_axes: [data, model]
  ici_parallelism: {model: 4}
  dcn_parallelism: {data: 2}
"""


def test_synthetic_data_on_the_meshes_that_fit(tmp_path: Path):
    result = run(f"{DATA}benchmarks: [{{generator: {__name__}.Looks}}]", tmp_path)
    fits, too_small, hybrid = result.cases
    assert fits.errors == [] and len(fits.runs) == 2
    assert too_small.skipped == "the mesh data=3 needs 3 devices, there are 8"
    assert hybrid.skipped is not None and "does not fit these devices" in hybrid.skipped
    first, again = SEEN
    assert first["n"] == 0 and first["s"] == "s"
    assert first["w"].dtype == np.float64  # the runner switches 64 bits on, as Orbax's does
    assert first["w"].sharding.spec == jax.sharding.PartitionSpec("data", None)
    assert first["w"].sharding.shard_shape((8, 4)) == (2, 4)
    assert sorted(first["many"]) == [f"{index:02}" for index in range(11)]
    assert first["deep"]["flags"].dtype == np.bool_ and first["deep"]["ints"].dtype == np.int8
    assert again["w"] is not first["w"] and (np.asarray(again["w"]) == np.asarray(first["w"])).all()
    assert not jax.config.jax_enable_x64  # pyright: ignore


SEEN: list[Any] = []


class Looks(bench.BenchmarksGenerator):
    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        SEEN.append(context.pytree)
        return bench.TestResult(metrics=bench.Metrics())


def medians(result: SuiteResult) -> list[set[str]]:
    assert [case.errors for case in result.cases] == [[]] * len(result.cases)
    return [set(case.by_operation()) for case in result.cases]


TOUR = """
suite_name: "ocdbt vs non-ocdbt"
num_repeats: 3
checkpoint_config:
  spec:
    params: {{dtype: bfloat16, shape: [512, 512], sharding: [fsdp]}}
mesh_config:
  mesh_axes: ["fsdp"]
  ici_parallelism: {{"fsdp": 8}}
benchmarks:
  - generator: "{generator}"
    options:
      use_ocdbt: [true, false]
"""


def test_recipe_a_the_guides_first_suite_with_our_generator(tmp_path: Path):
    result = run(TOUR.format(generator="ckpt_core.bench.generators.SaveLoad"), tmp_path)
    ours, other = result.cases
    assert set(ours.by_operation()) >= {"save", "save_blocking", "save_background", "load"}
    assert ours.by_operation()["save"]["0_basics/time_s"].n == 3
    assert other.skipped == "ckpt always writes OCDBT"


@pytest.mark.slow
def test_recipe_a_sweeps_both_for_orbax(tmp_path: Path):
    pytest.importorskip("orbax.checkpoint")
    text = TOUR.format(generator="SaveLoad") + "      library: orbax_v1\n"
    with_ocdbt, without = run(text, tmp_path).cases
    files = [case.by_operation()["checkpoint"]["5_inventory/files_count"].median
             for case in (with_ocdbt, without)]  # fmt: skip
    assert with_ocdbt.errors == without.errors == [] and files[0] != files[1]
    save = with_ocdbt.by_operation()["save"]
    assert save["2_save_breakdown/total_async_s"].n == 3  # Orbax's own events


@pytest.mark.slow
def test_recipe_b_a_class_that_a_user_wrote_for_orbax(tmp_path: Path):
    pytest.importorskip("orbax.checkpoint")
    text = f"""
suite_name: "my save/restore"
num_repeats: 3
checkpoint_config:
  spec: {{params: {{dtype: float32, shape: [256, 256], sharding: [data]}}}}
mesh_config:
  mesh_axes: ["data"]
  ici_parallelism: {{"data": 8}}
benchmarks:
  - generator: "{__name__}.SaveRestoreBenchmark"
    options: {{use_ocdbt: [true, false]}}
"""
    assert medians(run(text, tmp_path)) == [{"save", "load", "checkpoint"}] * 2


def test_recipe_c_a_real_checkpoint_onto_a_wanted_sharding(tmp_path: Path):
    saved = {"layer": {"w": jax.numpy.arange(64.0).reshape(8, 8), "b": jax.numpy.ones(8)}}
    ckpt.save(tmp_path / "real", saved)
    wanted = {
        f"layer.{name}": {
            "shape": list(leaf.shape),
            "dtype": "float32",
            "sharding": {"mesh": {"shape": [2, 4], "axes": ["a", "b"]}, "spec": spec},
        }
        for (name, leaf), spec in zip(saved["layer"].items(), ([["b", "a"]], [None]), strict=True)
    }
    sharding = tmp_path / "abstract_state.json"
    sharding.write_text(json.dumps(wanted))
    text = f"""
suite_name: "resharding"
num_repeats: 2
mesh_config:
  mesh_axes: ["data", "fsdp", "tensor"]
  ici_parallelism: {{"data": 1, "fsdp": 8, "tensor": 1}}
benchmarks:
  - generator: "ckpt_core.bench.generators.Resharding"
    options:
      reference_checkpoint_path: "{tmp_path / "real"}"
      reference_sharding_path: "{sharding}"
"""
    assert medians(run(text, tmp_path / "out")) == [{"load"}]
    config = (
        f"checkpoint_config: {{path: '{tmp_path / 'real'}', sharding_config_path: '{sharding}'}}"
    )
    SEEN.clear()
    run(f"suite_name: s\n{config}\nbenchmarks: [{{generator: {__name__}.Looks}}]", tmp_path / "out")
    loaded = SEEN[0]["layer"]["w"]
    assert loaded.sharding.spec == jax.sharding.PartitionSpec(("b", "a"))
    assert (np.asarray(loaded) == np.asarray(saved["layer"]["w"])).all()
    wanted["layer.w"]["shape"] = [4, 8]
    del wanted["layer.b"]
    sharding.write_text(json.dumps(wanted))
    (case,) = run(text, tmp_path / "out").cases
    assert "lacks the leaf 'layer.b'" in case.errors[0]
    assert "layer.w: wants float32[4, 8], saved is float32[8, 8]" in case.errors[0]


SMALL = """
suite_name: small
checkpoint_config:
  spec:
    a: {dtype: float32, shape: [64, 64], sharding: [data, null], count: 3}
    b: {dtype: bfloat16, shape: [33]}
mesh_config: {mesh_axes: [data], ici_parallelism: {data: 8}}
benchmarks:
- generator: GENERATOR
  options: OPTIONS
"""


@pytest.mark.parametrize(
    ("generator", "options", "operations"),
    [
        ("SaveLoad", "{async_enabled: false, page_cache: cold}", {"save", "load", "checkpoint"}),
        (
            "SaveLoad",
            "{use_compression: true, chunk_byte_size: 4096, save_concurrent_gb: 1,"
            " metric_tracemalloc_enabled: true, use_zarr3: true}",
            {"save", "save_blocking", "save_background", "load", "checkpoint"},
        ),
        ("Resharding", "{}", {"load", "checkpoint"}),
        ("LoadAndBroadcast", "{}", {"load", "checkpoint"}),
        (
            "ReplicaParallelSave",
            "{num_savings: 2, async_enabled: false}",
            {"save", "checkpoint"},
        ),
        (
            "CheckpointerLoop",
            "{train_steps: 5, max_to_keep: 2, trained: a}",
            {"train_steps", "step", "save", "wait_until_finished", "restore", "checkpoint"},
        ),
        ("PartialLoad", "{}", {"load_part", "load", "checkpoint"}),
        (
            "ManySmallLeaves",
            "{leaves: 30, leaf_bytes: 64, async_enabled: false}",
            {"save", "load", "checkpoint"},
        ),
    ],
)
def test_our_generators(tmp_path: Path, generator: str, options: str, operations: set[str]):
    text = SMALL.replace("GENERATOR", generator).replace("OPTIONS", options)
    result = run(text, tmp_path)
    assert medians(result) == [operations]
    metrics = result.cases[0].by_operation()
    if generator == "CheckpointerLoop":
        assert metrics["save"]["0_basics/time_s"].n == 5
        assert result.cases[0].notes["steps kept"] == "2"
    if generator == "PartialLoad":
        part, whole = (
            metrics[name]["4_throughput/gb_per_s"].median * metrics[name]["0_basics/time_s"].median
            for name in ("load_part", "load")
        )
        assert part < whole / 2
    if "tracemalloc" in options:
        assert "7_memory/tracemalloc_peak_diff_mb" in metrics["save"]
        assert metrics["checkpoint"]["5_inventory/size_mb"].median > 0


def test_the_loop_may_save_to_a_local_directory(tmp_path: Path):
    text = SMALL.replace("GENERATOR", "CheckpointerLoop")
    text = text.replace("OPTIONS", "{use_local_directory: true}")
    result = run(text, tmp_path / "out", local_directory=tmp_path / "local")
    assert medians(result) == [{"train_steps", "step", "save", "wait_until_finished", "restore"}]
    assert list((tmp_path / "local").rglob("ckpt.json"))
    (case,) = run(text, tmp_path / "out").cases
    assert case.skipped == "use_local_directory needs --local-directory"


def test_what_ckpt_cannot_do_is_said_and_not_measured_as_if_it_did(tmp_path: Path):
    text = SMALL.replace("GENERATOR", "SaveLoad")
    text = text.replace("OPTIONS", "{enable_replica_parallel_separate_folder: true}")
    (case,) = run(text, tmp_path).cases
    assert case.skipped == "ckpt cannot write each replica to a folder of its own"


def test_traces_are_taken_once_and_do_not_count(tmp_path: Path):
    text = SMALL.replace("GENERATOR", "SaveLoad").replace(
        "OPTIONS", "{enable_trace: true, async_enabled: false}"
    )
    (case,) = run(text + "num_repeats: 2\nwarmup_repeats: 0\n", tmp_path).cases
    assert [run.kind for run in case.runs] == ["traced", "counted"]
    traced = sorted(p.name for p in (tmp_path / "tensorboard").iterdir())
    assert traced == [f"{case.name}__load", f"{case.name}__save"]
    assert list(tmp_path.rglob("*.xplane.pb"))


_SLOW = ("torch_dcp", "orbax_v0_manager", "orbax_v1_uncompressed")
PEERS = [
    pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ())
    for name in NAMES
    if name != "ckpt"
]


@pytest.mark.parametrize("name", PEERS)
def test_peers_save_and_load_the_same_numbers(tmp_path: Path, name: str):
    if name == "torch_dcp" and "torchax" in sys.modules:
        pytest.skip("torchax, which another test of this process imported, is torch's device now")
    text = """
suite_name: peers
warmup_repeats: 0
checkpoint_config:
  spec:
    a: {dtype: float32, shape: [64, 64], count: 3}
    b: {dtype: bfloat16, shape: [33]}
    c: {dtype: int32, shape: [2, 3]}
    d: {dtype: bool, shape: [5]}
    e: {dtype: float32, shape: []}
benchmarks:
- generator: SaveLoad
  options: {library: NAME, async_enabled: [false, true], durable: [null, true]}
""".replace("NAME", name)
    result = run(text, tmp_path)
    skipped = {case.skipped for case in result.cases if case.skipped}
    if any("not installed" in reason for reason in skipped):
        pytest.skip(f"{name} is not installed")
    ran = [case for case in result.cases if case.skipped is None]
    assert len(ran) == (4 if library(name).in_background else 2)
    assert [case.errors for case in ran] == [[]] * len(ran)
    notes = {case.notes["durable"] for case in ran}
    assert notes <= {"yes", "yes (fsync added)", "data files", "no"} and "no" not in notes - {
        library(name).default_durability
    }
    assert skipped <= {f"{name} saves in the foreground only"}


class _Liar(Library):
    """Loads almost what was saved."""

    def save(self, path: Path, state: Any) -> None:
        path.mkdir()

    def load(self, path: Path, like: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), like)


def test_a_library_that_loads_something_else_fails(tmp_path: Path, monkeypatch):
    from ckpt_core.bench.generators import _save_load

    monkeypatch.setattr(_save_load, "make_library", lambda *_: _Liar(SaveLoadOptions()))
    text = SMALL.replace("GENERATOR", "SaveLoad").replace("OPTIONS", "{}")
    (case,) = run(text, tmp_path).cases
    assert case.errors[0] == ("WrongData: the loaded leaf 'a.0' is not the one that was saved")


def test_equality_is_bit_for_bit():
    one = {"x": np.float32([np.nan, 0.0])}
    check_equal(one, {"x": np.float32([np.nan, 0.0])})
    for other in (
        {"x": np.float32([np.nan, -0.0])},
        {"x": np.float64([np.nan, 0.0])},
        {"x": np.float32([[np.nan, 0.0]])},
        {},
    ):
        with pytest.raises(WrongData):
            check_equal(one, other)


def test_libraries_say_what_they_cannot(monkeypatch):
    with pytest.raises(ValueError, match="did you mean 'safetensors'"):
        library("safetensor")
    with pytest.raises(Skipped, match="torch_save saves in the foreground only"):
        make_library(SaveLoadOptions(library="torch_save", async_enabled=True))
    with pytest.raises(Skipped, match="orbax_v1 offers no save without fsync"):
        make_library(SaveLoadOptions(library="orbax_v1", durable=False))
    with pytest.raises(Skipped, match="numpy_savez has no setting for compression"):
        make_library(SaveLoadOptions(library="numpy_savez", use_compression=True))
    monkeypatch.setattr(library("equinox"), "modules", ("no_such_module",))
    with pytest.raises(Skipped, match="equinox is not installed: no module 'no_such_module'"):
        make_library(SaveLoadOptions(library="equinox"))


def test_settling_collects_nothing_inside():
    import gc

    with bench.settle():
        assert not gc.isenabled()
    assert gc.isenabled()
