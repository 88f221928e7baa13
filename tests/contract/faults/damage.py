"""Changes to the files of a checkpoint, and the child that loads after each of them.

A change is plain JSON, so that it travels to a child: `["flip", file, byte, bit]`,
`["cut", file, size]`, `["grow", file]`, `["zero", file]`, `["zero_range", file, start, stop]`,
`["empty", file]`, `["delete", file]`, `["swap", file, other]`, `["replace", file, path]`,
`["replace_item", item, path]`.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import child
import jax
import ml_dtypes
import numpy as np
from states import differences

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


def apply(directory: Path, change: Change) -> None:
    """Makes one change; what it touches was copied before, see `_restored`."""
    kind, name, *rest = change
    file = directory / name
    match kind:
        case "flip":
            data = bytearray(file.read_bytes())
            data[rest[0]] ^= 1 << rest[1]
            file.write_bytes(data)
        case "cut":
            os.truncate(file, rest[0])
        case "grow":
            with file.open("ab") as stream:
                stream.write(b"\0")
        case "zero":
            file.write_bytes(bytes(file.stat().st_size))
        case "zero_range":
            data = bytearray(file.read_bytes())
            data[rest[0] : rest[1]] = bytes(len(data[rest[0] : rest[1]]))
            file.write_bytes(data)
        case "empty":
            file.write_bytes(b"")
        case "delete":
            file.unlink()
        case "swap":
            other = directory / rest[0]
            mine, theirs = file.read_bytes(), other.read_bytes()
            file.write_bytes(theirs)
            other.write_bytes(mine)
        case "replace":
            file.write_bytes(Path(rest[0]).read_bytes())
        case "replace_item":
            shutil.rmtree(file)
            shutil.copytree(rest[0], file)
        case _:
            raise ValueError(kind)


def changes_nothing(directory: Path, change: Change) -> bool:
    """Whether the files would be the same after the change: zero-filling zeros, for example."""
    kind, name, *rest = change
    file = directory / name
    match kind:
        case "zero":
            return not any(file.read_bytes())
        case "zero_range":
            return not any(file.read_bytes()[rest[0] : rest[1]])
        case "swap":
            return file.read_bytes() == (directory / rest[0]).read_bytes()
        case "replace":
            return file.read_bytes() == Path(rest[0]).read_bytes()
        case "empty":
            return file.stat().st_size == 0
        case _:
            return False


def load_damaged(original: str, scratch: str, version: int, changes: list[Change]) -> None:
    """Applies one change after the other, each to a whole copy, and reports what a load does.

    The number of the change is reported before the load, so that a crash can be told from the last
    line. `outcome` is "same", "raised", or what is wrong.
    """
    expected = comparable(tree(version))
    copy = Path(scratch)
    shutil.copytree(original, copy)
    for number, change in enumerate(changes):
        if changes_nothing(copy, change):
            child.report(number=number, outcome="no change")
            continue
        apply(copy, change)
        child.report(number=number, loading=True)
        child.report(number=number, **_load(copy, expected))
        _restore(Path(original), copy, change)


def load_untouched(original: str, scratch: str, version: int, change: Change) -> None:
    """Loads a copy in which one file was rewritten by the same bytes."""
    copy = Path(scratch)
    shutil.copytree(original, copy)
    _restore(Path(original), copy, change)
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


def _restore(original: Path, copy: Path, change: Change) -> None:
    kind, name, *rest = change
    if kind == "replace_item":
        shutil.rmtree(copy / name)
        shutil.copytree(original / name, copy / name)
        return
    for touched in (name, *(rest if kind == "swap" else ())):
        # A new file: a mapping of the old one, if any is left, keeps seeing the old one.
        (copy / touched).unlink(missing_ok=True)
        shutil.copyfile(original / touched, copy / touched)
