"""Pages as Chromium draws them, where it is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest


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
