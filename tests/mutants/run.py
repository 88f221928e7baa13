"""Breaks one promise of the product at a time, in a copy, and demands that the named contract test fails: `make mutants`.

`table.txt` has the mutations of each promise:

    what is broken
    file of the product
    test that has to fail, and to pass where nothing is broken
    -lines that stand in the file exactly once
    +lines in their place

A test that goes on without end finds a mutation whose text ends in `(waits)`, and no other. With words as arguments, only
mutations that have one of them in their text are applied.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("ckpt_core", "integrations", "tests", "examples", "docs")
WAITS = "(waits)"
LIMIT_SECS, WAITS_SECS, UNBROKEN_SECS = 400, 60, 1200


@dataclass(frozen=True)
class Mutation:
    promise: str
    name: str
    file: str
    test: str
    old: str
    new: str

    def broken(self) -> str:
        """The file with the mutation; ValueError where it no longer applies."""
        text = (ROOT / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"no longer applies: {self.file} has its lines {count} times")
        broken = text.replace(self.old, self.new)
        compile(broken, self.file, "exec")
        return broken


def parsed(table: str) -> list[Mutation]:
    found, promise = [], ""
    for block in re.split(r"\n\n+", table.strip()):
        if block.startswith("## "):
            promise = block.split(".")[0].removeprefix("## ")
            continue
        name, file, test, *change = block.splitlines()
        old, new = (
            "\n".join(line[1:] for line in change if line[:1] == sign) for sign in ("-", "+")
        )
        found.append(Mutation(promise, name, file, test, old, new))
    return found


def pytest(tree: Path, tests: Sequence[str], limit_secs: float) -> tuple[int | None, str]:
    """The exit code of the tests in a copy, None after the limit; and the lines that say what failed."""
    paths = [str(tree), *map(str, sorted((tree / "integrations").iterdir()))]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(tree.parent)}
    env.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    base = tempfile.mkdtemp(dir=tree.parent)
    command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-n", "0", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-p", "no:randomly", f"--basetemp={base}/tests"]
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, cwd=tree, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = child.wait(limit_secs)
        except subprocess.TimeoutExpired:
            code = None
        try:
            os.killpg(child.pid, signal.SIGKILL)  # and what the tests have left running
        except ProcessLookupError:
            pass
        child.wait()
        shutil.rmtree(base, ignore_errors=True)
        output.seek(0)
        lines = output.read().splitlines()
    errors = [line for line in lines if line.startswith(("E  ", "FAILED", "ERROR"))]
    return code, (errors or lines or [""])[0].removeprefix("E").strip()


def outcome(mutation: Mutation, whole: Path, here: Path) -> str:
    """``found``, or what is wrong; in a copy that shares all files but one."""
    try:
        broken = mutation.broken()
    except (ValueError, SyntaxError) as error:
        return str(error)
    shutil.copytree(whole, here, copy_function=os.link)
    (here / mutation.file).unlink()
    (here / mutation.file).write_text(broken)
    waits = mutation.name.endswith(WAITS)
    code, said = pytest(here, [mutation.test], WAITS_SECS if waits else LIMIT_SECS)
    shutil.rmtree(here)
    if code == 1 or (code is None and waits):
        return f"found: {said}" if code else "found: it waits without end"
    return "SURVIVED" if code == 0 else f"SURVIVED: pytest ended with {code}: {said}"


def main(words: list[str]) -> int:
    began = time.monotonic()
    mutations = parsed((Path(__file__).parent / "table.txt").read_text())
    mutations = [one for one in mutations if not words or any(word in one.name for word in words)]
    if not mutations:
        sys.exit(f"no mutation has one of these words in its text: {words}")
    tests = sorted({one.test for one in mutations})
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as two:
        whole = Path(folder) / "whole"
        whole.mkdir()
        shutil.copy2(ROOT / "pyproject.toml", whole)
        for part in PARTS:
            shutil.copytree(ROOT / part, whole / part)
        halves = [tests[: len(tests) // 2], tests[len(tests) // 2 :]]
        unbroken = [two.submit(pytest, whole, half, UNBROKEN_SECS) for half in halves if half]
        bad = [
            f"fails where nothing is broken: {one.result()}"
            for one in unbroken
            if one.result()[0] != 0
        ]
        copies = (Path(folder) / f"copy-{number}" for number in itertools.count())
        results = [two.submit(outcome, one, whole, next(copies)) for one in mutations]
        for one, result in zip(mutations, results, strict=True):
            said = result.result()
            bad += [] if said.startswith("found") else [f"{one.name}: {said}"]
            print(f"{one.promise:>2}  {one.name}\n    {one.test}\n    {said[:150]}", flush=True)
    for one in bad:
        print(one, file=sys.stderr)
    print(f"{len(mutations)} mutations, {len(bad)} not found; {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
