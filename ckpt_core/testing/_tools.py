"""Helpers of the suite: sharded and donated arrays, targets that do not fit, damaged files, new processes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ckpt_core import _adapters
from ckpt_core._tree import Path as LeafPath, flatten, format_path
from ckpt_core._tree.leaves import is_key_dtype
from ckpt_core.testing._prints import Prints, first_difference, prints_from
from ckpt_core.testing._resume import portable, run_apart

_TIMEOUT_SECS = 300
Placement = dict[str, tuple[Sharding, bool]]
"""Path -> the array's sharding, and whether it is committed to it."""


def require_same(expected: Prints, actual: Prints, what: str) -> None:
    """Fails the test with the first difference, if there is one."""
    difference = first_difference(expected, actual)
    if difference is not None:
        pytest.fail(f"{what} differs at {difference}")


def adapter_of(subject: Any) -> Any:
    """The adapter of an object; fails the test if there is none."""
    adapter = _adapters.adapter_for(subject)
    if adapter is None:
        cls = type(subject)
        pytest.fail(
            f"no adapter takes a {cls.__module__}.{cls.__qualname__}: is the entry point of the group "
            f"{_adapters.GROUP!r} installed, and named after the root package of one of its classes?"
        )
    return adapter


def packages_of(subject: Any) -> tuple[str, ...]:
    """The root packages of an object and its adapter, without the tests'."""
    adapter = adapter_of(subject)
    if getattr(adapter, "accepts_any_structure", False):
        return (type(subject).__module__.partition(".")[0],)
    roots = {base.__module__.partition(".")[0] for base in type(subject).__mro__}
    known = {entry.name for entry in entry_points(group=_adapters.GROUP)} & roots
    return (*sorted(known), type(adapter).__module__.partition(".")[0])


def packages_of_containers(tree: Any) -> tuple[str, ...]:
    """The packages that define the classes of a tree's containers."""

    found, nodes = {""}, [flatten(tree).root]
    for node in nodes:  # which grows meanwhile
        found.add(node.type_name.partition(":")[0].partition(".")[0])
        nodes += node.children
    return tuple(sorted(found - {"", "builtins", "collections", "jax", "ckpt_core"}))


def leaves_of(subject: Any) -> dict[LeafPath, Any]:
    """The leaves of a tree or of an object's state, by path."""
    adapter = _adapters.adapter_for(subject)
    state = subject if adapter is None else adapter.get_state(subject)
    flat = flatten(state, expand=_adapters.expander())
    return dict(zip(flat.paths, flat.leaves, strict=True))


def arrays_of(subject: Any) -> list[jax.Array]:
    """All jax arrays in a tree or in an object's state."""
    return [leaf for leaf in leaves_of(subject).values() if isinstance(leaf, jax.Array)]


def placement_of(subject: Any) -> Placement:
    """The placement of each array in a tree or in an object's state."""
    return {
        format_path(path): (leaf.sharding, bool(getattr(leaf, "committed", True)))
        for path, leaf in leaves_of(subject).items()
        if isinstance(leaf, jax.Array)
    }


def require_placement(before: Placement, restored: Any) -> None:
    """Fails the test if an array's placement changed; names the first one."""
    after = placement_of(restored)
    for path, (sharding, committed) in before.items():
        if path not in after:
            pytest.fail(f"{path} is no jax array any more")
        now, is_committed = after[path]
        if committed and now != sharding:
            pytest.fail(f"{path} was on {sharding} and came back on {now}")
        if committed != is_committed:
            was, now = "un" * (not committed), "un" * (not is_committed)
            pytest.fail(f"{path} was {was}committed and came back {now}committed")


def laid_out(state: Any) -> Any:
    """The tree with its arrays sharded over all devices, along the first axis that they divide."""
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("devices",))

    def lay_out(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or not leaf.shape:
            return leaf  # scalars stay uncommitted, as in a state that was made on a mesh
        axis = next((i for i, side in enumerate(leaf.shape) if side % len(devices) == 0), None)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "devices")
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(lay_out, state)


def abstract(tree: Any) -> Any:
    """The tree with shapes and dtypes in place of arrays."""

    def of(x: Any) -> Any:
        return jax.eval_shape(lambda: x) if isinstance(x, jax.Array) else x

    return jax.tree.map(of, tree)


@contextmanager
def writers_held_back() -> Generator[None]:
    """Saves inside the block write nothing before its end: else an object may be on the disk before a step changes it."""
    go = threading.Event()
    run = threading.Thread.run

    def held_back(thread: threading.Thread) -> None:
        if thread.name == "ckpt-save":
            go.wait()
        run(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "run", held_back)
        try:
            yield
        finally:
            go.set()


def donate(arrays: Sequence[jax.Array]) -> None:
    """Donates the arrays, as the next step of training does, and overwrites their memory."""
    overwrite = jax.jit(lambda x: x * 0 + 7, donate_argnums=0)
    for array in arrays:
        if array.is_deleted():
            continue  # a tied weight, which is in the list twice
        if not is_key_dtype(array.dtype) and array.dtype in (jnp.float32, jnp.int32):
            overwrite(array).block_until_ready()
        if not array.is_deleted():
            array.delete()


def misfitting_trees(subject: Any) -> Iterator[tuple[str, Any, str]]:
    """Trees that do not fit a checkpoint of ``subject``: (kind of mismatch, tree, path of the leaf)."""
    leaves = leaves_of(subject)
    path, leaf = _typical(leaves)
    where = format_path(path)
    yield "shape", _nested({**leaves, path: _like(leaf, (*leaf.shape, 2), leaf.dtype)}), where
    other = np.float16 if leaf.dtype != np.float16 else np.float32
    yield "dtype", _nested({**leaves, path: _like(leaf, leaf.shape, other)}), where
    if path and len(leaves) > 1:
        yield "missing", _nested({key: leaves[key] for key in leaves if key != path}), where
    if path:
        extra = (*path[:-1], "added_by_the_suite")
        yield "unexpected", _nested({**leaves, extra: leaf}), format_path(extra)


def _typical(leaves: Mapping[LeafPath, Any]) -> tuple[LeafPath, Any]:
    """The largest array, because scalars have special rules."""
    arrays = [
        (path, leaf)
        for path, leaf in leaves.items()
        if isinstance(leaf, (jax.Array, np.ndarray)) and not is_key_dtype(leaf.dtype)
    ]
    if not arrays:
        pytest.skip("there are no arrays in it: give the fixture `misfits`")
    return max(arrays, key=lambda one: one[1].size + one[1].ndim)


def _like(leaf: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    zeros = np.zeros(shape, dtype)
    return jnp.asarray(zeros) if isinstance(leaf, jax.Array) else zeros


def _nested(leaves: Mapping[LeafPath, Any]) -> Any:
    """Nested dicts with these paths: matching compares paths, not containers."""
    root: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        if not path:
            return leaf
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return root


def files_below(path: Path) -> list[Path]:
    """The files that are not empty."""
    return sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)


def flip(file: Path) -> bytes:
    """Changes a byte in the middle of a file; returns what was in it."""
    whole = file.read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
    return whole


def call(function: Callable[..., None], *arguments: Any) -> dict[str, Prints]:
    """What the function writes in a new interpreter."""
    sent = tuple(map(portable, arguments))
    status, entries = run_apart(function.__name__, function, sent, _TIMEOUT_SECS)
    if not entries:
        raise AssertionError(f"the new process ended with status {status}")
    return {name: prints_from(prints) for name, prints in entries[0].items()}


@contextmanager
def blocked(packages: Sequence[str]) -> Generator[None]:
    """Makes imports of these packages fail inside the block."""
    imported = [name for name in packages if sys.modules.get(name) is not None]
    if imported:
        raise AssertionError(f"{', '.join(imported)} was imported before it could be blocked")
    with pytest.MonkeyPatch.context() as patch:
        for name in packages:
            patch.setitem(sys.modules, name, None)  # None makes `import` fail
        yield
