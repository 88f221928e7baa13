"""`metrics.measure`: what it records, and that blocks nest."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import pytest

import ckpt_core as ckpt
from ckpt_core import bench


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
