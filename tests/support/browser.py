"""Pages as Chromium draws them, and charts as Node draws them, where these are installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

# What the scripts of a page ask of a browser before they draw.
_STUBS = """
globalThis.matchMedia = () => ({ matches: false, addEventListener() {} });
globalThis.navigator ??= {};
globalThis.ResizeObserver = class { observe() {} unobserve() {} };
globalThis.getComputedStyle = () => ({ fontFamily: "sans-serif", getPropertyValue: (name) => `#0000${name.at(-1)}0` });
globalThis.document = { documentElement: { dataset: {} }, querySelector: () => ({ prepend() {} }), getElementById: () => null, createElement: () => ({ getContext() {} }) };
"""


def in_browser(file: Path, folder: Path, width: int, script: str = "") -> tuple[str, str]:
    """The page as Chromium has drawn it, and what it wrote to its log."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine")
    copy = folder / f"copy{width}.html"
    copy.write_text(file.read_text().replace("</body>", f"<script>{script}</script></body>"))
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *("--disable-sync", "--enable-logging=stderr", "--v=0", f"--window-size={width},900"),
            *(f"--user-data-dir={folder}/profile{width}", "--virtual-time-budget=3000"),
            *("--dump-dom", copy.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.stdout, done.stderr


def drawn_by_node(
    script: str, calls: Sequence[tuple[str, Any]], width: int = 640
) -> list[list[str]]:
    """What the shipped ECharts makes of the option that ``report.<name>(chart)`` of a page's script gives: SVG, and the
    HTML of the first point's tooltip."""
    if shutil.which("node") is None:
        pytest.skip("no node on this machine")
    report = files("ckpt_core.report")
    texts = [(report / "page" / name).read_text() for name in ("base.js", "theme.js")]
    draw = f"""
process.on("uncaughtException", (error) => {{ console.error(error.message); process.exit(1); }});
process.stdout.write(JSON.stringify({json.dumps(calls)}.map(([name, chart]) => {{
  const drawn = echarts.init(null, null, {{ renderer: "svg", ssr: true, width: {width}, height: 400 }});
  const option = report[name](chart);
  drawn.setOption({{ ...option, animation: false }});
  const [first] = option.series;
  return [drawn.renderToSVGString(), option.tooltip.formatter({{ seriesName: first.name, data: first.data[0] }})];
}})), () => process.exit(0));  // ECharts' clock would go on
"""
    library = (report / "vendor" / "echarts.min.js").read_text()
    code = "\n".join([_STUBS, library, *texts, f"try {{ {script} }} catch {{}}", draw])
    done = subprocess.run(["node", "-"], input=code, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-700:]
    return json.loads(done.stdout)
