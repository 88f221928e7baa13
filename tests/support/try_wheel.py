"""Installs a wheel with each extra alone into an empty environment, and runs the first block of that framework's page.

    python tests/support/try_wheel.py dist/ckpt_core-0.1.0-py3-none-any.whl [EXTRA ...]

Needs nothing but Python and an index. The block runs twice: what trains goes on from where the first run ended.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# extra -> page, how many of its blocks make the first program, further packages that it imports
PAGES = {
    "": ("docs/frameworks/jax.md", 1, ["optax"]),
    "equinox": ("docs/frameworks/equinox.md", 2, []),
    "flax": ("integrations/flax_nnx/README.md", 1, []),
    "flax,grain": ("README.md", 2, []),
    "grain": ("integrations/grain/README.md", 1, []),
    "keras": ("integrations/keras/README.md", 1, []),
    "torchax": ("integrations/torchax/README.md", 2, []),
}


def try_extra(wheel: Path, extra: str) -> None:
    """Raises CalledProcessError if it cannot be installed, or its page does not run."""
    page, count, more = PAGES[extra]
    code = "\n".join(BLOCK.findall((ROOT / page).read_text())[:count])
    code = code.replace("total_steps = 10_000", "total_steps = 301")
    with tempfile.TemporaryDirectory() as folder:
        venv.create(f"{folder}/venv", with_pip=True)
        python = f"{folder}/venv/bin/python"
        asked = f"{wheel.resolve()}[{extra}]" if extra else str(wheel.resolve())
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), asked, *more], check=True)
        plain = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        for run in ("first", "second"):
            subprocess.run([python, "-c", code], cwd=folder, env=plain, check=True, timeout=300)
            print(f"[{extra or 'core'}] {page}: {run} run passed", flush=True)


if __name__ == "__main__":
    for name in sys.argv[2:] or PAGES:
        try_extra(Path(sys.argv[1]), name)
