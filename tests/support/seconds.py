"""Seconds of each case: `make test-all` writes them to `tests/seconds.txt`, `make test` leaves out what is slow there.

The file has a line for each case from half a second on: up to three figures, of the last three runs, and the case. Their
median decides. What a file's cases need before and after they run is divided among them. Figures are divided by what a
loop takes on the machine, so that machines compare. A `?` stands for a case that nobody has measured yet, which counts
as slow.
"""

import re
import statistics
import time
from collections import Counter
from collections.abc import Mapping

import pytest

from tests.support.paths import ROOT

FILE = ROOT / "tests/seconds.txt"
SLOW_SECS = 0.7
LISTED_SECS = 0.5
ALWAYS = ("tests/house/test_budget.py", "tests/house/test_rooms.py")  # each change may break them
REFERENCE_SECS = 0.1
"""What the loop takes on the machine in whose seconds the figures are."""

Figures = Mapping[str, tuple[float, ...]]
"""For each case its last figures, the newest last; none if it was never measured."""


def loop_secs() -> float:
    """What a fixed loop takes here."""
    found = []
    for _ in range(5):
        begun = time.process_time()
        sum(i * i for i in range(1_500_000))
        found.append(time.process_time() - begun)
    return min(found)


def known() -> Figures:
    """The figures in the file, where there is one."""
    text = FILE.read_text() if FILE.exists() else ""
    lines = (line.split("\t", 1) for line in text.splitlines() if not line.startswith("#"))
    return {
        case: tuple(float(one) for one in figures.split() if one != "?") for figures, case in lines
    }


def slow(figures: Figures) -> set[str]:
    """The cases that `make test` leaves out."""
    found = {case for case, of in figures.items() if not of or statistics.median(of) > SLOW_SECS}
    return {case for case in found if not case.startswith(ALWAYS)}


def is_there(case: str) -> bool:
    """Whether its file still has a function or class of that name."""
    name, _, inside = case.partition("::")
    file, (first, *_) = ROOT / name, re.findall(r"\w+", inside)
    return (
        file.exists() and re.search(rf"^(def|class) {first}\b", file.read_text(), re.M) is not None
    )


def write(measured: Mapping[str, float]) -> None:
    """Adds one run to the file, and takes out what is gone."""
    found = {case: of for case, of in known().items() if is_there(case)}
    for case, secs in measured.items():
        of = (*found.get(case, ())[-2:], secs)
        if statistics.median(of) >= LISTED_SECS:
            found[case] = of
        else:
            found.pop(case, None)
    lines = [
        f"# seconds of the cases from {LISTED_SECS} on: the last three runs of `make test-all`"
    ]
    for case, of in sorted(found.items()):
        lines.append(f"{' '.join(f'{secs:.1f}' for secs in of) or '?'}\t{case}")
    FILE.write_text("\n".join(lines) + "\n")


class Meter:
    """Adds up what cases take, those of other workers included."""

    def __init__(self) -> None:
        self._of_case = Counter[str]()
        self._around = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._of_case[report.nodeid] += report.duration  # type: ignore[assignment]
        else:
            self._around[_file(report.nodeid)] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        cases = Counter(map(_file, self._of_case))
        unit = REFERENCE_SECS / loop_secs()
        write(
            {
                case: unit * (secs + self._around[_file(case)] / cases[_file(case)])
                for case, secs in self._of_case.items()
            }
        )


def _file(case: str) -> str:
    return case.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("seconds of cases")
    group.addoption("--quick", action="store_true", help=f"leave out what {FILE.name} calls slow")
    group.addoption("--measure", action="store_true", help=f"write {FILE.name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--measure") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Meter())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out slow cases where that is asked for, and puts the dearest files first, so that no worker ends with one."""
    figures = known()
    if config.getoption("--quick"):
        out = slow(figures)
        stays = [one for one in items if one.nodeid not in out or one.get_closest_marker("always")]
        config.hook.pytest_deselected(items=[*({*items} - {*stays})])
        items[:] = stays
    of_file = Counter[str]()
    for item in items:
        of = figures.get(item.nodeid, ())
        of_file[item.path.as_posix()] += statistics.median(of) if of else 0.05  # type: ignore[assignment]
    items.sort(key=lambda item: (-of_file[item.path.as_posix()], item.path.as_posix()))
