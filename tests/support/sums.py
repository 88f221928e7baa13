"""What the house weighs: lines, characters, files, words, long sentences, private docstrings of several paragraphs."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.paths import INTEGRATIONS, PACKAGE, ROOT, modules

LONG_SENTENCE_WORDS = 35
_PRIVATE_IMPORT = re.compile(r"(from|import) +ckpt_\w+(\.\w+)*(\._| import _)")
_SECTION = re.compile(r"\n\s*\n|^(Args|Attributes|Raises|Returns|Yields):", re.MULTILINE)


def python(*folders: Path) -> list[Path]:
    """The sources in these folders."""
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


CORE = python(PACKAGE)
ADAPTERS = python(*INTEGRATIONS.glob("*/ckpt_*"))
TESTS = python(ROOT / "tests")
PAGES = [
    *ROOT.glob("docs/**/*.md"),
    *INTEGRATIONS.glob("*/README.md"),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
]


def lines(files: Iterable[Path]) -> int:
    return sum(file.read_text().count("\n") for file in files)


def characters(files: Iterable[Path]) -> int:
    return sum(len(file.read_text()) for file in files)


def words(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().split()) for file in files)


def sentences(page: str) -> Iterator[str]:
    """The sentences of a page, without its code, tables and headings."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\s*(\||#|!\[|<).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", text))
    for block in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text):
        yield from re.split(r"(?<=[.!?])\s+", " ".join(block.split()))


def long_sentences(page: str) -> list[str]:
    return [
        one for one in sentences(page) if len(re.findall(r"[\w'-]+", one)) > LONG_SENTENCE_WORDS
    ]


def imports_private_names(source: str) -> bool:
    """Whether a test knows more of the product than its users can."""
    return bool(_PRIVATE_IMPORT.search(source))


def exported(trees: dict[str, ast.Module]) -> set[str]:
    """Full names that a public module has from a private one, through any number of steps."""
    imports = {
        name: [
            (alias.asname or alias.name, f"{node.module}.{alias.name}")
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and not node.level
            for alias in node.names
        ]
        for name, tree in trees.items()
    }
    found: set[str] = set()
    todo = [
        full for name, of in imports.items() if not re.search(r"(^|\.)_", name) for _, full in of
    ]
    while todo:
        full = todo.pop()
        if full not in found:
            found.add(full)
            module, _, last = full.rpartition(".")
            todo += [inner for name, inner in imports.get(module, ()) if name == last]
    return found


def private_docstrings_with_sections() -> list[str]:
    """What nobody outside sees, and has more than one paragraph of docstring."""
    trees = {name: ast.parse(file.read_text()) for name, file in modules().items()}
    public = exported(trees)
    found: list[str] = []

    def visit(node: ast.AST, name: str, seen: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                visit(child, name, seen)
                continue
            full = f"{name}.{child.name}"
            hidden = child.name.startswith("_") and not child.name.endswith("__")
            shown = (seen or full in public) and not hidden
            if not shown and _SECTION.search(ast.get_docstring(child) or ""):
                found.append(full)
            visit(child, full, shown and isinstance(child, ast.ClassDef))

    for name, tree in trees.items():
        visit(tree, name, name in public or not re.search(r"(^|\.)_", name))
    return found
