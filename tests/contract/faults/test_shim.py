"""The shim sees what it must see: the crash tests are worth as much as this."""

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.contract.faults.harness import RUN, Fault, Op, environment, request_of

pytestmark = pytest.mark.faults

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
        counts.append(_names(outcome.ops))
    assert counts[0].keys() == counts[1].keys()
    for name, count in counts[0].items():  # threads race, for a directory that both make say
        assert abs(count - counts[1][name]) <= 3, counts


@pytest.mark.parametrize("scenario", ["step", "new", "overwrite"])
def test_shim_sees_every_changing_system_call(shim, tmp_path, scenario):
    """A library that writes in a way the shim does not know would escape all other tests.

    One run under both, because two runs differ: threads race for a directory, for example.
    """
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


def _names(ops: list[Op]) -> Counter[str]:
    return Counter(op.name for op in ops)


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
