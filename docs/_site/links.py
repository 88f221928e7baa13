"""Makes pages of READMEs and notebooks, and copies the files outside of docs/ that pages link to (a hook of MkDocs).

So a link leads somewhere in a clone and on the site, and neither needs an address of the repository.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "integrations/flax_nnx/README.md": "frameworks/nnx.md",
    "integrations/grain/README.md": "frameworks/grain.md",
    "integrations/keras/README.md": "frameworks/keras.md",
    "integrations/orbax/README.md": "frameworks/orbax.md",
    "integrations/torchax/README.md": "frameworks/torchax.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/results.md": "measurements.md",
    "docs/notebooks/first_steps.ipynb": "notebooks/first_steps.md",
    "docs/notebooks/looking.ipynb": "notebooks/looking.md",
}
"""File of the repository -> the page that is made of it."""
SOURCES = "source/"
"""Where the site keeps other files of the repository: programs of examples/ and benchmarks/."""
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made of files outside of docs/ and of notebooks, and the files that pages link to."""
    copied: set[str] = set()
    for file in files.documentation_pages():
        _relinked(file.content_string, f"docs/{file.src_uri}", file.src_uri, copied)
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        name = posixpath.basename(source)
        text = _cells(text) if name.endswith(".ipynb") else text
        text = _relinked(text, source, page, copied)
        if name.endswith(".ipynb"):
            text += f"\n\n[This page as a notebook]({name})\n"
        if page == "index.md":  # its section has no other page to list
            text = "---\nhide: [navigation]\n---\n" + text
        files.append(File.generated(config, page, content=text))
    for target in sorted(copied):
        content = (ROOT / target).read_text()
        files.append(File.generated(config, SOURCES + target, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page that is a file of docs/."""
    path = page.file.src_uri
    return markdown if path in PAGES.values() else _relinked(markdown, f"docs/{path}", path, set())


def _cells(notebook: str) -> str:
    """The cells of a notebook, and what they show, as Markdown."""
    parts: list[str] = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            shown = output.get("data", output)
            plain = "".join(shown.get("text/plain", shown.get("text", "")))
            parts.append("".join(shown.get("text/html", "")) or f"```text\n{plain}\n```")
    return "\n\n".join(parts)


def _relinked(text: str, source: str, page: str, copied: set[str]) -> str:
    """The text of ``source`` with links as ``page`` needs them; files that the site must copy go into ``copied``."""

    def change(found: re.Match[str]) -> str:
        target, sign, anchor = found[1].partition("#")
        if "://" in target or not target or target.startswith("mailto:"):
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if target in PAGES:
            target = f"docs/{PAGES[target]}"
        elif not target.startswith("docs/"):
            copied.add(target)
            target = f"docs/{SOURCES}{target}"
        here = posixpath.dirname(page) or "."
        return f"]({posixpath.relpath(target.removeprefix('docs/'), here)}{sign}{anchor})"

    return _LINK.sub(change, text)
