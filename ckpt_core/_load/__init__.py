"""Loading: open, match, plan, read, assemble, apply."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, Unpack, overload

from ckpt_core._background import PendingLoad, nobody_is_left
from ckpt_core._directory import resolve
from ckpt_core._errors import ANSWERS, at_the_call
from ckpt_core._load.loading import Opening, run
from ckpt_core._load.matching import detached, selection
from ckpt_core._load.plans import pruned, report_of
from ckpt_core._load.request import (
    NOT_PASSED,
    How,
    Only,
    Rename,
    Request,
    Rules,
    Select,
    collect_targets,
    float_dtype,
    make_request,
    refuse_no_targets,
    request_from,
)
from ckpt_core._options import Options
from ckpt_core._processes import this_run
from ckpt_core._results import Restored, RestoredStep
from ckpt_core._saved import open_checkpoint

Like = TypeVar("Like")
Key = TypeVar("Key")
_Result = TypeVar("_Result")
_Path = str | os.PathLike[str]


@overload
def load(path: _Path, like: None = None, /, **how: Unpack[How]) -> Any: ...
@overload
def load(path: _Path, like: dict[Key, Any], /, **how: Unpack[How]) -> dict[Key, Any]: ...
@overload
def load(path: _Path, like: list[Any], /, **how: Unpack[How]) -> list[Any]: ...
@overload
def load(path: _Path, like: Like, /, **how: Unpack[How]) -> Like: ...
def load(
    path: str | os.PathLike[str],
    like: Any = None,
    /,
    *,
    item: str | None = None,
    only: Only = None,
    rename: Rename = None,
    rules: Rules = None,
    select: Select = None,
    sharding: Any = None,
    as_numpy: bool = False,
    cast: Any = False,
    missing: str = "error",
    unexpected: str = "error",
    static: str = "error",
    options: Options | None = None,
    **unknown: Any,
) -> Any:
    """A new pytree with the saved values; if the checkpoint has named items, a dict of pytrees.

    Blocks until every requested byte has been read and its checksum verified. Where several
    processes run, all must call it, in the same order as their other calls of ckpt; each reads only
    the shards of its own devices, and none returns before all have read. With ``as_numpy=True`` a
    single process may call it alone.

    Without ``like``, the saved containers come back. Each array gets the sharding that it was saved
    with if the devices of this run allow it, else it goes to the default device.

    With ``like``, the result has the containers, shapes, dtypes and shardings of ``like``, and the
    checkpoint must match it leaf by leaf. A Python number in ``like`` accepts any saved number; if
    an array was saved there, an array comes back. ``like`` itself is never changed: a live object
    in it (an NNX model) is copied and the copy is returned.

    Args:
        path: the checkpoint directory, one item's directory inside it, or a directory that Orbax
            wrote.
        like: a pytree of arrays or ``jax.ShapeDtypeStruct``; if the checkpoint has named items, a
            dict with a pytree for each wanted item.
        item: load only the item of this name.
        only: load only these leaves: a pattern such as ``"params/**"``, a list of patterns, or a
            function of (path, leaf). The other leaves are taken from ``like``; without ``like``
            they are absent from the result.
        rename: maps saved paths to the paths of ``like``: a dict of path prefixes, or a function
            from path to path.
        rules: what saved arrays become in ``like``, such as the layers of a stack: a list of ``ckpt.Rule``, or of
            dicts with their attributes. What no rule names is matched by its own name.
        select: a dict from patterns of saved paths, as for ``only``, to the part that is wanted of each array:
            numpy's index, of whole numbers, slices without a step, and ``...``. ``like`` has the shape of the part.
            Each process reads and verifies only the blocks that have some of what its devices need.
        sharding: where arrays go: a Sharding, a Mesh (saved PartitionSpecs are adapted to its
            axes), a pytree of Shardings, or a function of (path, leaf).
        as_numpy: return numpy arrays in host memory (PRNG keys as their key data). An array that
            is larger than 64 KiB, uncompressed, and stored as one chunk on a local disk is
            memory-mapped instead of read: the mapping is private, so writing to the array never
            changes the file; the file occupies disk space until the array is freed; and if another
            program truncates the file meanwhile, access to the array kills this process. Copy the
            array to be independent of the file.
        cast: True converts saved dtypes to those of ``like``, as ``astype`` does; an integer that would become another
            number, and NaN where an integer is wanted, are refused. Without ``like``, the dtype of all arrays of floats.
        missing: if a leaf of ``like`` was not saved: ``"error"`` raises, ``"keep"`` returns the
            value that ``like`` holds.
        unexpected: if a saved leaf is not in ``like``: ``"error"`` raises, ``"ignore"`` skips it.
        static: if a number, flag, enum or dtype in a static field of ``like`` is not the saved one:
            ``"error"`` raises, ``"target"`` keeps that of ``like``. Another text is a warning.
        options: see ``Options``.

    Raises:
        CheckpointNotFound: no checkpoint or item there, or ``only`` or a pattern in ``select`` matches no leaf.
        CheckpointCorrupt: a checksum or size differs from what was saved.
        StructureMismatch: the checkpoint does not match ``like``, or has no part that ``select`` asks for.
            Lists every difference; raised before any array data is read.
        UnsupportedLeaf: ``like`` holds a live object that cannot be copied; use ``restore``.
        CheckpointError: the arrays do not fit into the free memory of the default device, or have
            64-bit dtypes while jax runs without them; or another process could not load.
        BarrierTimeout: a process did not come within ``Options.timeout_secs``.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
        >>> ckpt.load("/tmp/ckpt-docs/one")["w"].shape
        (3,)
    """
    if unknown:  # and not a wrapper, whose frame would stand in each traceback
        request_from("load", like, unknown)  # raises, with the argument that was meant
    how = sharding, as_numpy, rules, like, static, select
    request = make_request(only, rename, cast, missing, unexpected, options, *how)
    try:
        return load_checkpoint(lambda: open_checkpoint(path, options), like, item, request)
    except ANSWERS as error:
        raise at_the_call(error)  # noqa: B904


def load_async(path: str | os.PathLike[str], like: Any = None, /, **arguments: Any) -> PendingLoad:
    """A ``PendingLoad``, whose ``.result()`` returns what ``load`` with these arguments returns.

    Returns at once; a background thread loads, so that reading overlaps with compilation.
    ``.result()`` blocks until it has finished, and raises the errors of ``load``. Live objects in
    ``like`` are copied before this function returns. Where several processes run, all must call it,
    in the same order as their other calls of ckpt.

    ``Options(broadcast=True)`` is ignored: the background thread would run collectives while the
    caller runs its own, and all processes must run collectives in one order. Every process reads
    its shards itself.

    Raises:
        TypeError: an argument that ``load`` does not have.
        UnsupportedLeaf: ``like`` holds a live object that cannot be copied.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
        >>> ckpt.load_async("/tmp/ckpt-docs/one").result()["w"].shape
        (3,)
    """
    where, item = resolve(path)[0], arguments.pop("item", None)
    # the caller may change its tree and live objects after this call returns
    wanted = detached(like)
    request = request_from("load_async", wanted, arguments)
    options, together = replace(request.options, broadcast=False), None
    if not request.as_numpy:  # here: background threads would begin rounds in any order
        together = this_run().round("load", options.timeout_secs)
    request = replace(request, together=together, options=options, abandoned=nobody_is_left)
    opening = functools.partial(open_checkpoint, where, options)
    work = functools.partial(load_checkpoint, opening, wanted, item, request)
    pending = PendingLoad(where, _as_here(work), "ckpt-load")
    pending.start()
    return pending


def load_checkpoint(
    opening: Opening, like: Any, item: str | None, request: Request, step: int | None = None
) -> Any:
    """``load`` for a checkpoint that ``opening`` opens; also called by the Checkpointer."""
    if not (item is None or isinstance(item, str)):
        raise TypeError(f"item= is the name of an item, got {item!r}")
    request = replace(request, target=NOT_PASSED if like is None else like, item=item)
    checkpoint, values, _ = run(opening, request, step)
    single = item is not None or checkpoint.single
    return next(iter(values.values())) if single else values


def restore(
    path: str | os.PathLike[str],
    state: Any = NOT_PASSED,
    /,
    *,
    items: Mapping[str, Any] | None = None,
    only: Only = None,
    rename: Rename = None,
    rules: Rules = None,
    cast: bool = False,
    missing: str = "error",
    unexpected: str = "error",
    static: str = "error",
    options: Options | None = None,
    **targets: Any,
) -> Restored:
    """The restored items by name; live objects among the targets are set in place.

    Models, optimizers, data iterators and objects with ``set_state`` are set in place. Pytrees
    (parameters, Optax states) are immutable: take the new ones from the result. Blocks until all is
    read, verified and set. Where several processes run, all must call it, in the same order as
    their other calls of ckpt.

    No object is changed before all items match their targets. What a failure leaves behind:

    - NNX, Keras and torchax objects are set while arrays are still being read, 128 MiB at a time, so that
      old and new state never fill memory together. If a checksum fails midway, the new arrays are
      deleted: jax refuses to use the object ("Array has been deleted") until a restore succeeds.
      ``Options(atomic_restore=True)`` reads and verifies everything first, for twice the memory.
    - Data pipelines are set before arrays are read, so that they prefetch meanwhile, and other objects at
      the end. The error names those that were set before the failure: restore into them again.

    Args:
        path: the checkpoint directory.
        state: the target, if the checkpoint was saved as one state; ``result["state"]`` holds it.
        items: more targets by name, for item names that are argument names of this function.
        only, rename, rules, cast, missing, unexpected, static, options: as for ``load``.
        **targets: for each wanted item, a live object or a pytree of live or abstract arrays.

    Raises:
        CheckpointNotFound, CheckpointCorrupt, StructureMismatch, CheckpointError, BarrierTimeout:
            as for ``load``.
        UnsupportedLeaf: one live object is passed under two names.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/three", params={"w": jnp.ones(3)}, overwrite=True)
        >>> restored = ckpt.restore("/tmp/ckpt-docs/three", params={"w": jnp.zeros(3)})
        >>> restored["params"]["w"]
        Array([1., 1., 1.], dtype=float32)
    """
    request = make_request(
        only, rename, cast, missing, unexpected, options, rules=rules, static=static
    )
    chosen = collect_targets(state, items, targets)
    try:
        return restore_checkpoint(lambda: open_checkpoint(path, options), chosen, request)
    except ANSWERS as error:
        raise at_the_call(error)  # noqa: B904


def restore_checkpoint(
    opening: Opening, targets: Mapping[str, Any], request: Request, step: int | None = None
) -> Any:
    """``restore`` for a checkpoint that ``opening`` opens; a ``RestoredStep`` with a ``step``, for the Checkpointer."""
    refuse_no_targets(targets)
    checkpoint, values, plans = run(opening, replace(request, target=targets, restores=True), step)
    made = Restored if step is None else RestoredStep
    return made(
        values,
        path=checkpoint.path,
        metadata=checkpoint.metadata,
        report=report_of(plans),
        step=step,
        saved_items=frozenset(targets if checkpoint.single else checkpoint.items),
    )


def _as_here(work: Callable[[], _Result]) -> Callable[[], _Result]:
    """``work``, run on any thread with this thread's present settings of jax: 64-bit types, default device and mesh."""
    jax: Any = sys.modules.get("jax")
    if jax is None:  # nobody can have set anything
        return work
    wide, device = jax.config.jax_enable_x64, jax.config.jax_default_device
    enable_x64 = getattr(jax, "enable_x64", None)  # None: jax before 0.8.2
    if enable_x64 is None:
        enable_x64 = importlib.import_module("jax.experimental").enable_x64
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # while a function is traced, where no mesh can be set
        mesh = None

    def run() -> _Result:
        with contextlib.ExitStack() as around:
            around.enter_context(enable_x64(wide))
            around.enter_context(jax.default_device(device))
            if mesh is not None and not mesh.empty:
                around.enter_context(jax.set_mesh(mesh))
            return work()

    return run
