"""The version of pyproject.toml in the footer of every page (a hook of MkDocs)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def on_config(config: Any) -> Any:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    later = " and later changes" if any((ROOT / "changes").glob("*.md")) else ""
    config.copyright = f"{project['name']} {project['version']}{later}"
    return config
