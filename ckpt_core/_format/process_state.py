"""Per-process state, such as that of a data iterator: a tree of plain values in two JSON files (docs/format.md). One has the
form that the framework's own reader expects; the other has all types: JSON has no tuples, int keys, bytes or numpy scalars.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.record import dump_json, parse_json
from ckpt_core._format.treedef import TreeBounds, dump_tree, load_nodes
from ckpt_core._tree import flatten, format_path, unflatten
from ckpt_core._tree.code import refused
from ckpt_core._tree.leaves import (
    TEXT_KINDS,
    LeafSpec,
    describe,
    dtype_from_name,
    from_host_array,
    from_text,
    to_host_array,
    to_text,
)


def file_name(index: int, count: int) -> str:
    """File name of process ``index`` of ``count``, the same as Grain's."""
    return f"process_{index}-of-{count}.json"


def dump(state: Any, text: str, index: int, count: int) -> dict[str, bytes]:
    """Name -> content of both files of one process; raises UnsupportedLeaf for an array on a device."""
    name = file_name(index, count)
    flat = flatten(state)
    leaves: list[Any] = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        spec = describe(leaf, path)
        if spec.kind in ("jax", "key"):
            what = "a PRNG key" if spec.kind == "key" else "a jax.Array"
            raise refused(
                leaf,
                format_path(path),
                f"cannot save {what} in the state of a process, which holds plain values and numpy arrays: "
                "convert it in get_state (numpy.asarray, jax.random.key_data), or save it in an item of its own",
            )
        if spec.kind in ("int", "float", "bool", "str"):
            leaves.append(leaf)
        elif spec.kind in TEXT_KINDS:
            leaves.append([spec.kind, "", [], spec.detail, to_text(leaf, spec)])
        else:
            data = base64.b64encode(to_host_array(leaf, spec).tobytes()).decode()
            leaves.append([spec.kind, spec.dtype, spec.shape, spec.detail, data])
    exact = dump_json({"nodes": dump_tree(flat.root)[0], "leaves": leaves})
    return {name: text.encode(errors="surrogatepass"), f"exact/{name}": exact}


def load_exact(data: bytes, file: str) -> Any:
    """The tree in an exact file of ``dump``; raises CheckpointCorrupt if ``data`` is anything else."""
    value: Any = parse_json(data, file)
    try:
        root, _ = load_nodes(value["nodes"], len(value["leaves"]), TreeBounds())
        return unflatten(root, map(_load_leaf, value["leaves"]))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointCorrupt(
            f"{file}: not the state of a process: {error!r}", file=file
        ) from error


def _load_leaf(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, dtype, shape, detail, data = value
    spec = LeafSpec(kind, dtype, tuple(shape), detail)
    if kind in TEXT_KINDS:
        return from_text(data, spec)
    stored = dtype_from_name(spec.stored_dtype)
    array = np.frombuffer(base64.b64decode(data), stored).reshape(spec.stored_shape)
    return from_host_array(array.copy(), spec)
