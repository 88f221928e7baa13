"""Seconds of each case: `make test-all` writes them to `tests/seconds.txt`, `make test` leaves out what is slow there.

They are CPU seconds, children counted, or those of the clock where a case waits for longer: it holds a worker as long.

The file has a line for each case from half a second on: up to three figures, of the last three runs, and the case. Their
median decides. Figures are divided by what a loop takes on the machine, so that machines compare. A `?` stands for a case
that nobody has measured yet, which counts as slow.
"""

import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Container, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FILE = Path(__file__).resolve().parents[1] / "seconds.txt"
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


class Spent(NamedTuple):
    """Seconds of the CPU and of the clock."""

    cpu_secs: float
    clock_secs: float

    @classmethod
    def now(cls) -> "Spent":
        return cls(cpu_secs(), time.perf_counter())

    def since(self) -> float:
        """The larger of both, from then to now."""
        return max(now - then for now, then in zip(Spent.now(), self, strict=True))


def _children(pid: int) -> list[int]:
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    except OSError:  # it has ended, or this system has no /proc
        pass
    return found


def cpu_secs() -> float:
    """CPU seconds of this process and of all below it, those that run included."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    running = _children(os.getpid())
    while running:
        pid = running.pop()
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        total += sum(map(int, stat.rpartition(")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")
        running += _children(pid)
    return total


def read(text: str) -> Figures:
    """The figures in a text of the file's form."""
    lines = (line.split("\t", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {
        case: tuple(float(one) for one in figures.split() if one != "?") for figures, case in lines
    }


def known() -> Figures:
    """The figures in the file, where there is one."""
    return read(FILE.read_text()) if FILE.exists() else {}


def slow(figures: Figures) -> set[str]:
    """The cases that `make test` leaves out."""
    found = {case for case, of in figures.items() if not of or statistics.median(of) > SLOW_SECS}
    return {case for case in found if not case.startswith(ALWAYS)}


def merged(known: Figures, measured: Mapping[str, float], left: Container[str]) -> Figures:
    """The figures after one more run, which left some cases out; what is gone from a file that ran is forgotten."""
    ran = {case.partition("::")[0] for case in measured}
    found = {
        case: of for case, of in known.items() if case in left or case.partition("::")[0] not in ran
    }
    for case, secs in measured.items():
        of = (*known.get(case, ())[-2:], secs)
        if statistics.median(of) >= LISTED_SECS:
            found[case] = of
    return found


def text_of(figures: Figures) -> str:
    """The file's text, the same for the same figures."""
    lines = [
        f"# seconds of the cases from {LISTED_SECS} on: the last three runs of `make test-all`"
    ]
    for case, of in sorted(figures.items()):
        lines.append(f"{' '.join(f'{secs:.1f}' for secs in of) or '?'}\t{case}")
    return "\n".join(lines) + "\n"


class Meter:
    """Measures the cases of this process; what a file's cases share is divided among them."""

    def __init__(self) -> None:
        self.of_case: dict[str, float] = {}
        self._left: list[str] = []
        self._of_file: Counter[str] = Counter()
        self._elsewhere = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        begun, self._elsewhere = Spent.now(), 0.0
        try:
            return (yield)
        finally:
            self.of_case[item.nodeid] = begun.since() - self._elsewhere

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        begun = Spent.now()
        try:
            return (yield)
        finally:
            secs = begun.since()
            self._elsewhere += secs
            if fixturedef.scope != "session":
                self._of_file[request.node.nodeid.partition("::")[0]] += secs

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._left += [item.nodeid for item in items]

    def figures(self) -> dict[str, float]:
        """Seconds of each case, as the machine of the file would take them."""
        cases = defaultdict[str, list[str]](list)
        for case in self.of_case:
            cases[case.partition("::")[0]].append(case)
        unit = REFERENCE_SECS / loop_secs()
        return {
            case: round(unit * (secs + self._of_file[file] / len(cases[file])), 2)
            for case, secs in self.of_case.items()
            for file in [case.partition("::")[0]]
        }

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["seconds"] = self.figures(), self._left
        elif self.of_case:
            write(self.figures(), self._left)


class Gathering:
    """Writes what the workers of one run have measured."""

    def __init__(self) -> None:
        self._measured: dict[str, float] = {}
        self._left: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        measured, left = getattr(node, "workeroutput", {}).get("seconds", ({}, []))
        self._measured |= measured
        self._left += left

    def pytest_sessionfinish(self) -> None:
        write(self._measured, self._left)


def write(measured: Mapping[str, float], left: Sequence[str]) -> None:
    """Adds one run to the file."""
    FILE.write_text(text_of(merged(known(), measured, {*left})))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("seconds of cases")
    group.addoption("--quick", action="store_true", help=f"leave out what {FILE.name} calls slow")
    group.addoption("--measure", action="store_true", help=f"write {FILE.name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--measure"):
        has_workers = config.getoption("dist", "no") != "no"
        config.pluginmanager.register(Gathering() if has_workers else Meter())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out slow cases where that is asked for, and puts the dearest files first, so that no worker ends with one."""
    figures = known()
    if config.getoption("--quick"):
        out = slow(figures)
        stays = [one for one in items if one.nodeid not in out or one.get_closest_marker("always")]
        left = {*items} - {*stays}
        config.hook.pytest_deselected(items=[*left])
        items[:] = stays
    of_file = Counter[str]()
    for item in items:
        of = figures.get(item.nodeid, ())
        of_file[item.path.as_posix()] += statistics.median(of) if of else 0.05  # type: ignore[assignment]
    items.sort(key=lambda item: (-of_file[item.path.as_posix()], item.path.as_posix()))
