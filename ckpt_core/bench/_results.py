"""The results of a suite, their statistics, and results.jsonl, the file that holds them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ckpt_core._format.plain_json import strict_json
from ckpt_core.bench._config import ConfigError
from ckpt_core.bench._measure import is_rate

Values = Mapping[str, Mapping[str, list[float]]]
"""Operation -> metric -> values."""

WARM_UP, TRACED, COUNTED = "warm-up", "traced", "counted"
FILE = "results.jsonl"


@dataclass(frozen=True)
class Summary:
    """The statistics of one metric; ``ci95`` is half the 95 % confidence interval of the mean, None for one value."""

    n: int
    min: float
    mean: float
    median: float
    max: float
    stddev: float | None
    ci95: float | None
    values: tuple[float, ...]


def _summarize(values: Sequence[float]) -> Summary:
    """The statistics of at least one value."""
    n, stddev, ci95 = len(values), None, None
    if n > 1:
        from scipy import stats  # takes a third of a second

        stddev = statistics.stdev(values)
        ci95 = float(stats.t.ppf(0.975, n - 1)) * stddev / math.sqrt(n)
    mean, median = statistics.fmean(values), statistics.median(values)
    return Summary(n, min(values), mean, median, max(values), stddev, ci95, tuple(values))


@dataclass(frozen=True)
class Run:
    """One run of one case."""

    case: str
    kind: str  # counted; or warm-up or traced, which the statistics leave out
    repeat: int
    started_unix_secs: float
    values: Values = field(default_factory=dict[str, dict[str, list[float]]])  # of all processes
    hosts: tuple[Values, ...] = ()  # the values of each process
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    error: str | None = None  # the exception in one line
    details: str | None = None  # the traceback
    skipped: str | None = None


@dataclass(frozen=True)
class CaseResult:
    """One case with all of its runs."""

    name: str
    label: str
    group: str
    generator: str = ""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    runs: tuple[Run, ...] = ()

    @property
    def title(self) -> str:
        """The group and the label."""
        return f"{self.group}: {self.label}"

    @property
    def skipped(self) -> str | None:
        """Why it did not run, if it did not."""
        return next((run.skipped for run in self.runs if run.skipped), None)

    @property
    def errors(self) -> list[str]:
        """The errors of its runs."""
        return [run.error for run in self.runs if run.error is not None]

    @property
    def notes(self) -> dict[str, str]:
        """The notes of the last run that has any."""
        return next((dict(run.notes) for run in reversed(self.runs) if run.notes), {})

    @property
    def counted(self) -> list[Run]:
        """The runs that the statistics are of."""
        return [r for r in self.runs if r.kind == COUNTED and not r.error and not r.skipped]

    def by_operation(self) -> dict[str, dict[str, Summary]]:
        """Statistics of every metric over the counted runs: operation -> metric -> summary."""
        return {
            name: {key: _summarize([*chain(*values)]) for key, values in sorted(metrics.items())}
            for name, metrics in collected(run.values for run in self.counted).items()
            if metrics
        }


@dataclass(frozen=True)
class SuiteResult:
    """A run of a suite; if it was ``interrupted``, by Ctrl-C or a kill, with what had ended."""

    suite_name: str
    environment: Mapping[str, Any]
    cases: tuple[CaseResult, ...]
    interrupted: bool = False

    @property
    def failed(self) -> list[CaseResult]:
        """The cases with at least one run that raised."""
        return [case for case in self.cases if case.errors]


def collected(many: Iterable[Values]) -> dict[str, dict[str, list[list[float]]]]:
    """Operation -> metric -> the lists of values of all that have it, in their order."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for one in many:
        for operation, metrics in one.items():
            into = found.setdefault(operation, {})
            for metric, values in metrics.items():
                into.setdefault(metric, []).append(values)
    return found


def merged(hosts: Sequence[Values]) -> dict[str, dict[str, list[float]]]:
    """Combines processes: slowest time, lowest rate, most memory."""
    return {
        operation: {
            metric: [(min if is_rate(metric) else max)(row) for row in zip(*values, strict=False)]
            for metric, values in metrics.items()
        }
        for operation, metrics in collected(hosts).items()
    }


class JsonLines:
    """Writes into a directory that exists a line for the environment, one for each run when it ends, and one for each case."""

    def __init__(self, output: Path, suite_name: str, environment: Mapping[str, Any]) -> None:
        self.path = output / FILE
        self.path.write_text("", encoding="utf-8")
        self._write("environment", {"suite_name": suite_name, **environment})

    def run(self, case: CaseResult, run: Run) -> None:
        """One run, with the values of every process."""
        self._write("run", {"label": case.label, "group": case.group, **asdict(run)})

    def finish(self, result: SuiteResult) -> None:
        """Writes the statistics of every case, and the record of the end."""
        names = ("label", "group", "generator", "config", "notes", "skipped", "errors")
        for case in result.cases:
            statistics = {
                name: {metric: asdict(summary) for metric, summary in metrics.items()}
                for name, metrics in case.by_operation().items()
            }
            record = {"case": case.name, **{name: getattr(case, name) for name in names}}
            self._write("case", record | {"statistics": statistics})
        self._write("end", {"interrupted": result.interrupted, "failed": len(result.failed)})

    def _write(self, kind: str, record: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(strict_json({"record": kind, **record}) + "\n")


def read_result(path: Path) -> SuiteResult:
    """The result that a file of JSON lines describes; if the run was killed, what had ended."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        # What follows the last newline is empty, or a line that a killed process did not finish.
        return _result([json.loads(line) for line in lines[:-1]])
    except FileNotFoundError as error:
        raise ConfigError(str(path), "there is no such file") from error
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(str(path), f"is no {FILE}: {error!r}") from error


def _result(records: Sequence[Mapping[str, Any]]) -> SuiteResult:
    environment = dict(records[0])
    # Records of cases come last, in the order of the suite: that order is the order of the tables.
    named = [one for kind in ("case", "run") for one in records if one["record"] == kind]
    found = {one["case"]: CaseResult(one["case"], one["label"], one["group"]) for one in named}
    for record in named:
        if record["record"] == "run":
            case = found[record["case"]]
            run = {one.name: record[one.name] for one in fields(Run)}
            run |= {name: _numbers(run[name]) for name in ("values", "hosts")}
            found[case.name] = replace(case, runs=(*case.runs, Run(**run)))
    interrupted = records[-1].get("interrupted", True)
    return SuiteResult(environment.pop("suite_name"), environment, (*found.values(),), interrupted)


def _numbers(value: Any) -> Any:
    """The same with floats in place of the texts "NaN" and "Infinity": JSON lacks these numbers."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list) else float(value)
