"""Attributes of a dataset: whether one has changed, and its value in a form that a step can hold."""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import json
import os
import random
import types
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_BYTES = 16 << 20
"""Larger arrays are the data itself: they are not saved, and a change is looked for in samples of them."""

MOST_ELEMENTS = 1 << 20
"""The same for lists."""

_SAMPLES = 1024
_SOME = (4096, 256, 16)
_MOST_COMPARED = 1 << 24
_DEPTH = 2
_DEEPEST = 4
_OPAQUE = "what can't be compared"
_ARRAYS_IN_MEMORY = ("jax", "jaxlib", "torch", "pandas", "tensorflow")
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
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
    if _package(value) == "keras":  # a model has its own item
        return Seen(_Same(value))
    if _is_array_in_memory(value) and _size(value) <= MOST_BYTES:
        with contextlib.suppress(Exception):  # it is on another device, or needs a gradient
            return _seen_array(np.asarray(value))
    if isinstance(value, (collections.deque, array.array, set)):
        return _seen_elements(list(value))
    if depth and not isinstance(value, _CODE) and (parts := _parts(value)):
        return Seen([_Same(value), *(seen(part, depth - 1).content for part in parts.values())])
    return Seen(_Same(value))


def is_order(value: Any) -> bool:
    """Whether it is an order of places: each of 0 to n - 1 once."""
    if isinstance(value, list):
        if not 1 < len(value) <= MOST_ELEMENTS or type(value[0]) is not int:
            return False
        return all(type(one) is int for one in value) and sorted(value) == list(range(len(value)))
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
        return False
    return 1 < value.nbytes <= MOST_BYTES and np.array_equal(np.sort(value), np.arange(len(value)))


UNKNOWN = "?"
"""The fingerprint of what may hold samples, and can't be compared with that of another process."""


def fingerprint(value: Any) -> str | None:
    """What tells a value that may hold samples from another one in every process, or ``UNKNOWN``; None of numbers, functions and models.

    Of large ones samples are compared, and of the arrays of a library that may have to compute or read them, nothing.
    """
    try:
        reduced = _reduced(value)
        if reduced is None:
            return None
        text = json.dumps(reduced)
        return UNKNOWN if _OPAQUE in text else f"{zlib.crc32(text.encode()):08x}"
    except Exception:  # of a class that we do not know
        return UNKNOWN


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


def put(now: Any, value: Any) -> bool:
    """Puts the elements into a list or array that is there, since others may hold it, too; False where that is not possible."""
    if type(now) is list and type(value) is list:
        now[:] = value
        return True
    if not isinstance(now, np.ndarray) or type(now) is not type(value) or _is_of_a_file(now):
        return False
    if now.shape != value.shape or now.dtype != value.dtype or not now.flags.writeable:
        return False
    now[...] = value
    return True


def _is_of_a_file(value: Any) -> bool:
    while isinstance(value, np.ndarray) and not isinstance(value, np.memmap):
        value = value.base
    return value is not None


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
    places: collections.defaultdict[str, list[Any]] = collections.defaultdict(list)
    for text, element in zip(reversed(texts or ()), reversed(now), strict=False):
        places[text].append(element)
    ordered = [places[text].pop() for text in _texts(wanted) or () if places[text]]
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
        return Seen([how, _seen_elements(value.reshape(-1).tolist())])
    if value.nbytes <= MOST_BYTES:
        return Seen([how, _crc(value)], [how, _crc_of_sorted(value)])
    rows = range(0, len(value), max(1, len(value) // _SAMPLES))
    crc = 0
    for row in rows:
        crc = _crc(_sample(np.asarray(value[row]), 64), crc)
    return Seen([how, crc], how)


def _crc(value: np.ndarray, crc: int = 0) -> int:
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data, crc)


def _crc_of_sorted(value: np.ndarray) -> int:
    return _crc(np.sort(value, axis=None))


def _holds_objects(value: np.ndarray) -> bool:
    return value.dtype.hasobject or value.dtype.kind == "T"


def _reduced(value: Any, depth: int = 0) -> Any:
    """A value for JSON with what a fingerprint compares."""
    if isinstance(value, np.generic):
        return _reduced(value.item(), depth)
    if isinstance(value, (bool, int, float, str, type(None))):
        return value if depth else None
    if isinstance(value, (bytes, complex, os.PathLike)):
        return repr(value) if depth else None
    if isinstance(value, np.ndarray):
        if _holds_objects(value):
            return [value.shape, _reduced(value.reshape(-1).tolist(), depth + 1)]
        if value.ndim == 1 and depth < 2 and not _is_of_a_file(value):  # labels may be rare
            return [value.shape, str(value.dtype), _crc(value)]
        return repr(
            _seen_array(value).content if depth < 2 else (value.shape, _crc(_sample(value)))
        )
    if _package(value) == "keras" or is_generator(value) or isinstance(value, _CODE):
        return None
    if _is_array_in_memory(value):
        return _reduced(np.asarray(value), depth) if _size(value) <= MOST_BYTES else _OPAQUE
    if depth > _DEEPEST:
        return _OPAQUE
    if isinstance(value, (list, tuple)):
        found = [(one, _reduced(one, depth + 1)) for one in _some(value, depth)]
        return [len(value), [_OPAQUE if r is None is not one else r for one, r in found]]
    if isinstance(value, dict):
        # Under names, numbers are settings; under numbers, they may be of samples.
        parts = {key: value[key] for key in _some(list(value), depth)}
        found = {
            repr(key): _reduced(one, depth + 1)
            for key, one in parts.items()
            if not (_is_plain(one) and isinstance(key, str))
        }
        return [len(value), found] if found else None
    if hasattr(type(value), "__len__"):
        return _OPAQUE
    found = {
        name: _reduced(part, depth + 1)
        for name, part in _parts(value).items()
        if not _is_plain(part)
    }
    return {name: part for name, part in found.items() if part is not None} or None


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _is_array_in_memory(value: Any) -> bool:
    return _package(value) in _ARRAYS_IN_MEMORY and hasattr(type(value), "__array__")


def _parts(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots, too; nothing of one that does not let us look."""
    parts: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        parts |= getattr(value, "__dict__", {})
        for cls in type(value).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    parts[name] = getattr(value, name)
    return parts


def _some(value: Any, depth: int) -> Any:
    """All elements of a flat list; of others, and inside others, some of them."""
    if depth == 0 and len(value) <= _MOST_COMPARED and all(map(_is_plain, value)):
        return value
    most = _SOME[min(depth, len(_SOME) - 1)]
    return value if len(value) <= most else value[:: -(-len(value) // most)]


def _size(value: Any) -> int:
    size = getattr(value, "nbytes", None)
    if not isinstance(size, int):
        size = getattr(value, "size", None)
        return size * 16 if isinstance(size, int) else MOST_BYTES + 1  # of a table, in elements
    return size


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else os.fspath(value)


def _sample(value: np.ndarray, count: int = 4096) -> np.ndarray:
    """Elements from all over it: what is at the beginning may be a white border."""
    return value.reshape(-1)[:: max(1, value.size // count)]


def _texts(value: Any) -> list[str] | None:
    if all(type(part) is str for part in value):
        return [json.encoder.encode_basestring_ascii(part) for part in value]
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
