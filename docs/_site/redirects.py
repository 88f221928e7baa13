"""Pages that moved: each old address leads to the page that has the text now (a hook of MkDocs)."""

from __future__ import annotations

import os
import posixpath
from pathlib import Path
from typing import Any

MOVED = {
    "guide/clusters.md": "guide/processes.md",
    "guide/command_line.md": "looking.md",
    "guide/notebooks.md": "guide/recipes.md",
    "guide/on_disk.md": "looking.md",
    "promises.md": "guide/promises.md",
    "readme.md": "index.md",
    "releasing.md": "contributing.md",
    "scaling.md": "measurements.md",
    "moving/big_vision.md": "moving/index.md",
    "moving/brax.md": "moving_from_orbax.md",
    "moving/equinox.md": "moving/index.md",
    "moving/flax_checkpoints.md": "moving/index.md",
    "moving/flax_gemma.md": "moving_from_orbax.md",
    "moving/kauldron.md": "moving_from_orbax.md",
    "moving/keras.md": "moving/index.md",
    "moving/maxtext.md": "moving_from_orbax.md",
    "moving/orbax_v0.md": "moving_from_orbax.md",
    "moving/orbax_v1.md": "moving_from_orbax.md",
    "moving/torch_dcp.md": "moving/index.md",
    "moving/torch_save.md": "moving/index.md",
}
"""Old page -> new page, both as files below docs/."""


def on_post_build(config: Any, **_: Any) -> None:
    for old, new in MOVED.items():
        here, there = (page.removesuffix(".md").removesuffix("index") or "." for page in (old, new))
        target = posixpath.relpath(there, here) + "/"
        file = Path(config["site_dir"], here, "index.html")
        os.makedirs(file.parent, exist_ok=True)
        file.write_text(
            f'<meta http-equiv="refresh" content="0; url={target}"><a href="{target}">Moved</a>\n'
        )
