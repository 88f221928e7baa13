"""Loading: open, match, read, place, set."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, overload

from ckpt_core import _processes
from ckpt_core._directory import resolve
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from ckpt_core._load.broadcast import Broadcast, Lockstep
from ckpt_core._load.finish import read_planned
from ckpt_core._load.in_place import InPlace
from ckpt_core._load.live import detached, refuse_twice
from ckpt_core._load.opened import Opened, open_checkpoint
from ckpt_core._load.plan import (
    NOT_SAVED,
    Planned,
    check_patterns,
    find_item,
    plan_item,
    raise_mismatches,
)
from ckpt_core._load.read import read_leaves
from ckpt_core._load.request import Only, Rename, Request, Tally, check_target
from ckpt_core._load.request import collect_targets as collect_targets
from ckpt_core._load.request import make_request as make_request
from ckpt_core._load.request import request_from as request_from
from ckpt_core._load.wants import NO_STATE, Reading
from ckpt_core._load.watched import progress, watched
from ckpt_core._options import Options
from ckpt_core._pending import PendingLoad, nobody_is_left
from ckpt_core._results import Restored
from ckpt_core._storage import new_context

Opening = Callable[[], Opened]
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
        round=_processes.next_round(),
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
    request = replace(request, copying=True)

    def read(reading: Reading) -> Any:
        opened = opening()
        with watched(opened, request.options, step) as tally:
            return _load_items(opened, like, item, request, step, tally, reading)

    # what comes as numpy is a matter of this process alone
    if request.as_numpy:
        return read(read_leaves)
    return _together(read, request, request.round or _processes.next_round(), "load")


def _together(read: Callable[[Reading], Any], request: Request, tag: str, call: str = "") -> Any:
    """Reads; where several processes run, none goes on before all have read.

    Args:
        tag: of the round.
        call: what is done, where it is the first thing that is agreed on in the round.
    """
    processes = _processes.this_run()
    if processes.count == 1:
        return read(read_leaves)
    timeout_secs = request.options.timeout_secs
    if not request.options.broadcast:
        tag = tag if call else f"{tag}/load"
        return processes.together(
            tag, lambda: read(read_leaves), timeout_secs, _cannot_load, call=call
        )
    if call:  # before the first transfer: those who do something else would never come to it
        processes.agree(tag, "", lambda _: "", timeout_secs, f"{call} with broadcast")
    lockstep = Lockstep(processes, tag, timeout_secs, _cannot_load)

    def work() -> Any:
        return lockstep.run(lambda: read(Broadcast(lockstep)))

    return processes.together(f"{tag}/load", work, timeout_secs, _cannot_load)


def _cannot_load(index: int, text: str) -> Exception:
    """The error of another process, of the same kind where callers tell kinds apart."""
    kinds = {"CheckpointCorrupt": CheckpointCorrupt, "CheckpointNotFound": CheckpointNotFound}
    kind, _, message = text.partition(": ")
    return kinds.get(kind, CheckpointError)(f"process {index} cannot load it: {kind}: {message}")


def _load_items(
    opened: Opened,
    like: Any,
    item: str | None,
    request: Request,
    step: int | None,
    tally: Tally,
    reading: Reading,
) -> Any:
    if item is not None:
        chosen = {item: find_item(opened, item)}
    else:
        chosen = opened.items
    context = new_context()
    prepared: list[Planned] = []
    single = item is not None or opened.single
    likes = {next(iter(chosen)): like} if single else like
    if like is not None and not single:
        if not isinstance(like, Mapping):
            raise TypeError(
                f"{opened.path} holds the items {', '.join(chosen)}: like must be a dict of items, "
                "or name one with item="
            )
        chosen = {name: find_item(opened, name) for name in likes}
    for name, saved in chosen.items():
        wanted = likes[name] if likes is not None and like is not None else NOT_SAVED
        prepared.append(plan_item(opened, saved, wanted, request, context))
    raise_mismatches(opened, prepared, request)
    check_patterns(opened, prepared, request)
    tally.progress = progress(opened, prepared, request.options, step)
    values = {
        planned.item.name: planned.finish(
            read_planned(opened, planned, request, context, tally, reading)
        )
        for planned in prepared
    }
    return next(iter(values.values())) if single else values


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
    options = request.options
    in_place = InPlace(options.max_host_bytes)
    tag = request.round or _processes.next_round()
    watching = contextlib.ExitStack()
    agreed: list[tuple[Opened, Tally, list[Planned], Any]] = []

    def plan() -> tuple[Opened, Tally, list[Planned], Any]:
        opened = opening()
        tally = watching.enter_context(watched(opened, request.options, step))
        return opened, tally, *_plan_items(opened, targets, request, step, tally)

    def read(reading: Reading) -> tuple[Opened, Tally, list[Planned], list[list[Any]]]:
        with watching:
            # taken out: whoever keeps an error keeps this function, and must not keep old arrays
            opened, tally, prepared, context = agreed.pop() if agreed else plan()
            # pipelines begin to prefetch while the arrays are read
            for planned in prepared:
                in_place.begin(planned)
            leaves = [
                read_planned(opened, planned, request, context, tally, reading, in_place)
                for planned in prepared
            ]
            return opened, tally, prepared, leaves

    try:
        call = "restore with atomic_restore"
        if not options.atomic_restore:
            with contextlib.ExitStack() as failing:
                failing.push(watching)
                agreed.append(_agreed(plan, request, tag))
                failing.pop_all()
            call = ""
        opened, tally, prepared, leaves = _together(read, request, tag, call)
        values = in_place.finish(prepared, leaves)
    except BaseException as error:
        in_place.give_up(error)
        raise
    return Restored(
        dict(zip(targets, values, strict=True)),
        path=opened.path,
        metadata=opened.metadata,
        report=tally.report(),
        step=step,
        saved_items=frozenset(targets if opened.single else opened.items),
    )


def _agreed(plan: Callable[[], Any], request: Request, tag: str) -> Any:
    """Plans; where several processes run, none changes anything before all could."""
    processes = _processes.this_run()
    if processes.count == 1:
        return plan()
    call = "restore with broadcast" if request.options.broadcast else "restore"
    return processes.together(tag, plan, request.options.timeout_secs, _cannot_load, call=call)


def _plan_items(
    opened: Opened, targets: Mapping[str, Any], request: Request, step: int | None, tally: Tally
) -> tuple[list[Planned], Any]:
    """The targets matched against what was saved, and the context to read in."""
    context = new_context()
    prepared = [
        plan_item(opened, find_item(opened, name), target, request, context)
        for name, target in targets.items()
    ]
    refuse_twice(targets, prepared)
    raise_mismatches(opened, prepared, request)
    check_patterns(opened, prepared, request)
    tally.progress = progress(opened, prepared, request.options, step)
    return prepared, context
