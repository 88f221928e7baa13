"""Makes pages of READMEs and notebooks, and links of pages to files outside of docs/ lead to the repository (a hook of MkDocs)."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/ckpt-jax/ckpt/blob/main/"
PAGES = {
    "README.md": "index.md",
    "integrations/flax_nnx/README.md": "frameworks/nnx.md",
    "integrations/grain/README.md": "frameworks/grain.md",
    "integrations/keras/README.md": "frameworks/keras.md",
    "integrations/orbax/README.md": "frameworks/orbax.md",
    "integrations/torchax/README.md": "frameworks/torchax.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "docs/notebooks/first_steps.ipynb": "notebooks/first_steps.md",
    "docs/notebooks/looking.ipynb": "notebooks/looking.md",
}
"""File of the repository -> the page that is made of it."""
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made of files outside of docs/, and of notebooks."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        name = posixpath.basename(source)
        text = _cells(text) if name.endswith(".ipynb") else text
        text = _relinked(text, source, page)
        if name.endswith(".ipynb"):
            text += f"\n\n[This page as a notebook]({name})\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page that is a file of docs/."""
    path = page.file.src_uri
    return markdown if path in PAGES.values() else _relinked(markdown, f"docs/{path}", path)


def _cells(notebook: str) -> str:
    """The cells of a notebook as Markdown."""
    return "\n\n".join(
        text if kind == "markdown" else f"```python\n{text}\n```"
        for cell in json.loads(notebook)["cells"]
        for kind, text in [(cell["cell_type"], "".join(cell["source"]))]
    )


def _relinked(text: str, source: str, page: str) -> str:
    def change(found: re.Match[str]) -> str:
        link = found[1].removeprefix(REPOSITORY)
        target, sign, anchor = link.partition("#")
        if link == found[1]:  # not to the repository by its address
            if "://" in link or not target or link.startswith("mailto:"):
                return found[0]
            target = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if target in PAGES:
            target = f"docs/{PAGES[target]}"
        if not target.startswith("docs/"):
            return f"]({REPOSITORY}{target}{sign}{anchor})"
        here = posixpath.dirname(page) or "."
        return f"]({posixpath.relpath(target.removeprefix('docs/'), here)}{sign}{anchor})"

    return _LINK.sub(change, text)
