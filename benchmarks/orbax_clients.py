"""Which of Orbax's names public programs use, and which of them ``ckpt_orbax`` offers.

    python benchmarks/orbax_clients.py CLONE [CLONE ...] [--json counts.json]

Each clone is a directory, or a git directory without a work tree. Python files and the code of notebooks are read
by syntax tree, without tests; nothing of them is run. A use is a place that names something of Orbax: an attribute of a
module, or a name that was imported from one.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib
import json
import pathlib
import re
import subprocess
import types
import warnings
from collections.abc import Iterator
from typing import Any

ROOT = "orbax.checkpoint"


class Uses(ast.NodeVisitor):
    """Counts the dotted names below ``orbax`` in one file."""

    def __init__(self) -> None:
        self.found: collections.Counter[str] = collections.Counter()
        self._names: dict[str, str] = {}
        self._imported: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == "orbax":
                self._names[alias.asname or "orbax"] = alias.name if alias.asname else "orbax"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and (node.module or "").partition(".")[0] == "orbax":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                self._names[alias.asname or alias.name] = full
                self._imported.add(full)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in self._names:
            self.found[".".join([self._names[inner.id], *reversed(parts)])] += 1
        else:
            self.visit(inner)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._names:
            self.found[self._names[node.id]] += 1

    def ended(self) -> collections.Counter[str]:
        """The counts; a name that was imported and not used counts once."""
        for name in self._imported:
            if not any(used == name or used.startswith(name + ".") for used in self.found):
                self.found[name] += 1
        return self.found


def uses_in(source: str) -> collections.Counter[str]:
    """The dotted names of Orbax in the text of a Python file."""
    visitor = Uses()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in strings
        tree = ast.parse(source)
    for node in ast.walk(tree):  # imports may stand anywhere, also below their uses
        if isinstance(node, ast.Import):
            visitor.visit_Import(node)
        elif isinstance(node, ast.ImportFrom):
            visitor.visit_ImportFrom(node)
    visitor.generic_visit(tree)
    return visitor.ended()


def code_of(name: str, text: str) -> str:
    """The Python of a file: all of it, or the cells of a notebook."""
    if not name.endswith(".ipynb"):
        return text
    cells = [cell for cell in json.loads(text).get("cells", []) if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in [*"".join(cell["source"]).splitlines(), ""]]
    return "\n".join(re.sub(r"^(\s*)[!%].*", r"\1pass", line) for line in lines)


def is_test(name: str) -> bool:
    """Whether a file is one of tests, by its path."""
    *folders, last = name.split("/")
    return (
        last.startswith("test_")
        or last.endswith("_test.py")
        or bool({"tests", "test"} & {*folders})
    )


def files_of(clone: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Name and text of the Python files and notebooks that mention Orbax."""
    if (clone / "HEAD").exists():
        git = ["git", f"--git-dir={clone}"]
        found = subprocess.run(
            [*git, "grep", "-lI", "orbax", "HEAD"], capture_output=True, text=True
        )
        for line in found.stdout.splitlines():
            name = line.removeprefix("HEAD:")
            if name.endswith((".py", ".ipynb")):
                yield (
                    name,
                    subprocess.run([*git, "show", line], capture_output=True, text=True).stdout,
                )
        return
    for path in sorted([*clone.rglob("*.py"), *clone.rglob("*.ipynb")]):
        text = path.read_text(errors="replace")
        if "orbax" in text:
            yield path.relative_to(clone).as_posix(), text


def of_orbax(dotted: str) -> str | None:
    """The name below ``orbax.checkpoint`` that is meant, as short as it can be; None for a module or what is not there."""
    found: Any = importlib.import_module(ROOT)
    parts = dotted.removeprefix(ROOT).strip(".").split(".")
    if not dotted.startswith(ROOT) or parts == [""]:
        return None
    for number, part in enumerate(parts, 1):
        try:
            found = importlib.import_module(f"{found.__name__}.{part}")
        except ImportError:
            if not hasattr(found, part):
                return ".".join(parts[:number])
            found = getattr(found, part)
        if not isinstance(found, types.ModuleType):
            return ".".join(parts[:number])
    return None


def status(name: str) -> str:
    """``offered``, ``refused`` or ``not of Orbax 0.12``."""
    refused = importlib.import_module("ckpt_orbax.experimental.emergency").Refused
    ours: Any = importlib.import_module("ckpt_orbax")
    theirs: Any = importlib.import_module(ROOT)
    for part in name.split("."):
        theirs = _below(theirs, part)
        ours = _below(ours, part)
    if ours is not None and not (isinstance(ours, type) and issubclass(ours, refused)):
        return "offered"
    return "refused" if theirs is not None or "_src" in name else "not of Orbax 0.12"


def _below(found: Any, part: str) -> Any:
    if isinstance(found, types.ModuleType):
        try:
            return importlib.import_module(f"{found.__name__}.{part}")
        except ImportError:
            pass
    return getattr(found, part, None)


def count(clones: list[pathlib.Path]) -> dict[str, collections.Counter[str]]:
    """Name of Orbax -> how often each clone uses it."""
    found: dict[str, collections.Counter[str]] = {}
    for clone in clones:
        label = (clone.parent if clone.name == "repo" else clone).name.replace("+", "/")
        for name, text in files_of(clone):
            if is_test(name):
                continue
            try:
                uses = uses_in(code_of(name, text))
            except (SyntaxError, ValueError, KeyError) as error:
                print(f"not read: {label}/{name}: {error}")
                continue
            for dotted, times in uses.items():
                short = of_orbax(dotted)
                if short is not None:
                    found.setdefault(short, collections.Counter())[label] += times
    return found


def report(found: dict[str, collections.Counter[str]]) -> None:
    """Prints the shares, and the names that are not offered."""
    by_status: dict[str, list[tuple[int, int, str]]] = {}
    for name, clients in found.items():
        by_status.setdefault(status(name), []).append((clients.total(), len(clients), name))
    every = sum(clients.total() for clients in found.values())
    clients = {client for counted in found.values() for client in counted}
    print(f"{len(clients)} repositories, {len(found)} names, {every} uses")
    for kind, rows in sorted(by_status.items()):
        total = sum(uses for uses, _, _ in rows)
        print(f"{kind}: {len(rows)} names, {total} uses, {100 * total / every:.1f} %")
        if kind != "offered":
            for uses, count_, name in sorted(rows, reverse=True):
                print(f"  {uses:4} uses in {count_:2}: {name} ({', '.join(found[name])})")


def main() -> None:
    """Counts, and prints what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("clones", nargs="+", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    found = count(given.clones)
    report(found)
    if given.json:
        given.json.write_text(
            json.dumps({name: dict(one) for name, one in sorted(found.items())}, indent=1)
        )


if __name__ == "__main__":
    main()
