"""Attributes of a dataset: whether one has changed, and its value in a form that a step can hold."""

from __future__ import annotations

import copy
import json
import os
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_BYTES = 16 << 20
"""Larger arrays are the data itself: they are not saved, and a change is looked for in samples of them."""

MOST_ELEMENTS = 1 << 20
"""The same for lists."""

_SAMPLES = 64
_SAMPLED_ABOVE = 1 << 16
_DEPTH = 2
_PARTS = 1000
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


@dataclass(frozen=True)
class Seen:
    """What an attribute was at one time.

    Attributes:
        content: differs where the attribute has changed.
        elements: the same for any order of the same elements; None where there is no order.
    """

    content: Any
    elements: Any = None


class _Same:
    """Equal to itself alone; keeps the object alive, so that no other one gets its place in memory."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers, of numpy or Python."""
    return isinstance(value, _GENERATORS)


def seen(value: Any, depth: int = _DEPTH) -> Seen:
    """What the attribute is now; of objects that cannot be saved, the attributes are looked at, too."""
    if isinstance(value, _PLAIN):
        return Seen(repr(value))
    if is_generator(value):
        return Seen(repr(_state_of(value)))
    if isinstance(value, np.ndarray):
        return _seen_array(value)
    if isinstance(value, (list, tuple, dict)):
        return _seen_elements(value)
    if type(value).__module__.partition(".")[0] == "keras":  # a model has its own item
        return Seen(_Same(value))
    parts = getattr(value, "__dict__", None)
    if depth and isinstance(parts, dict) and not isinstance(value, type):
        return Seen([_Same(value), *(seen(part, depth - 1).content for part in parts.values())])
    return Seen(_Same(value))


def may_be_order(value: Any) -> bool:
    """Whether it looks like an order: elements that a step can hold, all different."""
    if isinstance(value, np.ndarray):
        indices = value.ndim == 1 and value.dtype.kind in "iuU" and value.nbytes <= MOST_BYTES
        return indices and len(np.unique(value)) == len(value) > 1
    if not isinstance(value, list) or not 1 < len(value) <= MOST_ELEMENTS:
        return False
    try:
        return len(set(value)) == len(value) and _texts(value) is not None
    except TypeError:  # elements that have no hash
        return False


def fingerprints(own: Iterable[tuple[str, Any]], depth: int = _DEPTH) -> dict[str, str]:
    """The ``fingerprint`` of each sequence, by name; of those inside objects and dicts by names such as `sampler.order`."""
    found: dict[str, str] = {}
    for name, value in own:
        text = fingerprint(value)
        if text is not None:
            found[name] = text
        elif depth and type(value).__module__.partition(".")[0] != "keras":
            parts = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            if isinstance(parts, dict) and not isinstance(value, type) and len(parts) <= _PARTS:
                inside = [(f"{name}.{part}", held) for part, held in list(parts.items())]
                found |= fingerprints(inside, depth - 1)
    return found


def fingerprint(value: Any) -> str | None:
    """What tells a list, tuple or array of two or more elements from another one in every process; None of anything else.

    It begins with the length. Of large ones samples are compared: enough to see another order.
    """
    if isinstance(value, (list, tuple)):
        count, content = len(value), _text_of_sample(value)
    else:
        array = _as_array(value)
        if array is None:
            return None
        count = len(array)
        content = (
            _text_of_sample(array) if _holds_objects(array) else repr(_seen_array(array).content)
        )
    if count < 2 or content is None:
        return None
    return f"{count} {zlib.crc32(content.encode('utf-8', 'surrogatepass')):08x}"


def length_of(text: str) -> int:
    """The length of the sequence with this fingerprint."""
    return int(text.partition(" ")[0])


def length_of_held(held: Mapping[str, Any]) -> int:
    """The length of the sequence that ``stored`` took; 0 of anything else."""
    if "array" in held:
        return len(held["array"]) if np.ndim(held["array"]) else 0
    value = json.loads(held.get("texts", held.get("text", "0")))
    return len(value) if isinstance(value, list) else 0


def places_of(value: Any, now: Any) -> list[int]:
    """Where each element of an order stands in ``now``, another order of the same elements, all different."""
    place = {one: at for at, one in enumerate(now.tolist() if isinstance(now, np.ndarray) else now)}
    return [place[one] for one in (value.tolist() if isinstance(value, np.ndarray) else value)]


def taken_from(value: Any, at: list[int]) -> Any:
    """The elements at these places, as the same kind of sequence; None of what can't be reordered here."""
    if isinstance(value, np.ndarray):
        return value[at] if value.nbytes <= MOST_BYTES else None
    if type(value) in (list, tuple) and len(value) <= MOST_ELEMENTS:
        return type(value)(value[place] for place in at)
    return None


def stored(value: Any, *, renewed: bool) -> dict[str, Any] | None:
    """The value for a step, or None where it has no form for it; ``renewed``: not only its order has changed."""
    if is_generator(value):
        return {"generator": copy.deepcopy(value)}
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufcU" or value.nbytes > MOST_BYTES:
            return None
        held: dict[str, Any] = {"array": value.copy()}
        if value.dtype.kind == "U":
            held = {"texts": json.dumps(value.tolist()), "dtype": value.dtype.str}
    else:
        held = {"tuple": 1} if type(value) is tuple else {}
        value = list(value) if held else value.item() if isinstance(value, np.generic) else value
        an_order = isinstance(value, list) and not renewed
        text = _text(value, _scalar if an_order else os.fspath)
        # From the text alone, tuples in it would come back as lists: an order is put together from what is there.
        if text is None or (not an_order and json.loads(text) != value):
            return None
        held |= {"text": text}
    return held | {"renewed": int(renewed)}


def why_not(value: Any) -> str:
    """Why ``stored`` has no form for it, after "and"."""
    if isinstance(value, np.ndarray) and value.nbytes > MOST_BYTES:
        return f"is an array of {value.nbytes >> 20} MiB"
    if isinstance(value, list) and len(value) > MOST_ELEMENTS:
        return f"is a list of {len(value):,} elements"
    return f"is a {type(value).__name__}"


def restored(held: Mapping[str, Any], now: Any) -> Any:
    """The value that ``stored`` took, for an attribute that is ``now`` there.

    Raises ValueError if that is another kind of value, or has other elements, so that the saved order is none of them.
    """
    if "generator" in held:
        return _continued(now, held["generator"])
    if "text" in held:
        value = json.loads(held["text"])
        if held.get("tuple"):
            if type(now) is not tuple:
                raise ValueError(f"it is a {type(now).__name__}")
            return tuple(value if held["renewed"] else _in_order(value, list(now)))
        if isinstance(now, list) and not held["renewed"]:
            return _in_order(value, now)
        if isinstance(now, np.generic):
            return type(now)(value)
        if type(value) is not type(now) and value is not None and now is not None:
            raise ValueError(f"it is a {type(now).__name__}")
        return value
    value = np.array(json.loads(held["texts"]), held["dtype"]) if "texts" in held else held["array"]
    if not isinstance(now, np.ndarray) or now.dtype.kind != value.dtype.kind:
        raise ValueError(f"it is a {type(now).__name__}")
    if not held["renewed"] and _crc_of_sorted(now) != _crc_of_sorted(value):
        raise ValueError(f"{now.size} elements are no order of the {value.size} that were saved")
    return np.array(value, now.dtype)


def _continued(generator: Any, saved: Any) -> Any:
    """The generator with the saved state, set in place: other objects may hold it, too."""
    if type(generator) is not type(saved):
        raise ValueError(f"it is a {type(generator).__name__}")
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = saved.bit_generator.state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(saved.get_state())
    else:
        generator.setstate(saved.getstate())
    return generator


def _in_order(wanted: list[Any], now: list[Any]) -> list[Any]:
    """The elements of a list in the order of their texts."""
    texts = _texts(now)
    places: defaultdict[str, list[Any]] = defaultdict(list)
    for text, element in zip(reversed(texts or ()), reversed(now), strict=False):
        places[text].append(element)
    ordered = [places[text].pop() for text in map(json.dumps, wanted) if places[text]]
    if len(ordered) != len(wanted) or len(ordered) != len(now):
        raise ValueError(f"{len(now)} elements are no order of the {len(wanted)} that were saved")
    return ordered


def _seen_elements(value: Any) -> Seen:
    kind, parts = type(value).__name__, value.items() if isinstance(value, dict) else value
    try:
        hashes = [hash(part) for part in parts]
    except TypeError:  # of lists, say
        if len(value) <= MOST_ELEMENTS:
            texts = None if isinstance(value, dict) else _texts(value)
            if texts is not None:
                hashes = [hash(text) for text in texts]
                return Seen([kind, hash(tuple(hashes))], [kind, len(hashes), sum(hashes)])
            if (text := _text(value)) is not None:
                return Seen([kind, text])
        held = value.values() if isinstance(value, dict) else value
        return Seen([kind, len(value), *map(_Same, list(held)[:_SAMPLES])])
    return Seen([kind, hash(tuple(hashes))], [kind, len(hashes), sum(hashes)])


def _seen_array(value: np.ndarray) -> Seen:
    how = f"{value.dtype} {value.shape}"
    if _holds_objects(value):
        elements = value.reshape(-1)[:_SAMPLES].tolist()
        return Seen([how, *map(_Same, elements)])
    if value.nbytes <= MOST_BYTES:
        return Seen([how, _crc(value)], [how, _crc_of_sorted(value)])
    rows = range(0, len(value), max(1, len(value) // _SAMPLES))
    crc = 0
    for row in rows:
        crc = _crc(_sample(np.asarray(value[row])), crc)
    return Seen([how, crc], how)


def _crc(value: np.ndarray, crc: int = 0) -> int:
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data, crc)


def _crc_of_sorted(value: np.ndarray) -> int:
    return _crc(np.sort(value, axis=None))


def _as_array(value: Any) -> np.ndarray | None:
    """An array, or what becomes one in memory that is not large."""
    if not isinstance(value, np.ndarray):
        size, limit = getattr(value, "nbytes", None), MOST_BYTES
        if not isinstance(size, int):
            size, limit = getattr(value, "size", None), MOST_ELEMENTS
        if not hasattr(value, "__array__") or not isinstance(size, int) or size > limit:
            return None
        try:
            value = np.asarray(value)
        except Exception:  # of a library that we do not know
            return None
    return value if value.ndim else None


def _holds_objects(value: np.ndarray) -> bool:
    return value.dtype.hasobject or value.dtype.kind == "T"


def _text_of_sample(value: Any) -> str | None:
    stride = 1 if len(value) <= _SAMPLED_ABOVE else len(value) >> 12
    try:
        return json.dumps(list(value[::stride]), default=_scalar_or_sample)
    except (TypeError, ValueError, RecursionError):
        return None


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else os.fspath(value)


def _scalar_or_sample(value: Any) -> Any:
    if isinstance(value, np.ndarray) and not _holds_objects(value):
        return [value.shape, _crc(_sample(value))]
    return _scalar(value)


def _sample(value: np.ndarray) -> np.ndarray:
    """Elements from all over it: what is at the beginning may be a white border."""
    return value.reshape(-1)[:: max(1, value.size >> 12)]


def _texts(value: Any) -> list[str] | None:
    try:
        return [json.dumps(part, default=_scalar) for part in value]
    except (TypeError, ValueError, RecursionError):
        return None


def _text(value: Any, other: Callable[[Any], Any] = os.fspath) -> str | None:
    if isinstance(value, (list, tuple)) and len(value) > MOST_ELEMENTS:
        return None
    if not isinstance(value, (*_PLAIN, list, tuple, dict)):
        return None
    try:
        return json.dumps(value, default=other)
    except (TypeError, ValueError, RecursionError):
        return None


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return (
        generator.get_state()
        if isinstance(generator, np.random.RandomState)
        else generator.getstate()
    )
