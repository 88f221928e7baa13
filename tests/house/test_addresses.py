"""No page names an address that nobody owns, and each relative link leads to a file of a clone."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support.paths import ROOT

OURSELVES = Path(__file__).relative_to(ROOT)
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "integrations").glob("*/README.md")),
]
INVENTED = re.compile(r"ckpt-jax|github\.com/ckpt\b|pypi\.org/project/ckpt", re.IGNORECASE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def committed() -> list[Path]:
    """The text files of the repository."""
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip("not a clone")
    files = [Path(line) for line in done.stdout.splitlines()]
    return [file for file in files if (ROOT / file).is_file() and file != OURSELVES]


def test_no_file_has_an_invented_address() -> None:
    found = [
        f"{file}: {match[0]}"
        for file in committed()
        if (match := INVENTED.search((ROOT / file).read_text(errors="replace")))
    ]
    assert found == []


def test_no_page_installs_what_is_not_on_the_index() -> None:
    """Until there is a release: from a clone, or a wheel that somebody made of it."""
    notebooks = sorted((ROOT / "docs").rglob("*.ipynb"))
    installs = re.compile(r"pip install[^\n`]*\bckpt[-_]core(?!-[\d*])")
    found = [str(page) for page in (*PAGES, *notebooks) if installs.search(page.read_text())]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


def test_the_description_of_the_wheel_has_no_link() -> None:
    """On the page of an index a relative link leads nowhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "restore_latest" in project["readme"]["text"]
    assert not LINK.search(project["readme"]["text"]) and "urls" not in project
