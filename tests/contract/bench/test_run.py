"""The run loop, its generators and what `metrics.measure` records: what runs, how often, and what becomes of a failure."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import bench
from ckpt_core.bench.libraries import LIBRARIES


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


def run(text: str, output: Path, listener: Any = None, **settings: Any) -> Any:
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
    assert not jax.config.jax_enable_x64


SEEN: list[Any] = []


class Looks(bench.BenchmarksGenerator):
    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        SEEN.append(context.pytree)
        return bench.TestResult(metrics=bench.Metrics())


def medians(result: Any) -> list[set[str]]:
    assert [case.errors for case in result.cases] == [[]] * len(result.cases)
    return [set(case.by_operation()) for case in result.cases]


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
        ("SaveLoad", "{}", {"save", "save_blocking", "save_background", "load", "checkpoint"}),
        ("Resharding", "{}", {"load", "checkpoint"}),
        ("LoadAndBroadcast", "{}", {"load", "checkpoint"}),
        (
            "CheckpointerLoop",
            "{train_steps: 5, max_to_keep: 2, trained: a}",
            {"train_steps", "step", "save", "wait_until_finished", "restore", "checkpoint"},
        ),
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
    assert metrics["checkpoint"]["5_inventory/size_mb"].median > 0


def test_traces_are_taken_once_and_do_not_count(tmp_path: Path):
    text = SMALL.replace("GENERATOR", "SaveLoad").replace(
        "OPTIONS", "{enable_trace: true, async_enabled: false}"
    )
    (case,) = run(text + "num_repeats: 2\nwarmup_repeats: 0\n", tmp_path).cases
    assert [run.kind for run in case.runs] == ["traced", "counted"]
    traced = sorted(p.name for p in (tmp_path / "tensorboard").iterdir())
    assert traced == [f"{case.name}__load", f"{case.name}__save"]
    assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name != "ckpt"])
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
    assert len(ran) == (4 if LIBRARIES[name].in_background else 2)
    assert [case.errors for case in ran] == [[]] * len(ran)
    notes = {case.notes["durable"] for case in ran}
    assert notes <= {"yes", "yes (fsync added)", "data files", "no"} and "no" not in notes - {
        LIBRARIES[name].default_durability
    }
    assert skipped <= {f"{name} saves in the foreground only"}


def test_a_library_that_loads_something_else_fails(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(LIBRARIES["floor"], "load", lambda *_: np.zeros(36, np.uint8))
    text = (
        "suite_name: s\ncheckpoint_config: {spec: {a: {dtype: float32, shape: [9]}}}\n"
        "benchmarks: [{generator: SaveLoad, options: {library: floor, async_enabled: false}}]"
    )
    (case,) = run(text, tmp_path).cases
    assert case.errors[0] == ("WrongData: the loaded leaf 'a' is not the one that was saved")


def test_settling_collects_nothing_inside():
    import gc

    with bench.settle():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_time_and_throughput():
    metrics = bench.Metrics()
    with metrics.measure("nap", ["time"], nbytes=10**6):
        time.sleep(0.02)
    (secs,) = metrics.values["nap"]["0_basics/time_s"]
    assert 0.02 <= secs < 5
    assert metrics.values["nap"]["4_throughput/gb_per_s"] == [pytest.approx(1e-3 / secs)]


def test_a_save_of_ckpt_reports_what_it_was(tmp_path: Path):
    metrics = bench.Metrics()
    with metrics.measure("both"):
        for name in ("one", "two"):
            with metrics.measure(name):
                ckpt.save(tmp_path / name, {"w": jax.numpy.ones((256, 256))})
    one, both = metrics.values["one"], metrics.values["both"]
    assert one["5_inventory/save_total_gb"] == [pytest.approx(256 * 256 * 4 / 2**30)]
    assert both["5_inventory/save_total_gb"] == [pytest.approx(2 * 256 * 256 * 4 / 2**30)]
    blocking, background, total = (
        one[f"2_save_breakdown/{name}_s"][0] for name in ("blocking", "background", "total")
    )
    assert 0 < blocking <= total < one["0_basics/time_s"][0]
    assert background == pytest.approx(total - blocking)
    with metrics.measure("load"):
        ckpt.load(tmp_path / "one")
    assert metrics.values["load"]["5_inventory/load_total_gb"] == one["5_inventory/save_total_gb"]
    assert metrics.values["load"]["3_load_breakdown/total_s"][0] > 0
    assert set(one) >= {"0_basics/time_s", "7_memory/jax_live_arrays_count_delta"}
    assert list(metrics.values) == ["both", "one", "two", "load"]


def test_events_of_jax_are_summed_and_counted_not_overwritten():
    metrics = bench.Metrics()
    with metrics.measure("outer"):
        with metrics.measure("inner"):
            for secs in (0.25, 0.5):
                jax.monitoring.record_event_duration_secs(
                    "/jax/orbax/write/directory_creation_secs", secs
                )
            jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
            jax.monitoring.record_event("/jax/compilation_cache/cache_misses")
        jax.monitoring.record_scalar("/jax/orbax/write/gbytes_per_sec", 3.0)
        jax.monitoring.record_event_duration_secs("/ckpt/committed", 1.0)
        jax.monitoring.record_event_duration_secs("/jax/orbax/some/new_secs", 2.0)
        jax.monitoring.record_event_duration_secs("/jax/pjit/anything", 2.0)
    inner, outer = metrics.values["inner"], metrics.values["outer"]
    assert inner["2_save_breakdown/directory_creation_s"] == [0.75]
    assert inner["8_jax/cache_hit_rate"] == [0.5]
    assert outer["2_save_breakdown/directory_creation_s"] == [0.75]
    assert outer["4_throughput/save_total_gbps"] == [3.0]
    assert outer["2_save_breakdown/total_s"] == [1.0]
    assert outer["9_other/jax_orbax_some_new_secs"] == [2.0]
    assert "4_throughput/save_total_gbps" not in inner
    assert not any("pjit" in name for name in outer)


def test_a_block_that_raises_records_nothing_and_harms_no_other():
    metrics = bench.Metrics()
    with metrics.measure("outer"):
        with pytest.raises(KeyError), metrics.measure("inner"):
            raise KeyError("x")
        jax.monitoring.record_event_duration_secs("/ckpt/restored", 1.0)
    assert metrics.values["inner"] == {}
    assert metrics.values["outer"]["3_load_breakdown/total_s"] == [1.0]


def test_a_misspelt_metric_is_refused():
    with (
        pytest.raises(ValueError, match=r"no metric 'tme' .did you mean 'time'"),
        bench.Metrics().measure("x", ["tme"]),
    ):
        pass
