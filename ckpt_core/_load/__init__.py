"""Loading: open, match, read, place, set."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ckpt_core import _adapters, _processes
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    Mismatch,
    StructureMismatch,
)
from ckpt_core._format import states
from ckpt_core._leaves import TEXT_KINDS, LeafSpec, describe, from_text
from ckpt_core._load import place, read
from ckpt_core._load.opened import Opened, SavedItem, open_checkpoint
from ckpt_core._match import Match, MatchRules, Select, match, renamer, selector
from ckpt_core._options import Options
from ckpt_core._results import PendingLoad, Restored, RestoreReport
from ckpt_core._storage import new_context
from ckpt_core._tree import FlatTree, Node, flatten, format_path, importable_type, unflatten

Only = str | Iterable[str] | Select | type | None
Rename = Mapping[str, str] | Callable[[str], str] | None

_NOT_SAVED = object()


@dataclass
class _Tally:
    """What a load did, for the report."""

    loaded: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    cast: list[str] = field(default_factory=list[str])
    resharded: list[str] = field(default_factory=list[str])

    def report(self) -> RestoreReport:
        return RestoreReport(
            tuple(self.loaded), tuple(self.missing), tuple(self.unexpected), tuple(self.cast), tuple(self.resharded)
        )


@dataclass(frozen=True)
class _Request:
    """The arguments that all loads share."""

    rules: MatchRules
    only: Only
    options: Options
    sharding: Any = None
    as_numpy: bool = False


def _request(
    only: Only,
    rename: Rename,
    cast: bool,
    missing: str,
    unexpected: str,
    options: Options | None,
    sharding: Any = None,
    as_numpy: bool = False,
) -> _Request:
    if missing not in ("error", "keep", "ignore"):
        raise ValueError(f"missing must be 'error' or 'keep', got {missing!r}")
    if unexpected not in ("error", "ignore"):
        raise ValueError(f"unexpected must be 'error' or 'ignore', got {unexpected!r}")
    missing = "keep" if missing == "ignore" else missing
    rules = MatchRules(renamer(rename), cast, missing, unexpected)
    return _Request(rules, only, options or Options(), sharding, as_numpy)


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
    containers, dtypes and shardings count, and both sides must agree.

    Args:
        path: of the checkpoint, of one item in it, or of a directory that Orbax wrote.
        like: a tree of arrays or ``jax.ShapeDtypeStruct``; for a composite a dict of items.
        item: load this item only.
        only: a pattern such as ``"params/**"``, several, or a function of (path, leaf); the rest
            comes from ``like``, or is left out.
        rename: from saved to wanted paths: a dict of leading entries, or a function of the path.
        sharding: where arrays go: a Sharding, a Mesh (saved specs are refitted to its axes), or a
            function of (path, leaf).
        as_numpy: arrays stay on the host (PRNG keys as their key data).
        cast: convert dtypes to those of ``like``.
        missing: ``"error"``, or ``"keep"`` what ``like`` holds where nothing was saved.
        unexpected: ``"error"``, or ``"ignore"`` what was saved and is not wanted.
        options: see ``Options``.

    Raises:
        CheckpointNotFound: no checkpoint or item there.
        CheckpointCorrupt: a byte differs from what was saved.
        StructureMismatch: every difference between the two sides, before anything is read.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
        >>> ckpt.load("/tmp/ckpt-docs/one")["w"].shape
        (3,)
    """
    if as_numpy and (like is not None or sharding is not None):
        raise TypeError("as_numpy=True goes with neither like nor sharding=: both say where arrays go")
    request = _request(only, rename, cast, missing, unexpected, options, sharding, as_numpy)
    return load_opened(open_checkpoint(path), like, item, request)


def load_async(path: str | os.PathLike[str], like: Any = None, /, **arguments: Any) -> PendingLoad:
    """A load in the background, which overlaps with compilation; arguments as for ``load``.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
        >>> ckpt.load_async("/tmp/ckpt-docs/one").result()["w"].shape
        (3,)
    """
    where = os.path.abspath(os.path.expanduser(path)) if "://" not in os.fspath(path) else path
    return PendingLoad(os.fspath(where), lambda: load(where, like, **arguments), "ckpt-load")


def load_opened(opened: Opened, like: Any, item: str | None, request: _Request) -> Any:
    """``load`` of a checkpoint that is open already."""
    if item is not None:
        chosen = {item: find_item(opened, item)}
    else:
        chosen = opened.items
    context = new_context()
    prepared: list[_Planned] = []
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
        wanted = likes[name] if likes is not None and like is not None else _NOT_SAVED
        prepared.append(_plan(opened, saved, wanted, request, context))
    _raise_mismatches(opened, prepared)
    _check_patterns(opened, prepared, request)
    tally = _Tally()
    values = {planned.item.name: planned.finish(_read(opened, planned, request, context, tally)) for planned in prepared}
    return next(iter(values.values())) if single else values


def find_item(opened: Opened, name: str) -> SavedItem:
    """The item of that name.

    Raises:
        CheckpointNotFound: with the names of those that exist.
    """
    if name not in opened.items:
        known = ", ".join(opened.items) or "none"
        raise CheckpointNotFound(f"{opened.path} has no item {name!r}; it has: {known}")
    return opened.items[name]


@dataclass
class _Planned:
    """One item, matched and ready to be read.

    Attributes:
        item: as saved, with specs.
        positions: for every leaf of the result the position in the item, or None to keep it.
        kept: the values of leaves that are not read, by position in the result.
        targets: what each leaf that is read becomes, by position in the result.
        finish: from the leaves of the result to the item's value.
        match: for the report; None without a target.
        value: of an item that is no tree.
    """

    item: SavedItem
    positions: Sequence[int | None]
    kept: Sequence[Any]
    targets: dict[int, place.Target]
    finish: Callable[[list[Any]], Any]
    match: Match | None = None


def _plan(opened: Opened, saved: SavedItem, like: Any, request: _Request, context: Any) -> _Planned:
    """Matches one item against its target; reads no array of ours."""
    if saved.form != "tree":
        return _plan_other(opened, saved, like, context)
    item = read.with_specs(opened, saved, context)
    if like is _NOT_SAVED:
        return _plan_as_saved(item, request)
    adapter = _adapters.adapter_for(like)
    if adapter is not None and _adapters.is_per_process(adapter):
        raise StructureMismatch(
            [Mismatch("(root)", "kind", "a tree of arrays", type(like).__name__, None, item.name)],
            where=opened.path,
        )
    if adapter is not None and _adapters.is_lenient(adapter):
        return _plan_lenient(item, adapter, like, request)
    flat = flatten(like, expand=_adapters.expand, keep=True)
    return _plan_strict(item, flat, like, request)


def _plan_strict(item: SavedItem, flat: FlatTree, like: Any, request: _Request) -> _Planned:
    """Both sides must agree, but for what the request allows."""
    wanted = [_wanted_spec(path, leaf) for path, leaf in zip(flat.paths, flat.leaves, strict=True)]
    rules = request.rules
    if item.orbax is not None:
        rules = MatchRules(rules.rename, rules.cast, rules.missing, rules.unexpected, loose_keys=True)
    selected = _selection(request.only, item.name, like)
    found = match(
        item.leaves, list(zip(flat.paths, wanted, strict=True)), rules, selected=selected, item=item.name or None
    )
    _refuse_abstract_kept(found, flat, wanted, item, selected)
    targets: dict[int, place.Target] = {}
    if not found.mismatches:
        chosen = [
            (result, position) for result, position in enumerate(found.source) if position is not None
        ]
        entries = [
            (position, wanted[result] or item.specs[position], flat.leaves[result]) for result, position in chosen
        ]
        made = place.like_targets(item, entries)
        if request.sharding is not None:
            made = _with_sharding(item, entries, made, request.sharding)
        targets = {result: target for (result, _), target in zip(chosen, made, strict=True)}
        place.check_room(item, made, request.sharding is not None)
    return _Planned(
        item, found.source, flat.leaves, targets, lambda leaves: unflatten(flat.root, leaves), found
    )


def _with_sharding(
    item: SavedItem, entries: list[tuple[int, LeafSpec, Any]], made: list[place.Target], sharding: Any
) -> list[place.Target]:
    positions = [position for position, spec, _ in entries if spec.kind in ("jax", "key")]
    plain = place.plain_targets(item, positions, sharding=sharding, as_numpy=False)
    return [
        place.Target(target.spec, plain[position].sharding, plain[position].regions) if position in plain else target
        for (position, _, _), target in zip(entries, made, strict=True)
    ]


def _wanted_spec(path: Any, leaf: Any) -> LeafSpec | None:
    return describe(leaf, path)


def _refuse_abstract_kept(
    found: Match, flat: FlatTree, wanted: Sequence[LeafSpec | None], item: SavedItem, selected: Select | None
) -> None:
    """An abstract leaf has no value to keep: what is missing for it stays an error."""
    if selected is not None:
        return
    for path, leaf, spec, source in zip(flat.paths, flat.leaves, wanted, found.source, strict=True):
        if source is None and isinstance(leaf, jax.ShapeDtypeStruct):
            text = format_path(path)
            if not any(entry.path == text for entry in found.mismatches):
                found.mismatches.append(Mismatch(text, "missing", None, f"{spec} (abstract)", None, item.name))


def _plan_as_saved(item: SavedItem, request: _Request) -> _Planned:
    """No target: everything comes back as it was, or the part that was selected."""
    selected = _selection(request.only, item.name, None)
    positions = [
        position
        for position, (path, spec) in enumerate(item.leaves)
        if selected is None or selected(path, spec)
    ]
    arrays = [position for position in positions if item.specs[position].kind not in TEXT_KINDS]
    targets = place.plain_targets(item, arrays, sharding=request.sharding, as_numpy=request.as_numpy)
    place.check_room(item, list(targets.values()), request.sharding is not None or request.as_numpy)
    root = item.root
    if selected is not None:
        keep = set(positions)
        root = _pruned(root, iter(range(len(item.paths))), keep) or Node("dict")
    by_result = {result: targets[position] for result, position in enumerate(positions) if position in targets}
    renamed = request.rules.rename

    def finish(leaves: list[Any]) -> Any:
        if renamed is not None:
            return _nested({renamed(format_path(item.paths[p])): v for p, v in zip(positions, leaves, strict=True)})
        return unflatten(root, leaves, resolve=importable_type)

    return _Planned(item, positions, [None] * len(positions), by_result, finish)


def _nested(values: dict[str, Any]) -> Any:
    """Renamed leaves as nested dicts: their old containers no longer fit."""
    root: dict[str, Any] = {}
    for path, value in values.items():
        node = root
        *parents, last = path.split("/")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return root


def _pruned(node: Node, counter: Any, keep: set[int]) -> Node | None:
    """The structure without the leaves that were not selected; None where nothing is left."""
    if node.kind == "leaf":
        return node if next(counter) in keep else None
    if not node.children:
        return node if node.kind == "none" else None
    kept = [(key, _pruned(child, counter, keep)) for key, child in zip(node.keys, node.children, strict=True)]
    left = [(key, child) for key, child in kept if child is not None]
    if len(left) == len(kept):
        return Node(node.kind, node.keys, tuple(child for _, child in left), node.type_name)
    if not any(child.kind != "none" for _, child in left):
        return None
    # a tuple with holes is none: what is left of it is named by position
    kind = node.kind if node.kind in ("dict", "ordered") else "dict"
    return Node(kind, tuple(key for key, _ in left), tuple(child for _, child in left))


def _plan_lenient(item: SavedItem, adapter: Any, like: Any, request: _Request) -> _Planned:
    """A user's own object gets exactly what was saved, on the shardings that it uses now."""
    flat = flatten(adapter.get_state(like))
    now = dict(zip(flat.paths, flat.leaves, strict=True))
    planned = _plan_as_saved(item, request)
    for result, position in enumerate(planned.positions):
        assert position is not None
        leaf = now.get(item.paths[position])
        spec = item.specs[position]
        if isinstance(leaf, jax.Array) and spec.kind in ("jax", "key") and tuple(leaf.shape) == spec.shape:
            (planned.targets[result],) = place.like_targets(item, [(position, spec, leaf)])

    def finish(leaves: list[Any]) -> Any:
        adapter.set_state(like, unflatten(item.root, leaves, resolve=importable_type))
        return like

    planned.finish = finish
    return planned


def _plan_other(opened: Opened, saved: SavedItem, like: Any, context: Any) -> _Planned:
    """Items that are no trees: a process's state, JSON, and Orbax's single arrays and keys."""
    adapter = None if like is _NOT_SAVED else _adapters.adapter_for(like)
    if saved.form == "process":
        state = _process_state(opened, saved, adapter, like)
        if adapter is None:
            return _Planned(saved, [], [], {}, lambda _: state)
        if hasattr(adapter, "check_state"):
            adapter.check_state(like, state)

        def set_it(_: list[Any]) -> Any:
            adapter.set_state(like, state)
            return like

        return _Planned(saved, [], [], {}, set_it)
    if saved.form == "json":
        return _Planned(saved, [], [], {}, lambda _: saved.value)
    value = _special_value(opened, saved, context)
    return _Planned(saved, [], [], {}, lambda _: value)


def _process_state(opened: Opened, saved: SavedItem, adapter: Any, like: Any) -> Any:
    """The state that this process saved, with its types."""
    processes = _processes.this_run()
    name = states.file_name(processes.index, processes.count)
    directory = f"{opened.path}/{saved.directory}"
    present = [file for file in opened.form.files(directory) if file.startswith("process_")]
    saved_count = max((int(file.rpartition("-of-")[2].removesuffix(".json")) for file in present), default=0)
    if name not in present and saved_count and opened.record is not None and hasattr(adapter, "check_state"):
        # the adapter knows whether its pipeline can go on with another number of processes
        name = states.file_name(processes.index % saved_count, saved_count)
    if name not in present:
        counts = sorted({file.rpartition("-of-")[2].removesuffix(".json") for file in present})
        raise CheckpointError(
            f"{opened.path}: item {saved.name!r} was saved by {', '.join(counts) or '?'} process(es), and "
            f"{processes.count} run now: the state of a data pipeline belongs to one process. Start as many "
            "processes as saved it, or restore the other items and begin the data anew"
        )
    if adapter is not None and not _adapters.is_per_process(adapter):
        raise StructureMismatch(
            [Mismatch("(root)", "kind", "the state of a process", type(like).__name__, None, saved.name)],
            where=opened.path,
        )
    if opened.record is not None:
        exact = f"{saved.directory}/exact/{name}"
        return states.load_exact(opened.read_file(exact), exact)
    text = opened.read_file(f"{saved.directory}/{name}").decode(errors="surrogatepass")
    return text if adapter is None else adapter.from_text(like, text)


def _special_value(opened: Opened, saved: SavedItem, context: Any) -> Any:
    """An item of Orbax's that is one array or one random key."""
    if saved.form == "numpy_key":
        parts = load_item(opened, saved, context)
        return tuple(parts.values()) if isinstance(parts, dict) else tuple(parts)
    array = read.read_special(opened, saved, context)
    if saved.form == "array":
        tree = saved.orbax
        as_numpy = tree is not None and any(leaf.value_type == "np.ndarray" for leaf in tree.leaves)
        return array if as_numpy else place.as_jax(array, saved.name)
    note = opened.form.read(opened.path, f"{saved.name}/jax_random_key_metadata/metadata") or b"{}"
    if b'"typed": true' in note or b'"typed":true' in note:
        # Orbax does not say which implementation; the key's width tells all but unsafe_rbg
        impl = "threefry2x32" if array.shape[-1] == 2 else "rbg"
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=impl)
    return jax.numpy.asarray(array)


def load_item(opened: Opened, saved: SavedItem, context: Any) -> Any:
    """A tree item as it was saved, with default options."""
    tree = SavedItem(**{**saved.__dict__, "form": "tree"}) if saved.form != "tree" else saved
    request = _request(None, None, False, "error", "error", None)
    planned = _plan(opened, tree, _NOT_SAVED, request, context)
    return planned.finish(_read(opened, planned, request, context, _Tally()))


def _selection(only: Only, item: str, like: Any) -> Select | None:
    """The function that ``only=`` stands for."""
    if isinstance(only, type):
        adapter = None if like is None else _adapters.adapter_for(like)
        if adapter is None or not hasattr(adapter, "select"):
            raise TypeError(
                f"only={only.__name__}: item {item!r} has no adapter that knows this class as a filter: "
                'use a pattern such as only="params/**"'
            )
        return adapter.select(like, only)  # pyright: ignore
    return selector(only, item=item)


def _check_patterns(opened: Opened, prepared: list[_Planned], request: _Request) -> None:
    """A pattern that selects nothing is a mistake, and said so."""
    if request.only is None or any(position is not None for p in prepared for position in p.positions):
        return
    paths = [format_path(path) for planned in prepared for path in planned.item.paths]
    shown = ", ".join(paths[:5]) + (", ..." if len(paths) > 5 else "")
    raise CheckpointNotFound(f"{opened.path}: only={request.only!r} matches no leaf; leaves are {shown}")


def _raise_mismatches(opened: Opened, prepared: list[_Planned]) -> None:
    mismatches = [entry for planned in prepared if planned.match for entry in planned.match.mismatches]
    if mismatches:
        raise StructureMismatch(mismatches, where=opened.path, advice=_advice(mismatches))


def _advice(mismatches: list[Mismatch]) -> str:
    kinds = {entry.kind for entry in mismatches}
    hints = [
        ("missing", 'missing="keep" keeps what the target holds'),
        ("unexpected", 'unexpected="ignore" leaves saved leaves out'),
        ("dtype", "cast=True converts dtypes"),
    ]
    told = [hint for kind, hint in hints if kind in kinds]
    if {"missing", "unexpected"} <= kinds:
        told.append("rename= maps saved paths to wanted ones")
    return f"Where this is intended: {'; '.join(told)}." if told else ""


def _read(opened: Opened, planned: _Planned, request: _Request, context: Any, tally: _Tally) -> list[Any]:
    """The leaves of the result: those that were saved read and placed, the others kept."""
    item = planned.item
    leaves = list(planned.kept)
    text = read.read_texts(opened, item)
    wants: list[read.Want] = []
    results: list[int] = []
    for result, position in enumerate(planned.positions):
        if position is None:
            continue
        spec = item.specs[position]
        if spec.kind in TEXT_KINDS:
            leaves[result] = _text_value(item, position, spec, text)
        elif result in planned.targets:
            wants.append(read.Want(position, planned.targets[result].regions))
            results.append(result)
    if wants:
        for result, (want, parts) in zip(
            results, read.read_leaves(opened, item, wants, request.options, context), strict=True
        ):
            target = planned.targets[result]
            leaves[result] = place.value_of(item.specs[want.leaf], target, parts, item.paths[want.leaf])
    _count(planned, tally, item)
    return leaves


def _text_value(item: SavedItem, position: int, spec: LeafSpec, text: Callable[[int], str]) -> Any:
    try:
        return from_text(text(position), spec)
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        where = format_path(item.paths[position])
        raise CheckpointCorrupt(f"leaf {where}: its text cannot be read: {error}", leaf=where) from error


def _count(planned: _Planned, tally: _Tally, item: SavedItem) -> None:
    prefix = f"{item.name}/" if item.name else ""
    for result, position in enumerate(planned.positions):
        if position is None:
            continue
        path = prefix + format_path(item.paths[position])
        tally.loaded.append(path)
        target = planned.targets.get(result)
        described = item.shardings[position]
        if target is not None and described is not None and target.sharding is not None:
            if place.is_resharded(described, target.sharding):
                tally.resharded.append(path)
    if planned.match is not None:
        tally.missing += [prefix + path for path in planned.match.missing]
        tally.unexpected += [prefix + path for path in planned.match.unexpected]
        tally.cast += [prefix + path for path in planned.match.cast]


def restore(
    path: str | os.PathLike[str],
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
    items were matched, read and verified.

    Args:
        path: of the checkpoint.
        items: further targets by name, for names that are arguments.
        only, rename, cast, missing, unexpected, options: as for ``load``.
        **targets: a live object, or a tree of live or abstract arrays, for each item wanted.

    Raises:
        CheckpointNotFound, CheckpointCorrupt, StructureMismatch: as for ``load``.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/three", params={"w": jnp.ones(3)}, overwrite=True)
        >>> restored = ckpt.restore("/tmp/ckpt-docs/three", params={"w": jnp.zeros(3)})
        >>> restored["params"]["w"]
        Array([1., 1., 1.], dtype=float32)
    """
    request = _request(only, rename, cast, missing, unexpected, options)
    return restore_opened(open_checkpoint(path), {**(items or {}), **targets}, request)


def restore_opened(
    opened: Opened, targets: Mapping[str, Any], request: _Request, step: int | None = None
) -> Restored:
    """``restore`` of a checkpoint that is open already."""
    if not targets:
        raise TypeError(
            "restore needs at least one target, such as model=model; to get what was saved without one, use load"
        )
    context = new_context()
    prepared = [
        _plan(opened, find_item(opened, name), target, request, context) for name, target in targets.items()
    ]
    _raise_mismatches(opened, prepared)
    _check_patterns(opened, prepared, request)
    tally = _Tally()
    # everything is read and verified before the first object is touched
    leaves = [_read(opened, planned, request, context, tally) for planned in prepared]
    finished = {
        planned.item.name: planned.finish(read_leaves)
        # pipelines first: they begin to prefetch while the others are set
        for planned, read_leaves in sorted(
            zip(prepared, leaves, strict=True), key=lambda pair: pair[0].item.form != "process"
        )
    }
    values = {name: finished[name] for name in targets}
    return Restored(values, path=opened.path, metadata=opened.metadata, report=tally.report(), step=step)


make_request = _request
