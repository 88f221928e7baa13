"""Writes what ``tests/recorded`` holds into a temporary folder and prints the differences; ``UPDATE=1`` replaces it."""

import difflib
import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.support.paths import ROOT

RECORDED = ROOT / "tests" / "recorded"
SUBJECTS = {  # the longest first
    "operations": "operations:on_disk",
    "memory": "memory:peaks",
    "checkpoints": "disk:left",
    "processes": "processes:messages",
    "requests": "operations:at_a_bucket",
    "signatures": "disk:signatures",
}


def recorded(subject: str) -> str:
    """The text of a subject, made by a process of its own."""
    command = [sys.executable, "-m", "tests.support.recorded", subject]
    for _ in range(2):  # a busy machine lets one time out
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout
    raise SystemExit(f"{subject}: {done.stderr[-3000:]}")


def main(*subjects: str) -> int:
    """Compares all subjects; one that is named is printed."""
    if subjects:
        module, _, name = SUBJECTS[subjects[0]].partition(":")
        lines = getattr(importlib.import_module(f"tests.support.recorded.{module}"), name)()
        print(*lines, sep="\n", flush=True)
        os._exit(0)  # servers and processes that fork are left alone
    differs, update = False, os.environ.get("UPDATE") == "1"
    with ThreadPoolExecutor(2) as threads:
        for subject, text in zip(SUBJECTS, threads.map(recorded, SUBJECTS), strict=True):
            file = RECORDED / f"{subject}.txt"
            before = file.read_text().splitlines() if file.exists() else []
            differences = difflib.unified_diff(before, text.splitlines(), file.name, "now", n=1)
            for line in differences:
                print(line.rstrip())
                differs = True
            if update:
                file.write_text(text)
    return int(differs and not update)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
