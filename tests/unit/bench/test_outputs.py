"""What a run leaves behind: JSON lines, TensorBoard, the table, baselines; ``test_page.py`` has the page."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ckpt_core import bench
from ckpt_core._directory.paths import file_system_of
from ckpt_core.bench import _collectors
from ckpt_core.bench._baseline import capture_baseline, compare
from ckpt_core.bench._environment import warnings_about
from ckpt_core.bench._jsonl import JsonLines
from ckpt_core.bench._markdown import markdown
from ckpt_core.bench._page import sections_of
from ckpt_core.bench._results import SuiteResult
from ckpt_core.bench._rows import beside, number, ratio
from ckpt_core.bench._table import print_comparison, print_result


class Clock:
    """On it alone pass naps, and some microseconds each time that somebody looks."""

    now, nap_secs = 0.0, 0.005

    def perf_counter(self) -> float:
        self.now += 1e-6 * (1 + int(self.now * 1e6) % 3)
        return self.now


CLOCK = Clock()


@dataclass(frozen=True)
class NapOptions(bench.BenchmarkOptions):
    size: int | list[int] = 1


@bench.benchmark_options(NapOptions)
class Nap(bench.BenchmarksGenerator):
    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        metrics = bench.Metrics()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_collectors, "time", CLOCK)
            with metrics.measure("save", ["time", "rss"], nbytes=10**6):
                CLOCK.now += CLOCK.nap_secs * context.options.size
            with metrics.measure("load", ["time"]):
                pass
        return bench.TestResult(metrics=metrics, notes={"durable": "yes"})


class Fails(bench.BenchmarksGenerator):
    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        raise ValueError("<planted> & [bold]")


TEXT = f"""
suite_name: "naps <1>"
num_repeats: 4
benchmarks:
- generator: {__name__}.Nap
  options: {{size: [1, 2, 4]}}
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> SuiteResult:
    output = tmp_path_factory.mktemp("naps")
    suite = bench.parse_suite(TEXT + f"- generator: {__name__}.Fails\n")
    return bench.run_suite(suite, bench.RunSettings(output))


def rerun(output: Path) -> SuiteResult:
    return bench.run_suite(bench.parse_suite(TEXT), bench.RunSettings(output))


def reported(result: SuiteResult, function: Any, *arguments: Any) -> str:
    out = io.StringIO()
    function(*arguments or (result,), Console(file=out, width=160))
    return out.getvalue()


def test_the_table(result: SuiteResult):
    text = reported(result, print_result)
    assert "naps <1>" in text
    rows = [line for line in text.splitlines() if "size=" in line]
    assert len(rows) == 6 and all("yes" in row for row in rows[:3])
    assert "times slower than size=1" in rows[1] and "GB/s" in text
    assert "ValueError: <planted> & [bold]" in text  # not taken for markup


def test_numbers_have_three_digits_and_no_exponent():
    values = (0, 0.000123456, 0.00123456, 0.0123456, 0.123456, 1.23456, 12.3456, 123.456, 123456)
    words = ["0", "0.000123", "0.00123", "0.0123", "0.123", "1.23", "12.3", "123", "123456"]
    assert [number(value) for value in values] == words
    assert number(-0.5) == "-0.500"


def test_json_lines_are_there_as_runs_end(result: SuiteResult, tmp_path: Path):
    lines = JsonLines(tmp_path, result.suite_name, result.environment)
    case = result.cases[0]
    lines.run(case, case.runs[1])
    file = tmp_path / "results.jsonl"
    so_far = [json.loads(line) for line in file.read_text().splitlines()]
    assert [entry["record"] for entry in so_far] == ["environment", "run"]
    assert so_far[0]["backend"] == "cpu" and so_far[0]["versions"]["jax"]
    assert so_far[1]["values"]["save"]["4_throughput/gb_per_s"][0] > 0
    assert so_far[1]["kind"] == "counted" and so_far[1]["case"] == case.name
    lines.finish(result)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    cases = [entry for entry in records if entry["record"] == "case"]
    assert len(cases) == 4 and len(cases[3]["errors"]) == 5
    statistics = cases[1]["statistics"]["save"]["0_basics/time_s"]
    assert statistics["n"] == 4 and statistics["min"] >= 0.01 and statistics["ci95"] > 0
    assert records[-1] == {"record": "end", "interrupted": False, "failed": 1}


def test_tensorboard_reads_what_is_written(result: SuiteResult, tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    from ckpt_core.bench._tensorboard import write_tensorboard

    root = write_tensorboard(tmp_path, result)
    case = result.cases[2]
    host = EventAccumulator(str(root / case.name / "host_0"))
    host.Reload()
    events = host.Scalars("save_0_basics/time_s")
    assert [event.step for event in events] == [0, 1, 2, 3]
    expected = [run.values["save"]["0_basics/time_s"][0] for run in case.runs[1:]]
    assert [event.value for event in events] == pytest.approx(expected)
    summary = EventAccumulator(str(root / case.name / "__summary__"))
    summary.Reload()
    tags = summary.Tags()
    assert "save_0_basics/time_s_median" in tags["scalars"]
    assert {"at_a_glance/save", "at_a_glance/load", "configuration"} <= set(tags["tensors"])
    card = summary.Tensors("at_a_glance/save")[0].tensor_proto.string_val[0].decode()
    assert "| 0_basics/time_s |" in card
    content = summary.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert start.hparams["size"].number_value == 4
    suite = EventAccumulator(str(root / "__suite__"))
    suite.Reload()
    assert suite.Tags()["tensors"] == ["suite"]


def test_the_environment_warns_of_what_spoils_figures():
    good = {"file_system": "ext4", "load_average": 0.1, "cpus": 4}
    assert warnings_about(good) == []
    assert "RAM disk" in warnings_about(good | {"file_system": "tmpfs"})[0]
    assert "busy" in warnings_about(good | {"load_average": 3.0})[0]
    assert "page cache" in warnings_about(good | {"drops_page_cache": False})[0]


@pytest.mark.linux("/proc says which file systems there are")
def test_the_file_system_of_the_output_is_known(tmp_path: Path):
    assert file_system_of("/proc") == "proc" and file_system_of(str(tmp_path))


# ------------------------------------------------------------------------------------ baselines


def test_recipe_d_capture_then_compare(result: SuiteResult, tmp_path: Path):
    path = capture_baseline(result, tmp_path)
    sha = result.environment["git_sha"]
    assert path.name == f"{sha or 'unknown'}.json"
    content = json.loads(path.read_text())
    assert content["schema_version"] == 1 and len(content["benchmarks"]) == 3
    same = compare(result, path, 0.1)
    assert same.worse == () and {delta.change for delta in same.deltas} == {0.0}


def test_outside_of_git_the_baseline_is_unknown(result: SuiteResult, tmp_path: Path):
    nowhere = dataclasses.replace(result, environment={**result.environment, "git_sha": None})
    assert capture_baseline(nowhere, tmp_path).name == "unknown.json"


def test_a_planted_slowdown_is_caught_and_noise_is_not(result, tmp_path, monkeypatch):
    path = capture_baseline(result, tmp_path / "base")
    monkeypatch.setattr(CLOCK, "nap_secs", 0.08)
    comparison = compare(rerun(tmp_path / "slow"), path, 0.5)
    worse = {(delta.label, delta.metric) for delta in comparison.worse}
    labels = [f"Nap: size={size}" for size in (1, 2, 4)]
    assert {(label, "save_0_basics/time_s") for label in labels} <= worse
    assert (labels[2], "save_4_throughput/gb_per_s") in worse
    assert not any(metric.startswith("save_0_basics/host_rss") for _, metric in worse)
    text = reported(result, print_comparison, comparison)
    assert "WORSE" in text and "metrics are worse" in text
    (verdict,) = (one for one in sections_of(result, comparison) if "baseline" in one["name"])
    assert verdict["blocks"][0]["text"].startswith(f"{len(worse)} metrics are worse by more than")
    assert verdict["blocks"][0]["kind"] == "note warn" and verdict["blocks"][1]["open"]


def test_faster_is_not_worse(result: SuiteResult, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(CLOCK, "nap_secs", 0.08)
    slow = rerun(tmp_path / "slow")
    path = capture_baseline(slow, tmp_path)
    comparison = compare(result, path, 0.1)
    changes = {d.metric: d.change for d in comparison.deltas if d.label.endswith("size=4")}
    assert changes["save_0_basics/time_s"] < -0.5 and changes["save_4_throughput/gb_per_s"] < 0
    assert not any(delta.metric.startswith("save_") for delta in comparison.worse)


def test_a_single_repeat_knows_no_noise_so_the_threshold_decides(result, tmp_path):
    content = json.loads(capture_baseline(result, tmp_path).read_text())
    for entry in content["benchmarks"].values():
        for tag, summary in entry["metrics"].items():
            if tag == "save_0_basics/time_s":
                summary["median"] /= 2
                summary["values"] = [summary["median"]]
    file = tmp_path / "halved.json"
    file.write_text(json.dumps(content))
    assert len(compare(result, file, 0.5).worse) == 3
    assert compare(result, file, 2.0).worse == ()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such baseline"),
        ("{", "is no baseline"),
        ("{}", "is no baseline"),
        ('{"schema_version": 9, "environment": {}, "benchmarks": {}}', "of version 9"),
        (
            '{"schema_version": 1, "environment": {"backend": "tpu"}, "benchmarks": {}}',
            "measured with backend tpu, this is cpu",
        ),
    ],
)
def test_what_is_no_baseline_is_refused(result, tmp_path, content, expected):
    path = tmp_path / "baseline.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(bench.ConfigError, match=expected):
        compare(result, path, 0.1)


def test_cases_that_the_baseline_lacks_are_named(result: SuiteResult, tmp_path: Path):
    path = capture_baseline(dataclasses.replace(result, cases=result.cases[1:]), tmp_path)
    assert compare(result, path, 0.1).missing == ("Nap: size=1",)


def test_tables_for_a_document(result: SuiteResult, tmp_path: Path):
    path = tmp_path / "results.jsonl"
    lines = JsonLines(tmp_path, result.suite_name, result.environment)
    for case in result.cases:
        for run in case.runs:
            lines.run(case, run)
    written = path.read_text()
    path.write_text(written + '{"record": "ru')  # killed while it wrote
    killed = markdown(path)  # all of its runs had ended, and it says so
    path.write_text(written)
    lines.finish(result)
    text = markdown(path)
    assert (
        killed.replace("The run was cut short: these are the runs that had ended.\n\n", "") == text
    )
    header, rule, first, second, third = text.split("**Nap: save**\n\n")[1].splitlines()[:5]
    assert "durable" in header and header.count("|") == rule.count("|") == first.count("|")
    assert first.startswith("| size=1 | ") and " 1.00x " in first and " yes |" in first
    assert 1.3 < float(third.split("|")[6].strip(" x")) < 20 and "size=2" in second
    assert "durable" not in text.split("**Nap: load**")[1].split("\n\n")[1]
    assert "- failed: Fails, Fails: ValueError" in text
    for content, expected in ((None, "no such file"), ("{", "no results"), ("", "no results")):
        file = tmp_path / "other.jsonl"
        if content is not None:
            file.write_text(content)
        with pytest.raises(bench.ConfigError, match=expected):
            markdown(file)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (19.46, "19 times slower than ckpt"),
        (1.02, "as fast as ckpt"),
        (1.44, "1.4 times slower than ckpt"),
        (0.5, "2.0 times faster than ckpt"),
        (0.0004, "2,500 times faster than ckpt"),
        (0.0, ""),
    ],
)
def test_times_are_compared_in_words(result: SuiteResult, seconds: float, words: str):
    first = dataclasses.replace(result.cases[0], varying={"library": "ckpt"})
    assert beside(seconds, 1.0, first) == words


def test_ratios_of_a_document_are_never_nothing():
    assert [ratio(value) for value in (19.456, 1.0, 0.92, 0.0042)] == [
        "19.46x",
        "1.00x",
        "0.92x",
        "0.0042x",
    ]


def test_json_lines_have_no_numbers_that_json_lacks(result: SuiteResult, tmp_path: Path):
    lines = JsonLines(tmp_path, result.suite_name, {**result.environment, "odd": float("nan")})
    lines.finish(result)
    for line in (tmp_path / "results.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(word))
