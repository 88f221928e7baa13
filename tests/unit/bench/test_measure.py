"""`metrics.measure`: what it records, that blocks nest, and the statistics of a few repeats."""

from __future__ import annotations

import math
import mmap
import time
import tracemalloc
from pathlib import Path

import jax
import pytest

import ckpt_core as ckpt
from ckpt_core import bench
from ckpt_core.bench import _stats
from ckpt_core.bench._results import over_hosts
from ckpt_core.bench._settle import drop_page_cache, fsync_all, inventory
from ckpt_core.bench._tags import tag_of


def test_time_and_throughput():
    metrics = bench.Metrics()
    with metrics.measure("nap", ["time"], nbytes=10**6):
        time.sleep(0.02)
    (secs,) = metrics.values["nap"]["0_basics/time_s"]
    assert 0.02 <= secs < 5
    assert metrics.values["nap"]["4_throughput/gb_per_s"] == [pytest.approx(1e-3 / secs)]


def pages(size_bytes: int) -> mmap.mmap:
    """Fresh pages of the system's: the heap may have some that other tests have left."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"1" * size_bytes)
    return memory


def test_host_memory_with_its_peak_and_of_nested_blocks():
    metrics = bench.Metrics()
    mib = 1 << 20
    with metrics.measure("outer", ["rss"]):
        pages(64 * mib).close()
        with metrics.measure("inner", ["rss"]):
            kept = pages(16 * mib)
    outer, inner = metrics.values["outer"], metrics.values["inner"]
    assert inner["0_basics/host_rss_diff_mb"][0] > 15
    assert outer["0_basics/host_rss_diff_mb"][0] < 40
    if "0_basics/host_rss_peak_mb" not in outer:
        pytest.skip("this kernel does not reset peaks")
    assert 15 < inner["0_basics/host_rss_peak_mb"][0] < 40
    # the peak was before the inner block began, and began to count anew
    assert outer["0_basics/host_rss_peak_mb"][0] > 60
    kept.close()


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
    assert one["6_tensorstore/kvstore_file_bytes_written_diff"][0] >= 256 * 256 * 4
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
    inner, outer = metrics.values["inner"], metrics.values["outer"]
    assert inner["2_save_breakdown/directory_creation_s"] == [0.75]
    assert inner["8_jax/cache_hit_rate"] == [0.5]
    assert outer["2_save_breakdown/directory_creation_s"] == [0.75]
    assert outer["4_throughput/save_total_gbps"] == [3.0]
    assert outer["2_save_breakdown/total_s"] == [1.0]
    assert outer["9_other/jax_orbax_some_new_secs"] == [2.0]
    assert "4_throughput/save_total_gbps" not in inner
    assert tag_of("/jax/pjit/anything") is None


def test_arrays_that_stay_alive_are_counted():
    metrics = bench.Metrics()
    with metrics.measure("make", ["device_memory"]):
        kept = [jax.numpy.ones(3) + i for i in range(5)]
        jax.block_until_ready(kept)
    assert metrics.values["make"]["7_memory/jax_live_arrays_count_delta"][0] >= 5


def test_tracemalloc_is_opt_in_and_switched_off_again():
    metrics = bench.Metrics()
    with metrics.measure("allocate", ["tracemalloc"]):
        passing = bytearray(5_000_000)
        del passing
    assert metrics.values["allocate"]["7_memory/tracemalloc_peak_diff_mb"][0] >= 5
    assert not tracemalloc.is_tracing()
    with metrics.measure("plain"):
        pass
    assert "7_memory/tracemalloc_peak_diff_mb" not in metrics.values["plain"]


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


def test_a_name_measured_again_has_several_values():
    metrics = bench.Metrics()
    for _ in range(3):
        with metrics.measure("step", ["time"]):
            pass
    assert len(metrics.values["step"]["0_basics/time_s"]) == 3


def test_statistics():
    summary = _stats.summarize([1.0, 2.0, 6.0])
    assert (summary.n, summary.min, summary.median, summary.max) == (3, 1.0, 2.0, 6.0)
    assert summary.mean == 3.0 and summary.stddev == pytest.approx(math.sqrt(7))
    assert summary.ci95 == pytest.approx(4.302653 * math.sqrt(7) / math.sqrt(3))
    alone = _stats.summarize([2.0])
    assert alone.stddev is None and alone.ci95 is None


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 1.1, 0.9], [2.0, 2.1, 1.9], True),
        ([1.0, 2.0, 3.0], [1.5, 2.5, 3.5], False),
        ([1.0], [2.0], True),  # nothing is known of the noise
        ([1.0, 1.0], [1.0, 1.0], False),
        ([1.0, 1.0], [1.1, 1.1], True),
    ],
)
def test_noise(one: list[float], other: list[float], expected: bool):
    assert _stats.differ(one, other) is expected


def test_the_t_quantiles_fall_towards_those_of_the_normal_distribution():
    values = [_stats.t95(degrees) for degrees in range(1, 200)]
    assert values == sorted(values, reverse=True) and values[0] > 12 and 1.96 < values[-1] < 1.98


def test_many_hosts_are_one_by_the_slowest():
    host = {"save": {"0_basics/time_s": [1.0], "4_throughput/gb_per_s": [4.0]}}
    slow = {
        "save": {
            "0_basics/time_s": [3.0],
            "4_throughput/gb_per_s": [2.0],
            "6_tensorstore/kvstore_file_write_diff": [5.0],
        }
    }
    assert over_hosts([host, slow, slow]) == {
        "save": {
            "0_basics/time_s": [3.0],
            "4_throughput/gb_per_s": [2.0],
            "6_tensorstore/kvstore_file_write_diff": [10.0],
        }
    }


def test_files_are_counted_synced_and_dropped_from_the_cache(tmp_path: Path):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"123")
    (tmp_path / "other").write_bytes(b"4")
    fsync_all(tmp_path / "a")
    drop_page_cache(tmp_path)
    drop_page_cache(tmp_path / "other")
    assert inventory(tmp_path) == (4, 2)
    assert (folder / "file").read_bytes() == b"123"


def test_device_memory_where_the_backend_reports_it(monkeypatch):
    gib = 1 << 30
    stats = [{"bytes_in_use": gib, "peak_bytes_in_use": 2 * gib}, {"bytes_in_use": 0}]

    class Device:
        def __init__(self, index: int) -> None:
            self._index = index

        def memory_stats(self) -> dict[str, int]:
            return dict(stats[self._index])

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(0), Device(1)])
    metrics = bench.Metrics()
    with metrics.measure("fill", ["device_memory"]):
        stats[1] = {"bytes_in_use": 3 * gib, "peak_bytes_in_use": 4 * gib}
    assert metrics.values["fill"]["7_memory/device_diff_gb"] == [2.0]
    assert metrics.values["fill"]["7_memory/device_hbm_peak_diff_gb"] == [2.0]
    monkeypatch.undo()
    with metrics.measure("cpu", ["device_memory"]):
        pass
    assert set(metrics.values["cpu"]) == {"7_memory/jax_live_arrays_count_delta"}
