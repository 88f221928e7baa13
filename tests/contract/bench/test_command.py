"""``ckpt bench run``: what it writes, in one process and in several, and how it exits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt_core.bench.libraries import LIBRARIES
from tests.contract.bench.test_run import no_sync  # noqa: F401 (fixture)
from tests.support.command_line import LOADED, make_call, start  # noqa: F401 (fixture)

pytest.importorskip("typer")


SUITE = """
suite_name: tiny
num_repeats: 2
checkpoint_config: {spec: {w: {dtype: float32, shape: [64, 64]}}}
benchmarks:
- generator: SaveLoad
  options: {library: [ckpt, LIBRARY], async_enabled: false}
"""


@pytest.fixture
def suite(tmp_path: Path):
    def write(text: str = SUITE.replace("LIBRARY", "floor")) -> Path:
        path = tmp_path / "suite.yaml"
        path.write_text(text)
        return path

    return write


def test_bench_run_writes_everything(call, suite, tmp_path: Path):
    out = tmp_path / "out"
    code, text, err = call(
        "bench", "run", suite(), "-o", out, "--baseline-capture", tmp_path / "base"
    )
    assert code == 0, err
    assert "floor" in text and "save" in text and "counted 1: done" in err
    (baseline,) = (tmp_path / "base").iterdir()
    assert list((out / "tensorboard").rglob("events.out.tfevents.*"))
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [r["record"] for r in records] == ["environment", *["run"] * 6, *["case"] * 2, "end"]

    again = ("bench", "run", suite(), "-o", tmp_path / "again", "--repeats", 3, "--json")
    code, text, err = call(*again, "--baseline", baseline, "--threshold", "1000")
    assert code == 0 and json.loads(text.splitlines()[-1])["record"] == "end" and err == ""


def test_ctrl_c_writes_what_there_is_and_exits_with_130(call, suite, tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LIBRARIES["floor"], "load", interrupt)
    text = SUITE.replace("LIBRARY", "floor") + "order: sequential\n"
    code, out, _ = call("bench", "run", suite(text), "-o", tmp_path / "out")
    assert code == 130 and "interrupted" in out
    records = (tmp_path / "out/results.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["interrupted"] is True
    assert sum(json.loads(line)["record"] == "run" for line in records) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("suite_name: s\nbenchmarks: [{generator: SaveLod}]", "SaveLod"),
        ("suite_nam: s", "did you mean 'suite_name'?"),
        (SUITE + "baseline_path: /nowhere/at/all.jsonl\n", "no such file"),
    ],
)
def test_a_wrong_suite_is_one_message_and_exits_with_2(call, suite, tmp_path, text, expected):
    code, out, err = call("bench", "run", suite(text), "-o", tmp_path / "out")
    assert code == 2 and out == "" and expected in err


def test_steady_memory_starts_the_process_anew_and_hlo_is_dumped(suite, tmp_path: Path):
    text = f"steady_memory: true\n{SUITE.replace('[ckpt, LIBRARY]', 'ckpt')}".replace(
        "SaveLoad", "CheckpointerLoop"
    )
    done = start("bench", "run", suite(text), "-o", tmp_path / "out", "--enable-hlo-dump")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out/hlo_dump").glob("*.hlo.pb"))


SHARDED = """
suite_name: sharded
warmup_repeats: 0
num_repeats: 2
remove_repeated_dir: true
checkpoint_config:
  spec:
    w: {dtype: float32, shape: [64, 64], sharding: [data]}
    r: {dtype: int32, shape: [5]}
mesh_configs:
- {mesh_axes: [data], ici_parallelism: {data: 2}}
- {mesh_axes: [data], ici_parallelism: {data: 4}}
benchmarks:
- generator: SaveLoad
  options: {library: [ckpt, numpy_savez], async_enabled: null}
"""


def test_the_same_suite_in_several_processes(suite, tmp_path: Path):
    count = 2
    done = start(
        "bench", "run", suite(SHARDED), "-o", tmp_path / "out", "--processes", count, "--json",
        XLA_FLAGS="--xla_force_host_platform_device_count=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert records[0]["processes"] == records[0]["devices"] == count
    fits = [r for r in records if r["record"] == "case" and f"data={count}" in r["group"]]
    other = [r for r in records if r["record"] == "case" and f"data={6 - count}" in r["group"]]
    assert [case["skipped"] for case in fits] == [None, "numpy_savez runs in one process only"]
    assert all("devices" in case["skipped"] for case in other)
    runs = [r for r in records if r["record"] == "run" and not r["skipped"]]
    assert len(runs) == 2
    for run in runs:
        assert run["error"] is None and len(run["hosts"]) == count
        slowest = max(host["save"]["0_basics/time_s"][0] for host in run["hosts"])
        assert run["values"]["save"]["0_basics/time_s"] == [slowest]
        written = "5_inventory/save_total_gb"
        each = [host["save"][written][0] for host in run["hosts"]]
        assert all(each) and run["values"]["save"][written] == [max(each)]
    hosts = {path.parent.name for path in (tmp_path / "out/tensorboard").rglob("events.*")}
    assert {f"host_{index}" for index in range(count)} <= hosts
