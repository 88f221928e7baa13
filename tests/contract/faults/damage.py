"""Changes to the files of a checkpoint, and the child that loads after each of them.

A change is plain JSON, so that it travels to a child: `["flip", file, byte, bit]`,
`["cut", file, size]`, `["grow", file]`, `["zero", file]`, `["zero_range", file, start, stop]`,
`["delete", file]`, `["swap", file, other]`, `["replace", file, path]`,
`["replace_item", item, path]`.
"""

import shutil
from pathlib import Path
from typing import Any

import child
import jax
import ml_dtypes
import numpy as np
from child import differences

import ckpt_core as ckpt

Change = list[Any]

# A few of each kind of leaf, the last one above the limit of small leaves (256 KiB).
LARGE = (5, 128, 128)


def tree(version: int) -> dict[str, Any]:
    """A state with one leaf of each kind; every version has other values in every leaf."""
    rng = np.random.default_rng(version)
    return {
        "f32": jax.device_put(rng.standard_normal((4, 5), np.float32)),
        "bf16": jax.device_put(rng.standard_normal(6).astype(ml_dtypes.bfloat16)),
        "int": jax.device_put(rng.integers(0, 99, (3,), np.int32)),
        "bool": rng.random(11) < 0.5,
        "text": f"text of version {version}",
        "numpy": rng.standard_normal(3),
        "key": jax.random.key(version),
        "scalars": [version, version / 7, bytes([version])],
        "large": jax.device_put(rng.standard_normal(LARGE, np.float32)),
    }


def comparable(tree: dict[str, Any]) -> dict[str, Any]:
    """The same with every array on the host and the key as its data: for `differences`."""
    return jax.tree.map(_to_host, tree)


def _to_host(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def make(path: str, version: int) -> None:
    """Saves `tree(version)`; run in a child so that pytest keeps its threads to itself."""
    ckpt.save(path, tree(version))
    child.report(verified=ckpt.verify(path).ok)


def changed(directory: Path, change: Change) -> dict[str, bytes | None]:
    """What the change makes of files: their new bytes, or None where one is gone."""
    kind, name, *rest = change
    if kind == "replace_item":
        stale = Path(rest[0])
        gone = dict.fromkeys(str(one.relative_to(directory)) for one in _files(directory / name))
        return gone | {
            f"{name}/{one.relative_to(stale)}": one.read_bytes() for one in _files(stale)
        }
    data = (directory / name).read_bytes()
    match kind:
        case "flip":
            byte, bit = rest
            return {name: data[:byte] + bytes([data[byte] ^ 1 << bit]) + data[byte + 1 :]}
        case "cut":
            return {name: data[: rest[0]]}
        case "grow":
            return {name: data + b"\0"}
        case "zero":
            return {name: bytes(len(data))}
        case "zero_range":
            start, stop = rest
            return {name: data[:start] + bytes(stop - start) + data[stop:]}
        case "delete":
            return {name: None}
        case "swap":
            return {name: (directory / rest[0]).read_bytes(), rest[0]: data}
        case "replace":
            return {name: Path(rest[0]).read_bytes()}
    raise ValueError(kind)


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _write(directory: Path, files: dict[str, bytes | None]) -> None:
    for name, data in files.items():
        # A new file: a mapping of the old one, if any is left, keeps seeing the old one.
        (directory / name).unlink(missing_ok=True)
        if data is not None:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)


def load_damaged(original: str, scratch: str, version: int, changes: list[Change]) -> None:
    """Applies one change after the other, each to a whole copy, and reports what a load does ("same", "raised", or what is wrong);
    the number of the change before, so that a crash can be told from the last line.
    """
    expected = comparable(tree(version))
    copy = Path(scratch)
    shutil.copytree(original, copy)
    for number, change in enumerate(changes):
        files = changed(copy, change)
        before = {
            name: (copy / name).read_bytes() if (copy / name).exists() else None for name in files
        }
        if files == before:  # such as zeros where zeros were
            child.report(number=number, outcome="no change")
            continue
        _write(copy, files)
        child.report(number=number, loading=True)
        child.report(number=number, **_load(copy, expected))
        _write(copy, before)


def load_untouched(original: str, scratch: str, version: int, name: str) -> None:
    """Loads a copy in which one file was rewritten by the same bytes."""
    copy = Path(scratch)
    shutil.copytree(original, copy)
    _write(copy, {name: (copy / name).read_bytes()})
    child.report(**_load(copy, comparable(tree(version))))


def _load(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for as_numpy in (False, True):
        outcome, text, where = _outcome(path, expected, as_numpy=as_numpy)
        seen["as_numpy" if as_numpy else "outcome"] = outcome
        seen["text"] = text
        seen["where"] = where
        if outcome not in ("same", "raised"):
            seen["outcome"] = outcome
            break
    try:
        seen["verified"] = ckpt.verify(path).ok
    except ckpt.CheckpointError as error:
        seen["verified"] = f"raised {type(error).__name__}"
    except Exception as error:
        seen["outcome"] = f"verify: {type(error).__name__}: {error}"
    return seen


def _outcome(path: Path, expected: Any, *, as_numpy: bool) -> tuple[str, str, list[str | None]]:
    try:
        loaded = ckpt.load(path, as_numpy=as_numpy)
    except ckpt.CheckpointError as error:
        where = [getattr(error, "file", None), getattr(error, "leaf", None)]
        return "raised", f"{type(error).__name__}: {error}", where
    except Exception as error:
        return f"untyped {type(error).__name__}: {error}", "", []
    wrong = differences(comparable(loaded), expected)
    return (f"SILENT: {wrong}" if wrong else "same"), "", []
