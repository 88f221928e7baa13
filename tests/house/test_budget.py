"""What one save may cost in files, calls and lines: the house stays small enough to be read."""

from __future__ import annotations

import ast
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support import sums
from tests.support.paths import INTEGRATIONS, PACKAGE, ROOT, modules

# What the house weighs. These numbers only fall.
SUMS = {
    "lines of ckpt_core": 36_911,
    "characters of ckpt_core": 1_641_118,
    "lines of the integrations": 11_843,
    "characters of the integrations": 498_122,
    "files of both": 225,
    "lines of tests": 54_588,
    "lines of tests that import private names": 7_263,
    "files of tests": 259,
    "words of pages": 19_187,
    "sentences of pages above 35 words": 0,
}

# path -> files, functions and changes of file that it may enter or make, of three leaves
BUDGETS = {
    "save": (20, 105, 61),
    "load": (25, 114, 88),
    "load with a target": (28, 128, 100),
    "restore_latest of an NNX model": (42, 190, 141),
    "open and restore": (51, 224, 173),
    "Checkpointer.save": (32, 179, 129),
    "Checkpointer.save with two tiers": (37, 213, 246),
}
# leaf of so many bytes -> Python calls for each further one, of a save and of a load
CALLS_PER_LEAF = {16: (2, 12), 1024: (3, 12), 4 * 2**20: (10, 45)}
MOST_MODULE_LINES = 500
MOST_FUNCTION_LINES = 60

# Runs in an interpreter of its own: the profiler sees only threads that start after it, and a
# pool that an earlier test has started would work out of its sight.
COUNT = """
import json, os, sys, threading

counting = False
calls, functions, moves, last = {}, set(), [0], {}
packages = ()
INLINED = {"<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>"}
POLLED = {"_tell_progress", "tell_progress"}  # how often a wait looks at what was written is chance

def profile(frame, event, argument):
    if not counting or event != "call":
        return
    code = frame.f_code
    name = code.co_filename
    if not name.startswith(packages) or code.co_name in INLINED | POLLED:
        return
    thread = threading.get_ident()
    if getattr(threading._active.get(thread), "name", "") == "ckpt-slow":
        return  # whether the one that reports what takes long wakes up meanwhile is chance
    calls[name] = calls.get(name, 0) + 1
    functions.add((name, code.co_qualname))
    if last.get(thread, name) != name:
        moves[0] += 1
    last[thread] = name

threading.setprofile(profile)  # threads may start at any time; this one is watched in `count`
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import ckpt_core as ckpt
root = sys.argv[1]
packages = tuple(sys.argv[2:])
quick = ckpt.Options(persist_policy=ckpt.when.every_steps(2))

def count(work):
    global counting
    calls.clear(), functions.clear(), last.clear()
    moves[0] = 0
    counting = True
    sys.setprofile(profile)
    work()
    sys.setprofile(None)
    counting = False
    return {"calls": dict(calls), "functions": len(functions), "moves": moves[0]}

def least(work):
    # how often a thread waits for another one is chance
    return min((count(lambda: work(turn))["calls"] for turn in range(3)), key=lambda calls: sum(calls.values()))

def tree(leaves, size=1024):
    return {f"leaf{i:03}": jnp.full(size // 4, float(i)) for i in range(leaves)}

model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
ckpt.save(f"{root}/warm", tree(3))
ckpt.load(f"{root}/warm", tree(3))
one = ckpt.Checkpointer(f"{root}/one")
sys.modules["ckpt_core._run.run"].LOOK_SECS = one._run._save_now.due = 1e9  # whether a look is due is chance
two = ckpt.Checkpointer(f"{root}/two", local_directory=f"{root}/local", options=quick)
for step in range(3):
    for checkpointer in (one, two):
        checkpointer.save(step, tree(3))
        checkpointer.wait_until_finished()
with ckpt.Checkpointer(f"{root}/nnx") as checkpointer:
    checkpointer.save(0, model=model)
ckpt.Checkpointer(f"{root}/nnx", read_only=True).restore_latest(model=model)
trainer, opened = ckpt.Checkpointer(f"{root}/nnx"), []

def saved(checkpointer, step):
    checkpointer.save(step, tree(3))
    checkpointer.wait_until_finished()

paths = {
    "save": count(lambda: ckpt.save(f"{root}/of3", tree(3))),
    "load": count(lambda: ckpt.load(f"{root}/of3")),
    "load with a target": count(lambda: ckpt.load(f"{root}/of3", tree(3))),
    "restore_latest of an NNX model": count(lambda: trainer.restore_latest(model=model)),
    "open and restore": count(lambda: opened.append(ckpt.Checkpointer(f"{root}/nnx")) or opened[0].restore_latest(model=model)),
    "Checkpointer.save": count(lambda: saved(one, 4)),
    "Checkpointer.save with two tiers": count(lambda: saved(two, 4)),
}
leaves = {}
for size in (16, 1024, 4 * 2**20):
    few, many = (20, 40) if size > 2**20 else (100, 300)
    found = []
    for number in (few, many):
        path = f"{root}/{size}-{number}"
        found.append(least(lambda turn: ckpt.save(f"{path}-{turn}", tree(number, size))))
        found.append(least(lambda turn: ckpt.load(f"{path}-0")))
    for at in (0, 1):
        more, less = found[2 + at], found[at]
        leaves[f"{size} {('save', 'load')[at]}"] = {
            name: (more[name] - less.get(name, 0)) / (many - few) for name in more
        }
[each.close() for each in (one, two, trainer, *opened)]
print(json.dumps([paths, leaves]))
"""


@pytest.fixture(scope="module")
def counts(run_python) -> Any:
    """What was counted on each path; and the calls for each further leaf, by file."""
    folders = [f"{folder}{os.sep}" for folder in (PACKAGE, INTEGRATIONS)]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as disk:  # as users do: no memory
        return run_python(COUNT, disk, *folders)


@pytest.mark.parametrize("path", BUDGETS)
def test_what_a_path_enters(counts, path):
    """Files, functions, and how often the next call is into another file."""
    found = counts[0][path]
    files = sorted(Path(name).relative_to(ROOT).as_posix() for name in found["calls"])
    assert any("/_save/" in name or "/_load/" in name for name in files), files
    entered = (len(files), found["functions"], found["moves"])
    assert all(a <= b for a, b in zip(entered, BUDGETS[path], strict=True)), (entered, files)


@pytest.mark.parametrize("size", CALLS_PER_LEAF)
def test_calls_per_further_leaf(counts, size):
    for call, most in zip(("save", "load"), CALLS_PER_LEAF[size], strict=True):
        per_file = counts[1][f"{size} {call}"]
        total = sum(per_file.values())
        largest = sorted(per_file.items(), key=lambda pair: -pair[1])
        assert 0 < total <= most, (call, total, largest)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function after its signature and docstring."""
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def too_long(source: str, name: str) -> list[str]:
    """What in a module is longer than it may be, in words."""
    lines = source.count("\n")
    found = [f"{name}: {lines} lines"] if lines > MOST_MODULE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = body_lines(node)
            if length > MOST_FUNCTION_LINES:
                found.append(f"{name}:{node.lineno} {node.name}: {length} lines")
    return found


def test_sizes():
    found = [text for file in modules().values() for text in too_long(file.read_text(), file.name)]
    assert found == []


def test_the_size_check_can_fail():
    long = "def f():\n" + "    x = 1\n" * (MOST_FUNCTION_LINES + 1)
    assert too_long(long, "m") == [f"m:1 f: {MOST_FUNCTION_LINES + 1} lines"]
    documented = 'def f():\n    """' + "word\n" * 100 + '    """\n    return 1\n'
    assert too_long(documented, "m") == []
    assert too_long("x = 1\n" * (MOST_MODULE_LINES + 1), "m") == [
        f"m: {MOST_MODULE_LINES + 1} lines"
    ]


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_only_falls(name: str) -> None:
    """Whoever makes one smaller writes the new number down; nobody raises one."""
    held, found = SUMS[name], weigh()[name]
    assert found <= held, f"what comes in is paid for: {name}: {found:,}, {held:,} are held"
    assert found >= 0.99 * held, f"write it down: {name}: {found:,}, {held:,} are held"


def test_a_private_docstring_is_one_paragraph() -> None:
    assert sums.private_docstrings_with_sections() == []


@functools.cache
def weigh() -> dict[str, int]:
    private = [one for one in sums.TESTS if sums.imports_private_names(one.read_text())]
    return {
        "lines of ckpt_core": sums.lines(sums.CORE),
        "characters of ckpt_core": sums.characters(sums.CORE),
        "lines of the integrations": sums.lines(sums.ADAPTERS),
        "characters of the integrations": sums.characters(sums.ADAPTERS),
        "files of both": len(sums.CORE) + len(sums.ADAPTERS),
        "lines of tests": sums.lines(sums.TESTS),
        "lines of tests that import private names": sums.lines(private),
        "files of tests": len(sums.TESTS),
        "words of pages": sums.words(sums.PAGES),
        "sentences of pages above 35 words": sum(
            len(sums.long_sentences(page.read_text())) for page in sums.PAGES
        ),
    }


if __name__ == "__main__":
    for name, number in weigh().items():
        print(f"{number:10,}  {name}")
