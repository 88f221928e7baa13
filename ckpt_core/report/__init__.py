"""A report of a run: one HTML page that needs no network, and the data that it shows.

``read_report`` reads, ``as_json`` gives plain values, ``page`` writes them into HTML.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from ckpt_core._format.plain_json import strict_json
from ckpt_core.report._facts import Report as Report, as_json as as_json
from ckpt_core.report._read import Request as Request, read_report as read_report

SCRIPTS = ("base", "data", "charts", "overview", "steps", "treemap", "sharding", "leaf", "tree", "compare", "health", "main")  # fmt: skip
"""In the order in which they run, as one script."""


def page(data: Mapping[str, Any]) -> str:
    """The HTML of a report, of the data that ``as_json`` gives; nothing of it is taken for markup."""
    path = str(data["path"])
    title = path.rstrip("/").rpartition("/")[2] or path
    parts = {
        # surrogates of a path that is no text are spelled out
        "TITLE": escape(title.encode("utf-8", "backslashreplace").decode()),
        "STYLE": _text("page/style.css"),
        "LIBRARY": _text("vendor/echarts.min.js"),
        "DATA": embedded(data),
        "SCRIPTS": "\n".join(_text(f"page/{name}.js") for name in SCRIPTS),
    }
    pieces = _text("page/page.html").split("%%")
    return "".join(parts.get(piece, piece) for piece in pieces)


def embedded(value: Any) -> str:
    """JSON for a script element, which no name in it can end: it is ASCII, and has no ``<``, ``>`` or ``&``."""
    text = strict_json(value)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _text(name: str) -> str:
    return (files("ckpt_core.report") / name).read_text(encoding="utf-8")
