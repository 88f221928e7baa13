"""Small training states that differ in every leaf from version to version, and exact equality."""

from typing import Any

import ml_dtypes
import numpy as np

# Above the limit under which a leaf is stored as a small key, so that both ways are used.
LARGE_SHAPE = (300, 256)
FROZEN = np.random.default_rng(7).standard_normal((1024, 1024), dtype=np.float32)
"""A leaf that is the same in every version: steps share its file."""


def state(version: int) -> dict[str, Any]:
    """The state of `version`; no leaf is of jax, so that no backend has to start."""
    rng = np.random.default_rng(version)
    return {
        "params": {
            "w": rng.standard_normal((16, 16), dtype=np.float32),
            "b": rng.standard_normal(7).astype(ml_dtypes.bfloat16),
            "large": rng.standard_normal(LARGE_SHAPE, dtype=np.float32),
        },
        "opt": [rng.integers(0, 1000, 5, dtype=np.int32), rng.random(()), None],
        "mask": rng.random(9) < 0.5,
        "step": version,
        "name": f"version {version}",
    }


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where `a` and `b` are not the same bit for bit, types included; empty when they are."""
    if isinstance(a, np.ndarray | np.generic) and isinstance(b, np.ndarray | np.generic):
        kinds = (type(a), a.dtype, a.shape) == (type(b), b.dtype, b.shape)
        return [] if kinds and a.tobytes() == b.tobytes() else [path]
    if type(a) is not type(b):
        return [f"{path} ({type(a).__name__}, {type(b).__name__})"]
    if isinstance(a, dict):
        found = [] if a.keys() == b.keys() else [f"{path} keys"]
        return found + [
            line for key in a if key in b for line in differences(a[key], b[key], f"{path}/{key}")
        ]
    if isinstance(a, list | tuple):
        found = [] if len(a) == len(b) else [f"{path} length"]
        pairs = enumerate(zip(a, b, strict=False))
        return found + [line for i, (x, y) in pairs for line in differences(x, y, f"{path}/{i}")]
    return [] if a == b else [path]


def version_of(loaded: Any) -> int:
    """Which version `loaded` is; fails where it is none exactly, a mix above all."""
    if isinstance(loaded, dict) and "frozen" in loaded:
        loaded = dict(loaded)
        assert not differences(loaded.pop("frozen"), FROZEN), "the frozen leaf differs"
    version = loaded["step"] if isinstance(loaded, dict) else None
    assert type(version) is int, f"no state of any version: {loaded!r}"
    wrong = differences(loaded, state(version))
    assert not wrong, f"says it is version {version}, but differs at {wrong}"
    return version
