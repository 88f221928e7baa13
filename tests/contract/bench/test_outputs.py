"""What ``ckpt bench run`` leaves behind: JSON lines, TensorBoard, tables, and baselines to compare with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import bench
from tests.support.command_line import Call, make_call  # noqa: F401 (fixture)

pytest.importorskip("typer")
SCALE = {"save": 1.0}


@dataclass(frozen=True)
class NapOptions(bench.BenchmarkOptions):
    size: int | list[int] = 1


@bench.benchmark_options(NapOptions)
class Nap(bench.BenchmarksGenerator):
    """Reports figures that were not measured: nothing here depends on how busy the machine is."""

    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        secs = SCALE["save"] * context.options.size * (1 + 0.01 * (context.repeat_index or 0))
        metrics = bench.Metrics()
        metrics.values["save"] = {"0_basics/time_s": [secs], "4_throughput/gb_per_s": [1 / secs]}
        metrics.values["load"] = {"0_basics/time_s": [1.0]}
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


def run(call: Call, place: Path, *more: object, text: str = TEXT) -> tuple[int, str]:
    place.mkdir(exist_ok=True)
    (place / "suite.yaml").write_text(text)
    code, out, err = call("bench", "run", place / "suite.yaml", "-o", place / "out", *more)
    return code, out + err


def records(place: Path) -> list[dict[str, Any]]:
    lines = (place / "out" / "results.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=lambda word: pytest.fail(word)) for line in lines]


def counted(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["record"] == "run" and line["kind"] == "counted"]


def captured(call: Call, tmp_path: Path, *more: object) -> Path:
    assert run(call, tmp_path / "before", "--baseline-capture", tmp_path / "base", *more)[0] == 0
    (path,) = (tmp_path / "base").iterdir()
    return path


def test_tables_and_records(call: Call, tmp_path: Path) -> None:
    code, text = run(call, tmp_path, text=TEXT + f"- generator: {__name__}.Fails\n")
    assert code == 1 and "naps <1>" in text
    rows = [line for line in text.splitlines() if "size=" in line and "yes" in line]
    assert len(rows) == 3 and " 2.00x " in rows[1] and "GB/s" in text
    assert "ValueError: <planted> & [bold]" in text  # not taken for markup
    found = records(tmp_path)
    assert found[0]["backend"] == "cpu" and found[0]["versions"]["jax"]
    cases = [entry for entry in found if entry["record"] == "case"]
    assert len(cases) == 4 and len(cases[3]["errors"]) == 5
    statistics = cases[1]["statistics"]["save"]["0_basics/time_s"]
    assert statistics["n"] == 4 and statistics["min"] == 2.0
    assert statistics["median"] == pytest.approx(2.03)
    assert statistics["ci95"] == pytest.approx(3.182446 * 0.0258199 / 2, rel=1e-4)
    assert found[-1] == {"record": "end", "interrupted": False, "failed": 1}


def test_tensorboard_reads_what_is_written(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    run(call, tmp_path)
    root = tmp_path / "out" / "tensorboard"
    case = [entry["case"] for entry in records(tmp_path) if entry["record"] == "case"][2]
    host = EventAccumulator(str(root / case / "host_0"))
    host.Reload()
    events = host.Scalars("save_0_basics/time_s")
    assert [event.step for event in events] == [0, 1, 2, 3]
    assert [event.value for event in events] == pytest.approx([4.0, 4.04, 4.08, 4.12])
    summary = EventAccumulator(str(root / case / "__summary__"))
    summary.Reload()
    tags = summary.Tags()
    assert "save_0_basics/time_s_median" in tags["scalars"]
    assert {"at_a_glance/save", "at_a_glance/load", "configuration"} <= set(tags["tensors"])
    card = summary.Tensors("at_a_glance/save")[0].tensor_proto.string_val[0].decode()
    assert "| 0_basics/time_s " in card
    content = summary.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert start.hparams["size"].number_value == 4
    suite = EventAccumulator(str(root / "__suite__"))
    suite.Reload()
    assert suite.Tags()["tensors"] == ["suite"]


def test_the_same_again_is_not_worse(call: Call, tmp_path: Path) -> None:
    path = captured(call, tmp_path)
    assert path.read_text() == (tmp_path / "before/out/results.jsonl").read_text()
    code, text = run(call, tmp_path / "again", "--baseline", path)
    assert (code, "WORSE" in text) == (0, False)


@pytest.mark.parametrize(
    ("scale", "threshold", "code"), [(3.0, 0.5, 3), (1 / 3, 0.1, 0), (1.4, 0.5, 0), (1.4, 0.1, 3)]
)
def test_a_slowdown_is_caught_and_a_speedup_is_none(
    call: Call, tmp_path: Path, monkeypatch: Any, scale: float, threshold: float, code: int
) -> None:
    path = captured(call, tmp_path)
    monkeypatch.setitem(SCALE, "save", scale)
    found, text = run(call, tmp_path / "now", "--baseline", path, "--threshold", threshold)
    assert found == code
    if code:
        assert "WORSE" in text and "metrics are worse" in text
        assert sum("WORSE" in line for line in text.splitlines()) == 6


def test_noise_is_not_worse(call: Call, tmp_path: Path) -> None:
    """The median moved by more than the threshold, and less than the values differ among themselves."""
    path = captured(call, tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for factor, line in zip((0.1, 0.8, 1.0, 1.7) * 3, counted(lines), strict=True):
        line["values"]["save"]["0_basics/time_s"][0] *= factor
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(call, tmp_path / "now", "--baseline", path, "--threshold", 0.05)[0] == 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such file"),
        ("{", "is no results.jsonl"),
        (
            '{"record": "environment", "suite_name": "s", "backend": "tpu"}\n',
            "measured with backend tpu, this is cpu",
        ),
    ],
)
def test_what_is_no_baseline_is_refused(
    call: Call, tmp_path: Path, content: str | None, expected: str
) -> None:
    path = tmp_path / "baseline.jsonl"
    if content is not None:
        path.write_text(content)
    code, text = run(call, tmp_path / "now", "--baseline", path)
    assert code == 2 and expected in text


def test_cases_that_the_baseline_lacks_are_named(call: Call, tmp_path: Path) -> None:
    path = captured(call, tmp_path, "--only", "*size=1")
    code, text = run(call, tmp_path / "now", "--baseline", path)
    assert code == 0 and "Nap: size=2" in text


def test_tables_for_a_document(call: Call, tmp_path: Path) -> None:
    run(call, tmp_path, text=TEXT + f"- generator: {__name__}.Fails\n")
    path = tmp_path / "out" / "results.jsonl"
    code, text, _ = call("bench", "markdown", path)
    assert code == 0
    header, rule, first, second, third = text.split("**Nap: save**\n\n")[1].splitlines()[:5]
    assert "durable" in header and header.count("|") == rule.count("|") == first.count("|")
    assert first.startswith("| size=1 | ") and " 1.00x " in first and " yes " in first
    assert " 4.00x " in third and "size=2" in second
    assert "- failed: Fails, Fails: ValueError" in text
    lines = [line for line in path.read_text().splitlines() if '"record": "run"' in line[:20]]
    head = path.read_text().splitlines()[0]
    path.write_text("\n".join([head, *lines, '{"record": "ru']))  # killed while it wrote
    killed = call("bench", "markdown", path)[1]
    said = "The run was interrupted: these are the runs that had ended.\n\n"
    assert said in killed and killed.replace(said, "") == text
    for content, expected in (("{", "no results"), ("", "no results")):
        path.write_text(content)
        code, _, err = call("bench", "markdown", path)
        assert code == 2 and expected in err
