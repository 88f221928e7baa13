"""Reads checkpoints that were written on Linux, and tries to save: for systems on which the tests do not run (Windows)."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import ckpt_core as ckpt

GOLDEN = Path(__file__).parents[1] / "contract" / "format" / "golden"
RUN = GOLDEN / "tiers" / "run"


def main() -> None:
    """Raises where something is wrong."""
    loaded = ckpt.load(RUN / "4")
    assert loaded["n"] == 4 and np.asarray(loaded["w"]).tolist() == [4] * 3, loaded
    assert ckpt.load(RUN / "4", as_numpy=True)["w"].tolist() == [4] * 3
    assert ckpt.verify(RUN / "4").ok
    assert "state" in str(ckpt.inspect(RUN / "4"))
    assert ckpt.Checkpointer(RUN, read_only=True).all_steps() == [0, 4]
    for command, *more in (("ls", RUN), ("show", RUN / "4"), ("verify", RUN), ("stats", RUN / "4")):
        subprocess.run(
            [sys.executable, "-m", "ckpt_core.cli", command, *map(str, more)], check=True
        )
    with tempfile.TemporaryDirectory() as folder:
        told = _refusal(Path(folder) / "new")
    assert ("on Windows" in told) == (sys.platform == "win32"), told
    print("read on", sys.platform)


def _refusal(path: Path) -> str:
    try:
        ckpt.save(path, {"w": np.ones(3)})
    except ckpt.CheckpointError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
