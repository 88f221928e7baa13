"""A save that is killed, refused or starved at any file operation leaves the old state or the new.

The operations are numbered by a preload shim, whose own tests stand at the end. The quick run kills at some operations
of two scenarios; `make faults` takes every operation of every scenario.
"""

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract.faults.harness import RUN, Children, Fault, Op, Outcome, environment, request_of

_KEPT_OLD = (".ckpt-old.", ".ckpt-kept.")
_VISIBLE = "visible, durability unknown"
WORKERS = 2
_EXTRA_RUNS = 30  # threads differ from run to run, so a run may have a few operations more
Check = Callable[[str, Outcome, Outcome], None]
"""Looks at the scenario's name, the disturbed process, and the one after it."""

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def counted(pool: Children, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Op]]:
    """The operations of an undisturbed run, by scenario."""

    def job(name: str) -> list[Op]:
        root = tmp_path_factory.mktemp(name)
        outcome = pool.run("scenarios:save", [name, str(root)], path=str(root))
        assert outcome.exit_code == 0, str(outcome)
        assert not outcome.reported("error"), str(outcome)
        return outcome.ops

    return dict(zip(SCENARIOS, pool.map(job, SCENARIOS), strict=True))


@dataclass(frozen=True)
class Expectation:
    """The version of every checkpoint that a reader may find: before the disturbed save, and after it was acknowledged."""

    old: dict[str, int]
    new: dict[str, int]
    later: tuple[dict[str, int], ...]  # after the save of the next process
    between: tuple[dict[str, int], ...] = ()  # also found if the save was not acknowledged

    def allowed(
        self, events: list[dict[str, Any]], *, kept_too_much: bool = False
    ) -> list[dict[str, int]]:
        """What a reader may find, given what was acknowledged to the writer in `events`."""
        acknowledged = dict(event["acknowledged"] for event in events if "acknowledged" in event)
        if 2 in acknowledged.values():
            return [self.new, *(self.between if kept_too_much else ())]
        return [self.old, *self.between, self.new]


_STEPS = Expectation(
    old={"0": 0, "1": 1},
    new={"1": 1, "2": 2},
    later=({"1": 1, "3": 3}, {"2": 2, "3": 3}),
    between=({"0": 0, "1": 1, "2": 2},),  # saved, and the oldest not yet deleted
)
_OVERWRITE = Expectation({"second": 1}, {"second": 2}, ({"second": 3},))
EXPECTED = {
    "new": Expectation({"first": 1}, {"first": 1, "second": 2}, ({"first": 1, "second": 3},)),
    "files": Expectation({"first": 1}, {"first": 1, "second": 2}, ({"first": 1, "second": 3},)),
    "nested": Expectation(
        {"first": 1}, {"first": 1, "a/b/second": 2}, ({"first": 1, "a/b/second": 3},)
    ),
    "overwrite": _OVERWRITE,
    "no_exchange": _OVERWRITE,
    "step": _STEPS,
    "async_step": _STEPS,
    "linked": _STEPS,
    "open": _STEPS,
}
SCENARIOS = tuple(EXPECTED)


def _kept_too_much(outcome: Outcome) -> bool:
    """Whether deleting an old step failed: that is logged and done by a later save."""
    return "could not delete" in outcome.output


def _check_next_process(name: str, outcome: Outcome, after: Outcome) -> None:
    """A fresh process reads old or new, and its own save leaves nothing of the dead one behind."""
    assert after.exit_code == 0, f"{outcome}\nthe next process: {after}"
    expected = EXPECTED[name]
    (found,) = after.reported("found")
    allowed = expected.allowed(outcome.events, kept_too_much=_kept_too_much(outcome))
    assert found in allowed, f"{outcome}\n{after}"
    (contents,) = after.reported("contents")
    assert contents in expected.later, f"{outcome}\n{after}"
    (left,) = after.reported("left")
    assert left == _with_parents(contents), f"junk: {left}\n{outcome}\n{after}"


def _with_parents(names: Iterable[str]) -> list[str]:
    return sorted(
        {str(path) for name in names for path in (Path(name), *Path(name).parents)} - {"."}
    )


def _sweep(
    pool: Children, scratch: Path, name: str, faults: Iterable[Fault], *checks: Check
) -> list[Outcome]:
    """Runs the scenario once under each fault, a fresh process after it, and all checks on both."""
    faults = list(faults)
    shares = [share for i in range(WORKERS) if (share := faults[i::WORKERS])]
    outcomes: list[Outcome] = []
    failures: list[str] = []
    for pairs in pool.map(lambda share: _chain(pool, scratch, name, share), shares):
        for outcome, after in pairs:
            outcomes.append(outcome)
            try:
                for check in checks:
                    check(name, outcome, after)
            except AssertionError as error:
                failures.append(str(error))
    assert not failures, f"{len(failures)} of {len(faults)}:\n" + "\n\n".join(failures[:8])
    return outcomes


def _chain(
    pool: Children, scratch: Path, name: str, faults: list[Fault]
) -> list[tuple[Outcome, Outcome]]:
    """The disturbed process of each fault, and the process after it, which is then disturbed itself: starting processes is most of
    the work.
    """
    pairs: list[tuple[Outcome, Outcome]] = []
    outcome: Outcome | None = None
    dead_root = ""
    for fault in faults:
        root = scratch / f"{fault.action}-{fault.nth}"
        root.mkdir()
        count = {"path": str(root), "fault": fault}
        if outcome is None:
            outcome = pool.run("scenarios:save", [name, str(root)], **count)
        else:
            both = pool.run("scenarios:later_and_save", [name, dead_root, str(root)], **count)
            if two := both.split("now"):
                pairs.append((outcome, two[0]))
                outcome = two[1]
            else:  # it failed already in looking after the dead one
                pairs.append((outcome, both))
                outcome = pool.run("scenarios:save", [name, str(root)], **count)
            shutil.rmtree(dead_root)
        dead_root = str(root)
    if outcome is not None:
        pairs.append((outcome, pool.run("scenarios:later", [name, dead_root])))
    return pairs


def _numbers(count: int, stride: int) -> list[int]:
    """Every `stride`-th number from the last one back, where the commit is, and the first four."""
    return sorted({*range(count, 0, -stride), *range(1, min(4, count) + 1)})


@pytest.mark.parametrize(
    ("name", "stride"),
    [
        pytest.param("step", 4, marks=pytest.mark.always),
        pytest.param("no_exchange", 7, marks=pytest.mark.always),
        *((name, 1) for name in SCENARIOS),
    ],
)
def test_killed_before_an_operation(pool, counted, tmp_path, name, stride):
    count = len(counted[name])
    seen = {op.name for op in counted[name]}
    assert {"open", "write", "fsync", "rename", "mkdir"} <= seen, "the shim sees too little"
    checks = (_check_killed_or_done, _check_next_process)
    faults = [Fault("kill", nth) for nth in _numbers(count, stride)]
    outcomes = _sweep(pool, tmp_path, name, faults, *checks)
    kills = sum(outcome.was_killed for outcome in outcomes)
    assert kills >= 0.9 * len(faults), f"only {kills} of {len(faults)} operations were reached"
    for nth in range(count + 1, count + 1 + _EXTRA_RUNS):
        (outcome,) = _sweep(pool, tmp_path, name, [Fault("kill", nth)], *checks)
        if not outcome.was_killed:
            break
    else:
        pytest.fail(f"runs have more and more operations, beyond {count + _EXTRA_RUNS}")


@pytest.mark.parametrize(
    ("name", "stride"),
    [pytest.param("step", 4, marks=pytest.mark.always), *((name, 1) for name in SCENARIOS)],
)
def test_killed_in_the_middle_of_a_write(pool, counted, tmp_path, name, stride):
    count = sum(op.name == "write" for op in counted[name])

    faults = [Fault("torn", nth, ops="write") for nth in _numbers(count, stride)]
    _sweep(pool, tmp_path, name, faults, _check_killed_or_done, _check_next_process)


def _check_killed_or_done(name: str, outcome: Outcome, after: Outcome) -> None:
    assert outcome.was_killed or outcome.exit_code == 0, str(outcome)


def _removes(op: Op) -> bool:
    """Whether it gives what is to be removed a name under which nobody looks for it."""
    target = Path(op.path.partition(" -> ")[2])
    return op.name == "rename" and target.name.startswith(".ckpt-tmp.")


def _check_error(name: str, errno: str, outcome: Outcome) -> None:
    """A typed error, earlier states untouched, no junk; and the same process could try again."""
    assert outcome.exit_code == 0, str(outcome)
    struck = outcome.reported("struck")[0]
    errors = outcome.reported("error")
    if not errors:
        # Cleaning up may fail where the next save does it; a directory may be there already; what
        # cannot be linked is written.
        names = ("unlink", "rmdir", "mkdir", "link")
        harmless = {op.number for op in outcome.ops if op.name in names or _removes(op)}
        assert struck in harmless | {0} or _kept_too_much(outcome), f"swallowed: {outcome}"
        return
    (error,) = errors
    assert "OSError" in error["bases"], str(outcome)
    assert error["errno"] == errno, str(outcome)
    (op,) = (op for op in outcome.ops if op.number == struck)
    if op.name not in ("unlink", "rmdir"):
        expected = EXPECTED[name]
        # It may stand there already: when the directory of the finished rename cannot be synced.
        # What it replaced then stays beside it until the next save.
        committed = set(_with_parents(expected.new)) - set(_with_parents(expected.old))
        new = {name for name in outcome.reported("new")[0] if not name.startswith(_KEPT_OLD)}
        assert new in (set(), committed), f"junk: {outcome}"
        kept_old = new != set(outcome.reported("new")[0])
        replaces = name in ("overwrite", "no_exchange")
        assert not kept_old or (replaces and op.name == "fsync"), f"junk: {outcome}"
        visible = 2 in outcome.reported("after_error")[0].values()
        assert (_VISIBLE in error["text"]) == visible, str(outcome)
        assert kept_old == (replaces and visible), f"the old one is gone: {outcome}"
    until = next(i for i, event in enumerate(outcome.events) if "error" in event)
    allowed = EXPECTED[name].allowed(outcome.events[:until])
    assert outcome.reported("after_error")[0] in allowed, str(outcome)


@pytest.mark.parametrize(("action", "errno"), [("eio", "EIO"), ("enospc", "ENOSPC")])
@pytest.mark.parametrize("name", SCENARIOS)
def test_failing_operation(pool, counted, tmp_path, name, action, errno):
    faults = [Fault(action, nth) for nth in range(1, len(counted[name]) + 1)]

    def check(name: str, outcome: Outcome, after: Outcome) -> None:
        _check_error(name, errno, outcome)

    _sweep(pool, tmp_path, name, faults, check, _check_next_process)


def test_the_linked_step_shares_its_large_leaf(pool, tmp_path):
    """Else that scenario would be as `step`."""

    def check(name: str, outcome: Outcome, after: Outcome) -> None:
        assert outcome.reported("shared")[0] > 4 << 20, str(outcome)
        assert any(op.name == "link" for op in outcome.ops), str(outcome)

    _sweep(pool, tmp_path, "linked", [Fault("kill", 10**6)], check, _check_next_process)


@pytest.mark.parametrize("name", SCENARIOS)
def test_short_writes_are_completed(pool, tmp_path, name):
    def check(name: str, outcome: Outcome, after: Outcome) -> None:
        assert outcome.exit_code == 0, str(outcome)
        assert not outcome.reported("error"), str(outcome)

    _sweep(pool, tmp_path, name, [Fault("short", 1)], check, _check_next_process)


def test_all_is_synced_before_the_rename_and_the_name_after_it(pool, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    outcome = pool.run("scenarios:save", ["nested", str(root)], path=str(root), fresh=True)
    assert outcome.exit_code == 0, str(outcome)
    target = root / "a" / "b" / "second"
    (named,) = (at for at, op in enumerate(outcome.ops) if op.path.endswith(f" -> {target}"))
    assert _unsynced(outcome.ops[:named]) == {target.parent}  # which has the attempt's name
    assert not _unsynced(outcome.ops)


def _unsynced(ops: list[Op]) -> set[Path]:
    """Files with bytes, and directories with names, that a power cut would take."""
    found: set[Path] = set()
    for op in ops:
        path = Path(op.path.rpartition(" -> ")[2])
        if op.name == "fsync":
            found.discard(path)
        else:
            found.add(path if op.name == "write" else path.parent)
    return found


# System calls that change a file or directory, by what the shim calls them.
_CALLS = {
    call: name
    for name, calls in {
        "open": "open openat creat",
        "write": "write writev pwrite64 pwritev pwritev2 copy_file_range sendfile",
        "fsync": "fsync fdatasync",
        "truncate": "ftruncate truncate fallocate",
        "rename": "rename renameat renameat2",
        "link": "link linkat symlink symlinkat",
        "mkdir": "mkdir mkdirat",
        "rmdir": "rmdir",
        "unlink": "unlink unlinkat",
    }.items()
    for call in calls.split()
}
_BEGIN, _END = "shim-test-begin", "shim-test-end"


def test_fork_makes_the_operations_of_a_fresh_interpreter(pool, tmp_path):
    counts: list[Counter[str]] = []
    for fresh in (False, True):
        root = tmp_path / f"fresh-{fresh}"
        root.mkdir()
        outcome = pool.run("scenarios:save", ["new", str(root)], path=str(root), fresh=fresh)
        assert outcome.exit_code == 0, str(outcome)
        counts.append(Counter(op.name for op in outcome.ops))
    assert counts[0].keys() == counts[1].keys()
    for name, count in counts[0].items():  # threads race, for a directory that both make say
        assert abs(count - counts[1][name]) <= 3, counts


@pytest.mark.parametrize("scenario", ["step", "new", "overwrite"])
def test_shim_sees_every_changing_system_call(shim, tmp_path, scenario):
    """A library that writes in a way the shim does not know would escape all other tests; one run under both, as two runs differ."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    by_shim, by_strace = _traced(shim, tmp_path, scenario)
    assert by_shim == by_strace


@pytest.mark.parametrize(
    ("fault", "survives"),
    [
        (Fault("log"), True),
        (Fault("kill", 2), False),
        (Fault("torn", 2, ops="write"), False),
        (Fault("eio", 3, ops="write"), True),
        (Fault("enospc", 1), True),
        (Fault("short", 1), True),
    ],
)
def test_actions(pool, tmp_path, fault, survives):
    outcome = pool.run("probes:write_three", [str(tmp_path)], path=str(tmp_path), fault=fault)
    assert outcome.was_killed is not survives, str(outcome)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    match fault.action:
        case "log":
            assert [op.name for op in outcome.ops] == ["open", "write", "fsync"] * 3
        case "kill":
            assert written == {"0": b""}
        case "torn":
            assert written == {"0": b"abcdef", "1": b"abc"}
        case "eio":
            assert outcome.reported("failed") == [[2, "EIO"]]
            assert written == {"0": b"abcdef", "1": b"abcdef", "2": b""}
        case "enospc":
            assert outcome.reported("failed") == [[n, "ENOSPC"] for n in range(3)]
            assert not written
        case _:
            assert written == dict.fromkeys("012", b"abc")


def _traced(shim: Path, tmp_path: Path, scenario: str) -> tuple[Counter[str], Counter[str]]:
    """What the shim and strace see while an interpreter makes the disturbed save of `scenario`."""
    root, trace = tmp_path / "root", tmp_path / "trace"
    root.mkdir()
    arguments = [scenario, str(root), _BEGIN, _END]
    request = request_of("probes:marked_save", arguments, tmp_path, path=str(root))
    calls = ",".join(_CALLS)
    done = subprocess.run(
        [
            *("strace", "-f", "-qq", "-y", "-s", "200", "-e", f"trace={calls}", "-o", str(trace)),
            *("-E", f"LD_PRELOAD={shim}"),
            *(sys.executable, "-c", RUN, request),
        ],
        env=environment(None),
        timeout=120,
        check=False,
    )
    if not trace.exists() or _BEGIN not in (text := trace.read_text(errors="replace")):
        pytest.skip("strace cannot trace here")
    assert done.returncode == 0
    part = text[text.index(_BEGIN) : text.index(_END)]
    seen = Counter(kind for line in part.splitlines() if (kind := _kind(line, str(root))))
    return Counter(line.split()[1] for line in (tmp_path / "ops").read_text().splitlines()), seen


def _kind(line: str, root: str) -> str | None:
    # What the shim itself writes to its log has these paths in its text.
    if root not in line or "resumed>" in line or "/ops>" in line:
        return None
    call = line.split(None, 1)[1].split("(", 1)[0]
    if _CALLS.get(call) == "open" and not ("O_CREAT" in line or "O_TRUNC" in line):
        return None
    return "rmdir" if "AT_REMOVEDIR" in line else _CALLS.get(call)
