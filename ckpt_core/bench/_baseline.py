"""Baselines: the measurements of one revision in a file, to compare later ones with."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ckpt_core.bench._results import SuiteResult
from ckpt_core.bench._schema import ConfigError
from ckpt_core.bench._tags import is_rate

SCHEMA_VERSION = 1
GATED = ("*_0_basics/time_s", "*_4_throughput/gb_per_s", "checkpoint_5_inventory/*")
"""Only these metrics make a comparison fail: memory and counters vary without a reason."""


@dataclasses.dataclass(frozen=True)
class Delta:
    """One metric of one case; ``change`` is that of the median as a fraction of the baseline, above 0 is worse."""

    label: str
    metric: str
    before: float
    now: float
    change: float
    beyond_noise: bool
    worse: bool


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of a result with a baseline."""

    path: str
    sha: str | None
    threshold: float
    deltas: tuple[Delta, ...]
    missing: tuple[str, ...]

    @property
    def worse(self) -> tuple[Delta, ...]:
        """The metrics that make the comparison fail."""
        return tuple(delta for delta in self.deltas if delta.worse)

    @property
    def changed(self) -> list[Delta]:
        """The metrics whose median changed: those that fail first, then by size of the change."""
        found = [delta for delta in self.deltas if delta.change]
        return sorted(found, key=lambda delta: (not delta.worse, -abs(delta.change)))


def capture_baseline(result: SuiteResult, directory: Path) -> Path:
    """Writes ``<git sha>.json`` (``unknown.json`` outside of git) and returns its path."""
    benchmarks = {
        case.name: {
            "label": f"{case.group}: {case.label}",
            "config": case.config,
            "metrics": {
                f"{operation}_{metric}": dataclasses.asdict(summary)
                for operation, metric, summary in metrics
            },
        }
        for case in result.cases
        if (metrics := case.metrics())
    }
    content = {
        "schema_version": SCHEMA_VERSION,
        "suite_name": result.suite_name,
        "captured_at_unix_secs": time.time(),
        "environment": dict(result.environment),
        "benchmarks": benchmarks,
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result.environment.get('git_sha') or 'unknown'}.json"
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    return path


def read_baseline(path: Path) -> Mapping[str, Any]:
    """The content of a baseline file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["schema_version"]
        content["environment"], content["benchmarks"]  # pyright: ignore[reportUnusedExpression]
    except FileNotFoundError as error:
        raise ConfigError(str(path), "there is no such baseline") from error
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is no baseline: {error!r}") from error
    if version != SCHEMA_VERSION:
        raise ConfigError(str(path), f"is of version {version}; this ckpt reads {SCHEMA_VERSION}")
    return content


def compare(result: SuiteResult, path: Path, threshold: float) -> Comparison:
    """Compares every metric with the baseline; ``worse`` are those beyond noise and ``threshold`` (0.1 is ten percent) that are ``GATED``."""
    baseline = read_baseline(path)
    then, now = baseline["environment"], result.environment
    for fact in ("backend", "device_kind", "devices", "processes"):
        if then.get(fact) != now.get(fact):
            raise ConfigError(
                str(path),
                f"was measured with {fact} {then.get(fact)}, this is {now.get(fact)}",
            )
    deltas: list[Delta] = []
    missing: list[str] = []
    for case in result.cases:
        label, metrics = f"{case.group}: {case.label}", case.metrics()
        known = baseline["benchmarks"].get(case.name)
        if known is None:
            missing += [label] if metrics else []
            continue
        for operation, metric, summary in metrics:
            tag = f"{operation}_{metric}"
            before = known["metrics"].get(tag)
            if before is None:
                continue
            change = _change(metric, before["median"], summary.median)
            beyond = _differ(before["values"], summary.values)
            is_gated = any(fnmatch(tag, pattern) for pattern in GATED)
            worse = beyond and change > threshold and is_gated
            values = (before["median"], summary.median, change, beyond, worse)
            deltas.append(Delta(label, tag, *values))
    return Comparison(str(path), then.get("git_sha"), threshold, tuple(deltas), tuple(missing))


def _change(metric: str, before: float, now: float) -> float:
    """How much worse the metric got, as a fraction: longer, larger, or a lower rate."""
    if before == now:
        return 0.0
    if is_rate(metric):
        return float("inf") if now == 0 else before / now - 1
    return float("inf") if before == 0 else (now - before) / abs(before)


def _differ(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two means differ by more than chance (Welch's t-test, 95 %); True for single values."""
    if len(one) < 2 or len(other) < 2:
        return True
    if len({*one}) == len({*other}) == 1:  # no variance: the test would divide by zero
        return one[0] != other[0]
    from scipy import stats

    # Not ttest_ind, which warns about values that are almost equal.
    result: Any = stats.ttest_ind_from_stats(
        statistics.fmean(one),
        statistics.stdev(one),
        len(one),
        statistics.fmean(other),
        statistics.stdev(other),
        len(other),
        equal_var=False,
    )
    return bool(result.pvalue < 0.05)
