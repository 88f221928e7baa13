"""The report of a run: data, scripts and style in one HTML text that needs no network. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from ckpt_core._format.plain_json import strict_json

SCRIPTS = (
    "base.js",
    "theme.js",
    "data.js",
    "overview.js",
    "steps.js",
    "treemap.js",
    "sharding.js",
    "leaf.js",
    "tree.js",
    "compare.js",
    "health.js",
    "main.js",
)
"""In the order in which they run; each is a module of its own that adds to the object ``report``."""
_SECTIONS = {name: name.capitalize() for name in ("overview", "steps", "bytes", "leaves", "compare", "health")}  # fmt: skip


def page(data: Mapping[str, Any]) -> str:
    """The HTML of a report, of the data that ``as_json`` gives; nothing of it is taken for markup."""
    path = str(data["path"])
    title = path.rstrip("/").rpartition("/")[2] or path
    links = (f'<a href="#{id_}">{name}</a>' for id_, name in _SECTIONS.items())
    parts = {
        "TITLE": _safe(title),
        "STYLE": _text("page", "style.css"),
        "LINKS": "".join(links),
        "SECTIONS": "\n".join(f'  <section id="{id_}"></section>' for id_ in _SECTIONS),
        "LIBRARY": _text("vendor", "echarts.min.js"),
        "DATA": embedded(data),
        "SCRIPTS": "".join(f"<script>\n{_text('page', name)}</script>\n" for name in SCRIPTS),
    }
    pieces = _text("page", "page.html").split("%%")
    return "".join(parts.get(piece, piece) for piece in pieces)


def embedded(value: Any) -> str:
    """JSON that may stand in a script element, whatever names are in it. It is ASCII, so U+2028 cannot end a line of
    JavaScript; without ``<``, ``>`` and ``&`` nothing in it can end the element or begin a comment.
    """
    text = strict_json(value)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _text(folder: str, name: str) -> str:
    return (files("ckpt_core.report") / folder / name).read_text(encoding="utf-8")


def _safe(text: str) -> str:
    """Text without markup; surrogates of a path that is no text are spelled out."""
    return escape(text.encode("utf-8", "backslashreplace").decode())
