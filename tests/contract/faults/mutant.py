"""The child that opens hostile checkpoints with a ckpt whose bounds were taken out, one by one.

A bound is a `raise` in a module of `ckpt_core`, by file and line. Taken out, it does nothing; where
it only gives another error's type (in an `except`), that error goes on as it is.
"""

from __future__ import annotations

import ast
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[3] / "ckpt_core"


def open_without(bounds: list[list[Any]], cases: list[tuple[str, str]]) -> None:
    """`hostile.open_all` without some bounds, each `[file, line]`."""
    lines: dict[str, set[int]] = {}
    for file, line in bounds:
        lines.setdefault(str(PACKAGE / file), set()).add(line)
    sys.meta_path.insert(0, _Finder(lines))
    import hostile

    hostile.open_all(cases)


class _Finder(importlib.machinery.PathFinder):
    """Finds modules as ever, and has those with a bound to take out loaded by `_Loader`."""

    def __init__(self, lines: dict[str, set[int]]) -> None:
        self._lines = lines

    def find_spec(  # type: ignore[override]
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin in self._lines:
            spec.loader = _Loader(fullname, spec.origin, self._lines[spec.origin])
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, lines: set[int]) -> None:
        super().__init__(name, path)
        self._lines = lines

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(Path(self.path).read_text())
        taken = _Without(self._lines)
        tree = ast.fix_missing_locations(taken.visit(tree))
        assert not self._lines - taken.found, f"no raise in {self.path} at {self._lines}"
        return compile(tree, self.path, "exec")


class _Without(ast.NodeTransformer):
    def __init__(self, lines: set[int]) -> None:
        self._lines = lines
        self._handlers = 0
        self.found: set[int] = set()

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self._handlers += 1
        self.generic_visit(node)
        self._handlers -= 1
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if not self._lines & set(lines):
            return node
        self.found |= self._lines & set(lines)
        nothing = ast.Raise() if self._handlers else ast.Pass()
        return ast.copy_location(nothing, node)
