"""What the processes of a save agree on: that they save the same, and what each has written.

Each process computes by itself who writes which region: if structure, shapes, chunks or shardings differed, regions would
be written twice or not at all. So each sends a digest of them before anything is written, computed once for each plan. One
that differs from process 0 sends its facts, and the error names the first setting or leaf that differs.

Of numbers, texts, numpy arrays and arrays bound to no device each process has its own, and one is saved for all. So these
are compared, too, as texts: else all processes but one would go on with another's value.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckpt_core._devices.shardings import where_text
from ckpt_core._directory import Attempt
from ckpt_core._errors import CheckpointError
from ckpt_core._format.packed import pack, unpack
from ckpt_core._format.record import FileRecord
from ckpt_core._processes import Round
from ckpt_core._storage import ArrayWriter, joined
from ckpt_core._tree import Node, Path, compared_values, format_path
from ckpt_core._tree.leaves import LeafSpec

if TYPE_CHECKING:
    from ckpt_core._save.job import PreparedItem, SaveJob
    from ckpt_core._save.plan import PlannedLeaf

_SHOWN = 160  # a message shows at most this many characters of each of two differing texts
_WHOLE_TEXT = 80  # a value of so many characters or less is compared as it is, not by its digest
_NAMED = 5  # a message lists at most this many of the processes that differ
_MOST_PASSED_BYTES = 2**32
_KINDS = {
    "tree": "a tree",
    "process": "one state of each process",
    "files": "files",
    "json": "plain values",
}


SETTING = "setting"
"""Kind of a fact that is no leaf, but an argument or option; its path is the name of that."""


class Fact(NamedTuple):
    """What processes compare of one leaf or container: texts, empty where they do not apply."""

    path: str
    kind: str  # type of the container; or kind, dtype and shape of the leaf
    chunk: str = ""  # shape of the stored chunks
    codec: str = ""
    sharding: str = ""  # which device holds which part
    value: str = ""  # where one is saved and each process has its own: shown, or its digest


_ASPECTS = {
    "kind": ("the structure of the state", "save the same tree"),
    "sharding": (
        "the sharding",
        "hold parts of the same global arrays, on one mesh with one order of devices",
    ),
    "chunk": ("the shape of stored chunks", "save with the same Options(chunk_bytes=)"),
    "codec": ("the compression", "save with the same Options(compression=)"),
    "value": (
        "a value that every process has of its own",
        "hold the same value there, since one is saved and all get it back. What belongs to each process alone, such as "
        "the position of its data, goes into an object with per_process = True, get_state and set_state, passed as an "
        "item of its own",
    ),
}
"""For each field of a Fact that may differ, causes before effects: how a message names it, and what
all processes must do."""


def facts(
    root: Node, leaves: Iterable[tuple[PlannedLeaf, Any, Any, str]], own: bool
) -> Iterator[Fact]:
    """The facts of a pytree, in the order of its structure. ``leaves``: planned leaf, sharding of the stored array, of the
    array, value; with ``own`` each process has a checkpoint of its own.
    """
    left = iter(leaves)
    # thousands of leaves share few of these
    kind_of, static = functools.cache(_kind_of), functools.cache(_static_text)

    @functools.cache
    def where(bound: tuple[Any, bool], shape: tuple[int, ...]) -> str:
        return where_text(*bound, shape, own)

    def of(node: Node, path: Path) -> Iterator[Fact]:
        if node.kind == "leaf":
            leaf, stored, sharding, value = next(left)
            places: list[str] = []
            if stored is not None:
                places.append(where(stored, leaf.spec.stored_shape))
                if sharding is not None and sharding is not stored:
                    places.append(where(sharding, leaf.spec.shape))
            yield Fact(
                format_path(path),
                kind_of(leaf.spec),
                str(leaf.chunk),
                leaf.codec or "none",
                "; ".join(places),
                value,
            )
            return
        kind = f"{node.kind} {node.type_name}".rstrip()
        numbers = [key for key in node.keys if not isinstance(key, str)]
        if numbers and node.kind not in ("list", "tuple"):
            kind += f" with the integer keys {numbers}"
        compared = node.static and node.kind == "custom" and not own
        yield Fact(format_path(path), kind, value=static(node.static) if compared else "")
        # the state of a live object has the object's path
        below = [(*path, key) for key in node.keys] if node.kind != "expanded" else [path]
        for inner, child in zip(below, node.children, strict=True):
            yield from of(child, inner)

    return of(root, ())


def _kind_of(spec: LeafSpec) -> str:
    text = str(spec) if str(spec).startswith(spec.kind) else f"{spec.kind} {spec}"
    return f"{text} {spec.detail}".rstrip()


def _static_text(text: str) -> str:
    """What a restore compares of static fields, which each process has for itself; texts only warn there."""
    values = compared_values(text).items()
    told = {name: value for name, value in values if not _is_text(value)}
    return text_of_text(repr(told)) if told else ""


def layout_of(all_facts: Iterable[Fact]) -> str:
    """A digest of these facts, which processes compare first: if it is equal, all facts are."""
    digest = hashlib.sha256()
    for fact in all_facts:
        digest.update(repr(tuple(fact)).encode(errors="surrogatepass"))
    return digest.hexdigest()


def dump_facts(all_facts: Sequence[Fact]) -> str:
    """The facts as text, in which each distinct text occurs once; compressed, as there may be 100,000."""
    texts = list(dict.fromkeys(text for fact in all_facts for text in fact))
    places = {text: place for place, text in enumerate(texts)}
    data = json.dumps([texts, [[places[text] for text in fact] for fact in all_facts]])
    return base64.b85encode(zlib.compress(data.encode())).decode()


def parse_facts(text: str) -> list[Fact]:
    """The facts that ``dump_facts`` wrote."""
    texts, chosen = json.loads(zlib.decompress(base64.b85decode(text)))
    return [Fact(*(texts[place] for place in places)) for places in chosen]


def difference(ours: Sequence[Fact], theirs: Sequence[Fact], process: int) -> tuple[str, str, str]:
    """The first difference from process 0, which calls it: the subject of a sentence, both values, and what all must do."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    mine, other = (side[at] if at < len(side) else None for side in (ours, theirs))
    what, must = _ASPECTS["kind"]
    if mine is None or other is None or mine.path != other.path:
        return what, _path_difference(ours, mine, theirs, other, process), must
    if mine.kind == SETTING:
        how = f"{mine.value} on process 0, and {other.value} on process {process}"
        return mine.path, how, "save the same"
    for aspect, (what, must) in _ASPECTS.items():
        a, b = getattr(mine, aspect), getattr(other, aspect)
        if a != b:
            a, b = _shortened(a, b)
            how = f"{mine.path} is {a} on process 0, and {b} on process {process}"
            return what, how, must
    raise AssertionError("the facts are equal")


def _path_difference(
    ours: Sequence[Fact],
    mine: Fact | None,
    theirs: Sequence[Fact],
    other: Fact | None,
    process: int,
) -> str:
    """How two pytrees differ in their paths: a leaf on one process only, or another order."""
    if other is not None and other.path not in {fact.path for fact in ours}:
        return f"{other.path} ({other.kind}) is on process {process}, and not on process 0"
    if mine is not None and mine.path not in {fact.path for fact in theirs}:
        return f"{mine.path} ({mine.kind}) is on process 0, and not on process {process}"
    first, second = ("nothing" if fact is None else fact.path for fact in (mine, other))
    return f"where process 0 has {first}, process {process} has {second}: another order"


def _shortened(one: str, other: str) -> tuple[str, str]:
    """Two differing texts, cut to 160 characters around the first difference if they are longer."""
    if max(len(one), len(other)) <= _SHOWN:
        return one, other
    pairs = enumerate(zip(one, other, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
    start = max(0, at - _SHOWN // 2)
    first, second = (f"{'...' * (start > 0)}{text[start:][:_SHOWN]}" for text in (one, other))
    return first, second


def text_of_array(values: np.ndarray[Any, Any], spec: LeafSpec) -> str:
    """A single number as it is, else a digest; equal if and only if all bits are."""
    if values.size == 1 and spec.kind != "bytes":
        one = values.reshape(-1)[0].item()
        # a NaN has bits that it does not show
        if isinstance(one, bool | int | float) and one == one:
            return repr(one)
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return _digest(bits.data)


def _is_text(value: Any) -> bool:
    """Whether a restore only warns of another value."""
    return isinstance(value, str | None) or (isinstance(value, tuple) and all(map(_is_text, value)))


def text_of_text(text: str) -> str:
    """Short text as it is, else a digest."""
    return repr(text) if len(text) <= _WHOLE_TEXT else _digest(text.encode(errors="surrogatepass"))


def digest_of(values: Mapping[str, str]) -> str:
    """One digest of all values of an item, by name."""
    ordered: Sequence[tuple[str, str]] = sorted(values.items())
    return _digest(repr(ordered).encode(errors="surrogatepass")) if ordered else ""


def _digest(data: bytes | memoryview) -> str:
    return f"of SHA-256 {hashlib.sha256(data).hexdigest()[:32]}"


def agree_to_save(
    together: Round,
    items: Sequence[PreparedItem],
    settings: Mapping[str, Any],
    offer: Callable[[], Any],
    refusal: Exception | None,
    combine: Callable[[list[Any]], Any],
) -> Any:
    """What ``combine`` on process 0 makes of all offers, once all processes agree that they save the same, with the same
    ``settings``. A ``refusal``, which stopped preparation here, or an error of ``offer`` is raised after the others know
    of it, who raise one of its class. If one saves something else, CheckpointError names what differs first.
    """
    text = ""
    try:
        if refusal is None:
            offered = offer()
            text = json.dumps([items_layout(items, settings), offered], separators=(",", ":"))
    except Exception as error:
        refusal = error

    def judge(texts: list[str]) -> str:
        layouts, offers = zip(*map(json.loads, texts), strict=True)
        if differing := [n for n, layout in enumerate(layouts) if layout != layouts[0]]:
            return json.dumps({"differing": differing[:_NAMED]})
        return json.dumps({"offer": combine([*offers])}, separators=(",", ":"))

    answer = json.loads(together.decide(text, judge, error=refusal))
    if "differing" in answer:
        text = _how_they_differ(together, items, settings, answer["differing"])
        raise CheckpointError(f"{together.where}: {text}")
    return answer["offer"]


def _how_they_differ(
    together: Round,
    items: Sequence[PreparedItem],
    settings: Mapping[str, Any],
    differing: Sequence[int],
) -> str:
    """The message about the first leaf that differs between process 0 and ``differing[0]``; every process calls it."""
    index, shows = together.processes.index, together.processes.index == differing[0]
    facts = list(items_facts(items, settings)) if shows or index == 0 else []

    def judge(texts: list[str]) -> str:
        what, how, must = difference(facts, parse_facts(texts[differing[0]]), differing[0])
        return (
            f"{what} on processes {list(differing)} differs from that on process 0: {how}: all "
            f"processes must {must}"
        )

    return together.decide(dump_facts(facts) if shows else "", judge)


def items_layout(items: Sequence[PreparedItem], settings: Mapping[str, Any]) -> str:
    """Digest of all items; equal on all processes that save the same."""
    ordered = sorted(items, key=lambda item: item.name)
    layouts = ["" if item.plan is None else item.plan.layout for item in ordered]
    heads = [
        _head(item)._replace(chunk=layout, value=digest_of(item.values))
        for item, layout in zip(ordered, layouts, strict=True)
    ]
    return layout_of([*_settings(settings), *heads])[:24]


def items_facts(items: Sequence[PreparedItem], settings: Mapping[str, Any]) -> Iterator[Fact]:
    """All facts that must be equal on all processes, the settings first, then item by item."""
    yield from _settings(settings)
    for item in sorted(items, key=lambda item: item.name):
        yield _head(item)
        for fact in () if item.plan is None else item.plan.facts(item.values):
            path = fact.path if len(items) == 1 else f"{item.name}/{fact.path}"
            yield fact._replace(path=path)


def _settings(settings: Mapping[str, Any]) -> Iterator[Fact]:
    return (Fact(name, SETTING, value=repr(value)) for name, value in settings.items())


def _head(item: PreparedItem) -> Fact:
    record = item.record
    kind = _KINDS[record.form]
    value = item.values.get("", "")
    return Fact(f"item {item.name}", f"{kind}, of {record.process_count} processes", value=value)


def pass_part(
    attempt: Attempt,
    process: int,
    files: Mapping[str, FileRecord],
    writers: Mapping[str, ArrayWriter],
) -> str:
    """Passes to process 0 which files a process wrote, and where its arrays stand; returns the ``size_and_crc`` of that."""
    said = [[name, one.size_bytes, one.crc32, one.data] for name, one in files.items()]
    rows = {item: writer.rows.dump() for item, writer in writers.items()}
    data = pack({"": json.dumps(said).encode()} | rows)
    attempt.write(_passed(process), data, until_commit=True)
    return size_and_crc(data)


def join_parts(
    attempt: Attempt,
    passed: Sequence[str],
    files: dict[str, FileRecord],
    writers: Mapping[str, ArrayWriter],
) -> None:
    """On process 0: adds what the others ``passed`` to its files and rows; CheckpointError if a file is not as written."""
    dumped = {item: [writer.rows.dump()] for item, writer in writers.items()}
    for process, said in list(enumerate(passed))[1:]:
        name = _passed(process)
        try:
            data = attempt.take(name)
        except FileNotFoundError:
            data = b""
        if said != size_and_crc(data):
            raise _unseen(attempt, name, "the same")
        parts = unpack(data, _MOST_PASSED_BYTES)
        for path, *file in json.loads(parts.pop("")):
            files[path] = FileRecord(*file)
        for item, rows in parts.items():
            dumped[item].append(rows)
    known_bytes = {name: file.size_bytes for name, file in files.items()}
    present = attempt.files(known_bytes=known_bytes)
    for name, size_bytes in known_bytes.items():
        if present.get(name) != size_bytes:
            raise _unseen(attempt, name, f"{size_bytes} bytes")
    for name in present.keys() - files.keys():
        files[name] = FileRecord.of(attempt.read(name))
    for item, writer in writers.items():
        writer.rows = joined(dumped[item])


def _passed(process: int) -> str:
    """Name of the file that a process passes to process 0."""
    return f"ckpt.passed_{process}"


def size_and_crc(passed: bytes) -> str:
    """By which process 0 knows that it has read what was passed."""
    return f"{len(passed)} {zlib.crc32(passed)}"


def _unseen(attempt: Attempt, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{attempt.path}: the process that wrote {name} left {what} there, and process 0 does not see it: do all "
        "processes see the same files at once?"
    )


def refuse_unseen(attempt: Attempt, token: str, job: SaveJob) -> None:
    """Raises CheckpointError if this process does not see the token file of process 0."""
    try:
        seen = attempt.read("ckpt.token")
    except FileNotFoundError:
        seen = b""
    if seen != token.encode():
        raise CheckpointError(
            f"{job.target} is not a directory that all processes share: process "
            f"{job.processes.index} does not see what process 0 wrote in it"
        )
