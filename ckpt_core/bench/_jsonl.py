"""results.jsonl: a line for the environment, one for each run when it ends, one for each case."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from ckpt_core._format.plain_json import strict_json
from ckpt_core.bench._results import CaseResult, Run, SuiteResult
from ckpt_core.bench._schema import ConfigError

FILE = "results.jsonl"


class JsonLines:
    """Writes each run when it ends, so that a later crash does not lose it."""

    def __init__(self, output: Path, suite_name: str, environment: Mapping[str, Any]) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self._path = output / FILE
        self._path.write_text("", encoding="utf-8")
        self._write("environment", {"suite_name": suite_name, **environment})

    def run(self, case: CaseResult, run: Run) -> None:
        """One run, with the values of every process."""
        record = asdict(run)
        self._write("run", {"label": case.label, "group": case.group, **record})

    def finish(self, result: SuiteResult) -> None:
        """Writes the statistics of every case, and the record of the end."""
        for case in result.cases:
            self._write("case", _case_record(case))
        self._write("end", {"interrupted": result.interrupted, "failed": len(result.failed)})

    def _write(self, kind: str, record: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(strict_json({"record": kind, **record}) + "\n")


def _case_record(case: CaseResult) -> dict[str, Any]:
    names = ("label", "group", "generator", "config", "notes", "skipped", "errors")
    statistics = {
        operation: {metric: asdict(summary) for metric, summary in metrics.items()}
        for operation, metrics in case.by_operation().items()
    }
    return {"case": case.name, **{n: getattr(case, n) for n in names}, "statistics": statistics}


def read_result(path: Path) -> SuiteResult:
    """The result that a file of JSON lines describes; if the run was killed, what had ended."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        # What follows the last newline is empty, or a line that a killed process did not finish.
        return _result([json.loads(line) for line in lines[:-1]])
    except FileNotFoundError as error:
        raise ConfigError(str(path), "there is no such file") from error
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(str(path), f"is no results.jsonl: {error!r}") from error


def _result(records: Sequence[Mapping[str, Any]]) -> SuiteResult:
    environment = dict(records[0])
    # Records of cases come last, in the order of the suite: that order is the order of the tables.
    named = [one for kind in ("case", "run") for one in records if one["record"] == kind]
    found = {one["case"]: CaseResult(one["case"], one["label"], one["group"]) for one in named}
    for record in named:
        if record["record"] == "run":
            case = found[record["case"]]
            found[case.name] = replace(case, runs=(*case.runs, _run(record)))
    interrupted = records[-1].get("interrupted", True)
    return SuiteResult(environment.pop("suite_name"), environment, (*found.values(),), interrupted)


def _run(record: Mapping[str, Any]) -> Run:
    found: dict[str, Any] = {one.name: record[one.name] for one in fields(Run)}
    return Run(**found | {name: _numbers(found[name]) for name in ("values", "hosts")})


def _numbers(value: Any) -> Any:
    """The same with floats in place of the texts "NaN" and "Infinity": JSON lacks these numbers."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list) else float(value)
