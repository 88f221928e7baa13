"""What one save may cost in files, calls and lines: the house stays small enough to be read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ckpt_core"
SOURCES = [PACKAGE, *sorted((PACKAGE.parent / "integrations").glob("*/ckpt_*"))]

MOST_FILES_ENTERED = 16
MOST_CALLS_PER_LEAF = 30
MOST_MODULE_LINES = 400
MOST_FUNCTION_LINES = 60

# Runs in an interpreter of its own: the profiler sees only threads that start after it, and a
# pool that an earlier test has started would save out of its sight.
COUNT = """
import json, os, sys, threading

counting = False
calls = {}
package = None

def profile(frame, event, argument):
    if counting and event == "call":
        name = frame.f_code.co_filename
        if name.startswith(package):
            calls[name] = calls.get(name, 0) + 1

threading.setprofile(profile)
sys.setprofile(profile)
import jax.numpy as jnp
import ckpt_core
package = os.path.dirname(ckpt_core.__file__) + os.sep

def save(name, leaves):
    global counting
    tree = {f"leaf{i:03}": jnp.full((16, 16), float(i)) for i in range(leaves)}
    calls.clear()
    counting = True
    ckpt_core.save(os.path.join(sys.argv[1], name), tree)
    counting = False
    return dict(calls)

save("warm", 3)
result = {str(leaves): save(f"of{leaves}", leaves) for leaves in (3, 100, 300)}
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def counts(run_python, tmp_path_factory) -> dict[int, dict[str, int]]:
    """Number of leaves -> {file of ckpt_core: Python calls into it during one save}."""
    result = run_python(COUNT, str(tmp_path_factory.mktemp("budget")))
    return {int(leaves): calls for leaves, calls in result.items()}


def test_files_entered_by_one_save(counts):
    files = sorted(Path(name).relative_to(PACKAGE).as_posix() for name in counts[3])
    assert "_save.py" in files or any(name.startswith("_save/") for name in files), files
    assert len(files) <= MOST_FILES_ENTERED, files


def test_calls_per_further_leaf(counts):
    few, many = counts[100], counts[300]
    per_file = {
        Path(name).relative_to(PACKAGE).as_posix(): (calls - few.get(name, 0)) / 200
        for name, calls in many.items()
    }
    total = sum(per_file.values())
    most = sorted(per_file.items(), key=lambda pair: -pair[1])
    assert 0 < total <= MOST_CALLS_PER_LEAF, most


def modules() -> list[Path]:
    return [file for folder in SOURCES for file in sorted(folder.rglob("*.py"))]


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
    found = [text for file in modules() for text in too_long(file.read_text(), file.name)]
    assert found == []


def test_the_size_check_can_fail():
    long = "def f():\n" + "    x = 1\n" * (MOST_FUNCTION_LINES + 1)
    assert too_long(long, "m") == [f"m:1 f: {MOST_FUNCTION_LINES + 1} lines"]
    documented = 'def f():\n    """' + "word\n" * 100 + '    """\n    return 1\n'
    assert too_long(documented, "m") == []
    assert too_long("x = 1\n" * (MOST_MODULE_LINES + 1), "m") == [
        f"m: {MOST_MODULE_LINES + 1} lines"
    ]


def report() -> str:
    """Sizes of modules and functions, for people: `python tests/test_budget.py`."""
    rows: list[str] = []
    lengths: list[int] = []
    for file in modules():
        source = file.read_text()
        functions = [
            body_lines(node)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        lengths += functions
        name = file.relative_to(PACKAGE.parent).as_posix()
        rows.append(f"{source.count(chr(10)):5}  {max(functions, default=0):4}  {name}")
    lengths.sort()
    tail = f"functions: {len(lengths)}, median {lengths[len(lengths) // 2]} lines, "
    tail += f"90% within {lengths[len(lengths) * 9 // 10]}, longest {lengths[-1]}"
    return "\n".join(["lines  longest function", *rows, tail])


if __name__ == "__main__":
    print(report())
