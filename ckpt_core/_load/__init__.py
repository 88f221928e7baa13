"""Loading: open, match, plan, read, assemble, apply."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, overload

from ckpt_core import _processes
from ckpt_core._background.pending import PendingLoad, nobody_is_left
from ckpt_core._directory import resolve
from ckpt_core._load.checkpoint import Checkpoint
from ckpt_core._load.live_objects import detached
from ckpt_core._load.loading import Chosen, LoadJob, Opening, run
from ckpt_core._load.matching import find_item
from ckpt_core._load.opening import open_checkpoint
from ckpt_core._load.planned import NO_STATE, NOT_SAVED
from ckpt_core._load.report import report_of
from ckpt_core._load.request import Only, Rename, Request, check_target
from ckpt_core._load.request import collect_targets as collect_targets
from ckpt_core._load.request import make_request as make_request
from ckpt_core._load.request import request_from as request_from
from ckpt_core._options import Options
from ckpt_core._results import Restored

Like = TypeVar("Like")


@overload
def load(
    path: str | os.PathLike[str],
    like: None = None,
    /,
    *,
    item: str | None = None,
    only: Only = None,
    rename: Rename = None,
    sharding: Any = None,
    as_numpy: bool = False,
    cast: bool = False,
    missing: str = "error",
    unexpected: str = "error",
    options: Options | None = None,
) -> Any: ...
@overload
def load(
    path: str | os.PathLike[str],
    like: Like,
    /,
    *,
    item: str | None = None,
    only: Only = None,
    rename: Rename = None,
    sharding: Any = None,
    as_numpy: bool = False,
    cast: bool = False,
    missing: str = "error",
    unexpected: str = "error",
    options: Options | None = None,
) -> Like: ...
def load(
    path: str | os.PathLike[str],
    like: Any = None,
    /,
    *,
    item: str | None = None,
    only: Only = None,
    rename: Rename = None,
    sharding: Any = None,
    as_numpy: bool = False,
    cast: bool = False,
    missing: str = "error",
    unexpected: str = "error",
    options: Options | None = None,
) -> Any:
    """The saved tree, as a new one; for a composite a dict of items.

    Without ``like`` the containers that were saved come back, arrays on the sharding they had where
    the devices allow it, else on the default device. With ``like`` (live or abstract arrays), its
    containers, dtypes and shardings count, and both sides must agree; a Python number in it takes
    whatever number was saved, and an array stays one. ``like`` is left as it is: of a live object
    (NNX) a copy comes back, and one that cannot be copied is refused.

    Args:
        path: of the checkpoint, of one item in it, or of a directory that Orbax wrote.
        like: a tree of arrays or ``jax.ShapeDtypeStruct``; for a composite a dict of items.
        item: load this item only.
        only: a pattern such as ``"params/**"``, several, or a function of (path, leaf); the rest
            comes from ``like``, or is left out.
        rename: from saved to wanted paths: a dict of leading entries, or a function of the path.
        sharding: where arrays go: a Sharding, a Mesh (saved specs are refitted to its axes), or a
            function of (path, leaf).
        as_numpy: arrays stay on the host (PRNG keys as their key data). Large ones that lie in one
            piece on a local disk are not read but mapped: they can be written to, which never
            changes the file; their file keeps its space on the disk until they are gone; and
            whoever cuts that file short meanwhile kills the process. Copy what must not depend
            on it.
        cast: convert dtypes to those of ``like``.
        missing: ``"error"``, or ``"keep"`` what ``like`` holds where nothing was saved.
        unexpected: ``"error"``, or ``"ignore"`` what was saved and is not wanted.
        options: see ``Options``.

    Raises:
        CheckpointNotFound: no checkpoint or item there.
        CheckpointCorrupt: a byte differs from what was saved.
        StructureMismatch: every difference between the two sides, before anything is read.
        UnsupportedLeaf: a live object in ``like`` that only ``restore`` can set.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
        >>> ckpt.load("/tmp/ckpt-docs/one")["w"].shape
        (3,)
    """
    request = make_request(only, rename, cast, missing, unexpected, options, sharding, as_numpy)
    check_target(request, like)
    return load_checkpoint(lambda: open_checkpoint(path), like, item, request)


def load_async(path: str | os.PathLike[str], like: Any = None, /, **arguments: Any) -> PendingLoad:
    """A load in the background, which overlaps with compilation; arguments as for ``load``.

    ``Options(broadcast=True)`` has no effect here: devices may be used by the caller meanwhile, and
    what several processes do with them must come in one order. Every process reads for itself.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
        >>> ckpt.load_async("/tmp/ckpt-docs/one").result()["w"].shape
        (3,)
    """
    where = resolve(path)[0]
    item = arguments.pop("item", None)
    # what the caller does to the tree and its live objects later changes nothing
    wanted = detached(like)
    request = request_from("load_async", wanted, arguments)
    request = replace(
        request,
        # taken now: threads would take theirs in any order
        round=_processes.next_tag(),
        options=replace(request.options, broadcast=False),
        abandoned=nobody_is_left,
    )
    pending = PendingLoad(
        where,
        lambda: load_checkpoint(lambda: open_checkpoint(where), wanted, item, request),
        "ckpt-load",
    )
    try:
        pending.start()
    except BaseException:
        pending.abandon()
        raise
    return pending


def load_checkpoint(
    opening: Opening, like: Any, item: str | None, request: Request, step: int | None = None
) -> Any:
    """``load`` of what ``opening`` opens."""
    copying = replace(request, copying=True)
    loaded = run(LoadJob(opening, lambda found: _wanted(found, like, item), copying, step))
    single = item is not None or loaded.checkpoint.single
    return next(iter(loaded.values.values())) if single else loaded.values


def _wanted(checkpoint: Checkpoint, like: Any, item: str | None) -> Chosen:
    """The items that a load gives, each with its part of ``like``."""
    target = NOT_SAVED if like is None else like
    if item is not None:
        return {item: (find_item(checkpoint, item), target)}
    if checkpoint.single or like is None:
        return {name: (saved, target) for name, saved in checkpoint.items.items()}
    if not isinstance(like, Mapping):
        raise TypeError(
            f"{checkpoint.path} holds the items {', '.join(checkpoint.items)}: like must be a dict of items, "
            "or name one with item="
        )
    return {name: (find_item(checkpoint, name), part) for name, part in like.items()}


def restore(
    path: str | os.PathLike[str],
    state: Any = NO_STATE,
    /,
    *,
    items: Mapping[str, Any] | None = None,
    only: Only = None,
    rename: Rename = None,
    cast: bool = False,
    missing: str = "error",
    unexpected: str = "error",
    options: Options | None = None,
    **targets: Any,
) -> Restored:
    """The saved items set into live objects; immutable values come back in the result.

    Models, optimizers, data iterators and objects with ``set_state`` are set in place. Pytrees
    (parameters, Optax states) cannot be: take them from the result. Nothing is changed before all
    items were matched. Then NNX and Keras objects are set while the arrays are read and verified, so
    that their old and new state need not fit into memory together; where that fails midway, through
    damage, such an object can be used no more until a restore succeeds (jax says "Array has been
    deleted"). With ``Options(atomic_restore=True)`` all is read and verified before anything is
    changed. What was set otherwise (data pipelines, which begin to prefetch meanwhile; small and
    other objects) is set back if it fails or is interrupted; the error says where that was impossible.

    Args:
        path: of the checkpoint.
        state: the target for a checkpoint that was saved as one state; in the result it is ``state``.
        items: further targets by name, for names that are arguments.
        only, rename, cast, missing, unexpected, options: as for ``load``.
        **targets: a live object, or a tree of live or abstract arrays, for each item wanted.

    Raises:
        CheckpointNotFound, CheckpointCorrupt, StructureMismatch: as for ``load``.
        UnsupportedLeaf: one live object under two names.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/three", params={"w": jnp.ones(3)}, overwrite=True)
        >>> restored = ckpt.restore("/tmp/ckpt-docs/three", params={"w": jnp.zeros(3)})
        >>> restored["params"]["w"]
        Array([1., 1., 1.], dtype=float32)
    """
    request = make_request(only, rename, cast, missing, unexpected, options)
    chosen = collect_targets(state, items, targets)
    return restore_checkpoint(lambda: open_checkpoint(path), chosen, request)


def restore_checkpoint(
    opening: Opening, targets: Mapping[str, Any], request: Request, step: int | None = None
) -> Restored:
    """``restore`` of what ``opening`` opens."""
    if not targets:
        raise TypeError(
            "restore needs at least one target, such as model=model; to get what was saved without one, use load"
        )

    def choose(checkpoint: Checkpoint) -> Chosen:
        return {name: (find_item(checkpoint, name), target) for name, target in targets.items()}

    loaded = run(LoadJob(opening, choose, request, step, restores=True))
    checkpoint = loaded.checkpoint
    return Restored(
        loaded.values,
        path=checkpoint.path,
        metadata=checkpoint.metadata,
        report=report_of(loaded.plans),
        step=step,
        saved_items=frozenset(targets if checkpoint.single else checkpoint.items),
    )
