"""The results of a run as tables for a document, from its JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_core.bench._jsonl import read_cases
from ckpt_core.bench._table import ACKNOWLEDGED, RATE, TIME, number
from ckpt_core.bench._yaml import ConfigError


def markdown(path: Path) -> str:
    """Tables of every group and operation, ratios to the first case of each; and where it was.

    Of a run that was cut short: the runs that had ended.

    Raises:
        ConfigError: no results.
    """
    try:
        whole_lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be cut
        records = [json.loads(line) for line in whole_lines]
        environment, cases = records[0], read_cases(records)
    except FileNotFoundError as error:
        raise ConfigError(str(path), [(0, "there is no such file")]) from error
    except (json.JSONDecodeError, IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [(0, f"is no results.jsonl: {error!r}")]) from error
    parts = [f"## {environment['suite_name']}", "", _where(environment), ""]
    if records[-1].get("interrupted", True):
        parts += ["The run was cut short: these are the runs that had ended.", ""]
    for group in dict.fromkeys(case["group"] for case in cases):
        together = [case for case in cases if case["group"] == group and case["statistics"]]
        for operation in dict.fromkeys(name for case in together for name in case["statistics"]):
            rows = list(_rows(together, operation))
            if rows:
                parts += [f"**{group}: {operation}**", "", *_lines(rows), ""]
    failed = [case for case in cases if case["errors"]]
    parts += [f"- failed: {case['group']}, {case['label']}: {case['errors'][0]}" for case in failed]
    return "\n".join(parts).rstrip() + "\n"


def _where(environment: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"{environment['cpus']} CPUs ({environment['machine']}), load before the run "
        f"{environment['load_average']:.1f}, {environment['devices']} x "
        f"{environment['device_kind']}, {environment['processes']} process(es), "
        f"{environment['file_system']}, Linux {environment['kernel']}, Python "
        f"{environment['python']}; {versions}; revision {(environment['git_sha'] or 'unknown')[:12]}."
    )


def _rows(cases: Sequence[Mapping[str, Any]], operation: str) -> Iterator[list[str]]:
    first: float | None = None
    for case in cases:
        metrics = case["statistics"].get(operation, {})
        seconds = metrics.get(TIME)
        if seconds is None or isinstance(seconds["median"], str):  # "NaN": no time at all
            continue
        first = seconds["median"] if first is None else first
        peak = metrics.get("0_basics/host_rss_peak_mb")
        yield [
            case["label"],
            number(seconds["median"]),
            f"{number(seconds['min'])} - {number(seconds['max'])}",
            "" if seconds["ci95"] is None else number(seconds["ci95"]),
            number(metrics[RATE]["median"]) if RATE in metrics else "",
            ratio(seconds["median"] / first) if first else "",
            "" if peak is None else number(peak["median"]),
            case["notes"].get("durable", "") if operation in ACKNOWLEDGED else "",
        ]


def ratio(value: float) -> str:
    """Two digits at least: 19.46x, 0.92x, 0.0042x."""
    return f"{value:.2f}x" if value >= 0.095 else f"{value:.2g}x"


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    names = ("", "median s", "min - max", "± 95 %", "GB/s", "to first", "peak MB", "durable")
    kept = [i for i in range(len(names)) if i == 0 or any(row[i] for row in rows)]
    head = "| " + " | ".join(names[i] for i in kept) + " |"
    rule = "|" + "|".join("---" if names[i] in ("", "durable") else "---:" for i in kept) + "|"
    return [head, rule, *("| " + " | ".join(row[i] for i in kept) + " |" for row in rows)]
