"""Which versions are installed, and which this package asks for; imports none of them."""

from __future__ import annotations

import re
from importlib import metadata

DISTRIBUTION = "ckpt-core"
_OTHERS = ("jaxlib", "orbax-checkpoint", "safetensors", "equinox", "h5py")
_FLOOR = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*>=\s*([0-9][0-9.]*)")
_EXTRAS = re.compile(r"extra == ['\"](flax|keras|torchax|grain)['\"]")


def floors() -> dict[str, str]:
    """Oldest version of each package that this one works with, by its own metadata; empty if it is not installed."""
    try:
        asked = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for line in asked:
        if ("extra" not in line or _EXTRAS.search(line)) and (floor := _FLOOR.match(line)):
            found[floor[1].lower().replace("_", "-")] = floor[2]
    return found


def installed() -> dict[str, str]:
    """Versions of the packages that matter, as far as they are installed."""
    found: dict[str, str] = {}
    for name in (DISTRIBUTION, *floors(), *_OTHERS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, without zeros at the end: ``0.12.0rc1`` is ``(0, 12)``."""
    leading = re.match(r"[0-9.]*", version)
    found = [int(part) for part in re.findall("[0-9]+", leading[0] if leading else "")]
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)


def is_older(version: str, floor: str) -> bool:
    """Whether a version is below a floor; ``2`` and ``2.0`` are one version."""
    return numbers(version) < numbers(floor)
