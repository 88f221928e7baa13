"""The floors of pyproject.toml: `python tests/support/floors.py` prints them as constraints for pip.

With them pip installs the oldest versions that the package says it works with; `make test-floors` runs the tests there.
It needs nothing that is to be installed.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What only the tests and the documentation need is not a claim about the package.
NOT_PROMISED = ("all", "check", "demo", "docs", "test")
# Built for the CPU in one version only, wherever the tests run: see constraints.txt.
HELD = {"torch"}
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)>=(?P<version>[0-9][0-9A-Za-z.]*)(,<[0-9.]+)?")


def floors() -> dict[str, str]:
    """Package to the oldest version that pyproject.toml admits, of the core and every extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra, more in project["optional-dependencies"].items():
        if extra not in NOT_PROMISED:
            requirements += [one for one in more if not one.startswith("ckpt-core[")]
    found: dict[str, str] = {}
    for requirement in requirements:
        match = _REQUIREMENT.fullmatch(requirement)
        assert match, f"a requirement that is no floor: {requirement!r}"
        name, version = match["name"], match["version"]
        assert found.setdefault(name, version) == version, f"two floors of {name}"
    return found


def tested() -> dict[str, str]:
    """Package, in lower case, to the version that constraints.txt holds it at."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    held = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name.lower(): version for name, version in held}


def constraints() -> list[str]:
    """Lines for `pip install -c`: every floor as the version to be installed."""
    held = tested()
    return [
        f"{name}=={held[name] if name in HELD else version}" for name, version in floors().items()
    ]


if __name__ == "__main__":
    print("\n".join(constraints()))
