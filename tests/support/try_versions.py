"""Runs the quick tests with other versions: `python tests/support/try_versions.py floors|latest ENVIRONMENT [PYTEST ARGUMENT ...]`.

``floors`` is the oldest versions that pyproject.toml admits, on this Python. ``latest`` is the newest that the index has, with
pre-releases, on each Python of ``PYTHONS`` that the machine has; one that is missing is skipped and named. torch is the
tested release in both. Needs nothing but Python and an index.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import floors
from reachable import reachable

PYTHONS = ("3.12", "3.13", "3.14")
TOOLS = ["hypothesis", "pytest", "pytest-xdist", "psutil", "orbax-checkpoint", "h5py"]
TOOLS += ["safetensors", "scikit-learn", "matplotlib", "msgpack"]


def python(version: str) -> str | None:
    """The interpreter of a version: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [str(one / "bin" / "python") for one in sorted(pyenv.glob(f"{version}.*"))]
    for program in [shutil.which(f"python{version}"), *reversed(found)]:
        if program and not subprocess.run([program, "-c", ""], capture_output=True).returncode:
            return program
    return None


def tested(program: str, where: str, held: list[str], options: list[str], *more: str) -> int:
    """Makes the environment and runs the tests in it; pytest's exit code."""
    subprocess.run([program, "-m", "venv", where], check=True)
    constraints = Path(where, "held.txt")
    constraints.write_text("\n".join(held))
    program = f"{where}/bin/python"
    install = [program, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    index = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
    if reachable(f"{index}/torch/"):
        install += ["--extra-index-url", index]
    subprocess.run([*install, *options, "-c", str(constraints), "-e", ".[all]", *TOOLS], check=True)
    quick = ["-m", "not soak", "--quick", "-n", "2", "--dist", "loadfile", *more]
    return subprocess.run([program, "-m", "pytest", *quick]).returncode


def main(which: str, environment: str, *arguments: str) -> int:
    if which == "floors":
        return tested(sys.executable, environment, floors.constraints(), [], *arguments)
    torch = [one for one in floors.constraints() if one.startswith("torch==")]
    codes: dict[str, int | str] = {}
    for version in PYTHONS:
        interpreter = python(version)
        if interpreter is None:
            codes[version] = "skipped: this machine has no such Python"
            continue
        where, newest = f"{environment}-{version}", ["--pre", "--upgrade"]
        codes[version] = tested(interpreter, where, torch, newest, *arguments)
    for version, code in codes.items():
        print(f"Python {version}: {code or 'passed'}")
    ran = [code for code in codes.values() if isinstance(code, int)]
    return int(any(ran) or not ran)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
