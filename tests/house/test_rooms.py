"""No module imports itself in a circle."""

import ast
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.paths import modules


def imported(tree: ast.AST, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules that a module imports while it is imported itself."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module
        else:
            yield from imported(node, known)


def test_no_module_imports_itself_through_others():
    known = modules()
    graph = {
        name: {*imported(ast.parse(file.read_text()), known)} - {name}
        for name, file in known.items()
    }
    assert len(graph) > 300
    graphlib.TopologicalSorter(graph).prepare()  # its error names the circle
