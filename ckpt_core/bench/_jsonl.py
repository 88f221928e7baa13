"""JSON lines: one for the environment, one for each run as it ends, one for each case."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_core._format.strict_json import strict_json
from ckpt_core.bench._results import CaseResult, Run, SuiteResult

FILE = "results.jsonl"


class JsonLines:
    """Writes runs as they end, so that whatever happens later they are there."""

    def __init__(self, output: Path, suite_name: str, environment: Mapping[str, Any]) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self._path = output / FILE
        self._path.write_text("", encoding="utf-8")
        self._write("environment", {"suite_name": suite_name, **environment})

    def run(self, case: CaseResult, run: Run) -> None:
        """One run, with the values of every process."""
        record = dataclasses.asdict(run)
        self._write("run", {"label": case.label, "group": case.group, **record})

    def finish(self, result: SuiteResult) -> None:
        """The statistics of every case, and the end."""
        for case in result.cases:
            self._write("case", _case_record(case))
        self._write("end", {"interrupted": result.interrupted, "failed": len(result.failed)})

    def _write(self, kind: str, record: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(strict_json({"record": kind, **record}) + "\n")


def _case_record(case: CaseResult) -> dict[str, Any]:
    statistics = {
        operation: {metric: summary.as_json() for metric, summary in metrics.items()}
        for operation, metrics in case.by_operation().items()
    }
    return {
        "case": case.name,
        "label": case.label,
        "group": case.group,
        "generator": case.generator,
        "config": case.config,
        "notes": case.notes,
        "skipped": case.skipped,
        "errors": case.errors,
        "statistics": statistics,
    }


def read_cases(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The cases of a run; of one that was killed, as far as its runs had ended.

    Raises:
        KeyError, TypeError: the records are no results.
    """
    if records[-1]["record"] == "end":
        return [record for record in records if record["record"] == "case"]
    names = [field.name for field in dataclasses.fields(Run)]
    found: dict[str, CaseResult] = {}
    for record in records:
        if record["record"] == "run":
            run = Run(**{name: record[name] for name in names})
            empty = CaseResult(run.case, record["label"], record["group"], "", {}, {})
            case = found.get(run.case, empty)
            found[run.case] = dataclasses.replace(case, runs=(*case.runs, run))
    return [_case_record(case) for case in found.values()]
