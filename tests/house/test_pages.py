"""Pages: those that promise to be complete are, links lead somewhere, and the site is built without a warning."""

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest

import ckpt_core
import ckpt_core as ckpt
import ckpt_core.convert
import ckpt_core.testing
from tests.support.paths import INTEGRATIONS, ROOT

DOCS = ROOT / "docs"


def test_every_public_error_has_an_entry():
    text = (DOCS / "troubleshooting.md").read_text()
    entries = dict(re.findall(r"^## `(\w+)`(?: \(`(\w+)`\))?$", text, re.MULTILINE))
    public = {name: getattr(ckpt, name) for name in ckpt.__all__}
    errors = {
        name: value
        for name, value in public.items()
        if inspect.isclass(value) and issubclass(value, ckpt.CheckpointError)
    }
    assert len(errors) >= 9
    assert set(entries) - {"TypeError"} == set(errors)
    for name, builtin in entries.items():
        bases = [base.__name__ for base in getattr(errors.get(name), "__bases__", ())]
        assert not builtin or builtin in bases, name


def test_every_kind_of_mismatch_is_told():
    text = (DOCS / "troubleshooting.md").read_text()
    kinds = re.findall(r"``(\w+)``", (ckpt.Mismatch.__doc__ or "").partition("saved:")[0])
    assert len(kinds) >= 8
    for kind in kinds:
        assert f"`{kind}`" in text, kind


def test_what_the_page_has_of_errors_is_so(tmp_path):
    one, state = tmp_path / "one", {"params": {"w": np.ones((4, 8))}, "step": 7}
    ckpt.save(one, state)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        ckpt.save(one, state)
    with pytest.raises(ckpt.StructureMismatch) as differs:
        ckpt.load(one, {"params": {"w": np.ones((4, 9))}, "stp": 0})
    assert {at.kind for at in differs.value.mismatches} == {"missing", "unexpected", "shape"}
    with pytest.raises(ckpt.UnsupportedLeaf) as refused:
        ckpt.save(tmp_path / "two", {"run": {"lock": object()}})
    assert (refused.value.leaf, refused.value.type_name) == ("run/lock", "object")


def test_the_page_of_the_promises_names_folders_of_tests_for_each():
    text = (DOCS / "guide" / "promises.md").read_text()
    promised = re.split(
        r"^\d\. \*\*", text.partition("## What was never run")[0], flags=re.MULTILINE
    )[1:]
    assert len(promised) == 9
    folders = {one.name for one in ROOT.glob("tests/*/*") if one.is_dir()}
    for one in promised:
        assert set(re.findall(r"<code>(\w+)</code>", one)) & folders, one
    named = re.findall(r"<code>(\w+)</code>", text) + re.findall(
        r"`([a-z_]+)`", text.partition("Beyond these")[2].partition("## ")[0]
    )
    assert len(named) > 30 and set(named) <= folders


PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "integrations").glob("*/README.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_no_page_installs_what_is_not_on_the_index():
    """Until there is a release: from a clone, or a wheel that somebody made of it."""
    notebooks = sorted((ROOT / "docs").rglob("*.ipynb"))
    installs = re.compile(r"pip install[^\n`]*\bckpt[-_]core(?!-[\d*])")
    found = [str(page) for page in (*PAGES, *notebooks) if installs.search(page.read_text())]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


def test_the_description_of_the_wheel_has_no_link():
    """On the page of an index a relative link leads nowhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "restore_latest" in project["readme"]["text"]
    assert not LINK.search(project["readme"]["text"]) and "urls" not in project


API = ROOT / "docs" / "api"


def test_it_is_built_strictly(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install 'ckpt-core[docs]'")
    pytest.importorskip("mkdocstrings", reason="pip install 'ckpt-core[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    start = (tmp_path / "index.html").read_text()
    assert "restore_latest" in start and 'href="guide/saving/"' in start
    assert "md-tabs" in start
    assert (tmp_path / "source" / "examples" / "llama_weights.py").exists()  # a page links to it
    for old in re.findall(
        r'^    "(.+)\.md": ', (ROOT / "docs/_site/redirects.py").read_text(), re.M
    ):
        moved = (tmp_path / old / "index.html").read_text()
        assert (tmp_path / old / re.findall(r'url=(.+?)"', moved)[0] / "index.html").exists(), old
    shown = (tmp_path / "api" / "core" / "index.html").read_text()
    assert 'id="ckpt_core.Checkpointer.restore_latest"' in shown
    assert "&gt;&gt;&gt;" in shown  # examples are code, not quotations
    for notebook in (ROOT / "docs").rglob("*.ipynb"):  # a page, and a file to be downloaded
        made = (tmp_path / "notebooks" / notebook.stem / "index.html").read_text()
        assert notebook.name in made and "highlight" in made
        assert (tmp_path / "notebooks" / notebook.name).read_text() == notebook.read_text()


def test_every_public_name_is_on_a_page_of_the_api():
    text = "".join(page.read_text() for page in API.glob("*.md"))
    shown = set(re.findall(r"::: ckpt_core\.(?:_run\.policies\.)?(\w+)", text))
    assert set(ckpt_core.__all__) <= shown


def test_so_is_what_tests_and_conversions_use():
    text = "".join(page.read_text() for page in API.glob("*.md"))
    assert set(ckpt_core.testing.__all__) <= set(re.findall(r"::: ckpt_core\.testing\.(\w+)", text))
    offered = {name for name in vars(ckpt_core.convert) if name.startswith(("import_", "export_"))}
    assert offered == set(re.findall(r"::: ckpt_core\.convert\.(\w+)", text))


@pytest.mark.parametrize("framework", ["flax_nnx", "grain", "keras", "torchax"])
def test_so_is_what_an_adapter_offers(framework):
    """Read from the source: the framework need not be installed."""
    source = (INTEGRATIONS / framework / f"ckpt_{framework}" / "__init__.py").read_text()
    listed = next(
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    apart = {"ADAPTER", "KerasOrbaxCheckpointManager"}  # what is found by itself, and a second name
    offered = {name for name in listed if not name.endswith("Adapter")} - apart
    text = (API / "frameworks.md").read_text()
    assert offered == set(re.findall(rf"::: ckpt_{framework}\.(\w+)", text))
