"""The site is built without a warning, and its API pages leave no public name out."""

import ast
import os
import re
import subprocess
import sys

import pytest

import ckpt_core
import ckpt_core.convert
import ckpt_core.testing
from tests.support.paths import INTEGRATIONS, ROOT

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
