"""The picture of `make demo` shows every process and every kill of the run that it is given."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.support.paths import EXAMPLES


def test_each_process_has_a_line_and_each_kill_its_crosses(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("picture", EXAMPLES / "_picture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    straight = [(step, 4.0 / (step + 1)) for step in range(20)]
    lives = [(straight[:8], True), (straight[5:14], True), ([], True), (straight[10:], False)]
    module.draw(tmp_path / "loss.svg", straight, lives)
    root = ElementTree.fromstring((tmp_path / "loss.svg").read_text())
    space = "{http://www.w3.org/2000/svg}"
    lines = [len(line.get("points", "").split()) for line in root.iter(f"{space}polyline")]
    assert lines == [20, 8, 9, 10]
    crosses = [path for path in root.iter(f"{space}path") if "l8 8m0 -8l-8 8" in path.get("d", "")]
    assert len(crosses) == 4  # two a kill, but for the process that computed no step
    title = root.find(f"{space}title")
    assert title is not None and (title.text or "").startswith("3 times kill -9")
