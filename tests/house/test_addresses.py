"""Each relative link of a page leads to a file of a clone, and no page installs what is on no index."""

import re
import tomllib

import pytest

from tests.support.paths import ROOT

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
