"""Where things lie in the working tree."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ckpt_core"
BENCHMARKS = ROOT / "benchmarks"
EXAMPLES = ROOT / "examples"
INTEGRATIONS = ROOT / "integrations"


def modules() -> dict[str, Path]:
    """Every module of the core and of the integrations, by name."""
    roots = [PACKAGE, *sorted(INTEGRATIONS.glob("*/ckpt_*"))]
    found: dict[str, Path] = {}
    for root in roots:
        for file in root.rglob("*.py"):
            parts = file.relative_to(root.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found
