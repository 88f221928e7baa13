"""Attributes of a dataset: a fingerprint of what each of them is, and its value in a form that a step can hold."""

from __future__ import annotations

import collections
import copy
import io
import itertools
import json
import os
import pickle
import random
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

import crc32c
import numpy as np

from ckpt_keras._closed import description, is_closed, is_library, keras_module, package
from ckpt_keras._owners import GENERATORS, PLAIN, Attribute, Found, says_how

MOST_BYTES = 16 << 20
"""Larger arrays are the data itself: they are compared, but no step holds them."""

MOST_ELEMENTS = 1 << 20
"""The same for lists."""

MOST_PARTS = 16
"""More sequences in one are no columns."""

OPAQUE = "opaque "
"""What the fingerprints of locks, files, models and the like begin with, which differ by their class alone."""

UNKNOWN = " ?"
"""What the fingerprints of what cannot be looked into end with; they are never the same."""

_LARGE_BYTES = 1 << 16
_SETTINGS = (bool, float, np.bool_, np.floating)
_OPENED_LATER = (OPAQUE, "NoneType ", "bool ", "int ", "float ")
_ORDERED = (list, tuple, np.ndarray)
_KINDS = {"list": list, "tuple": tuple}
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)


# ---- what an attribute is ------------------------------------------------------------------------


def fingerprint(value: Any, dataset: Any = None, found: Found | None = None) -> str:
    """A text that distinguishes a value from any other one, in every process; `UNKNOWN` after its class if that fails.
    All of it is read, nothing is sampled. A reference to ``dataset`` does not count; classes and modules of the program
    count by name alone, and ``found`` takes them.
    """
    name = type(value).__name__
    try:
        if is_closed(value):
            return OPAQUE + description(value)
        if type(value) in (set, frozenset):
            value = sorted(map(repr, value))  # whose order differs from process to process
        elif type(value) in (list, tuple) and _is_of_one_kind(value, np.number, np.bool_):
            value = np.array(value)  # pickle takes 25 us for each
        into = _Sum()
        _Pickler(into, dataset, found).dump(value)
        return f"{name} {into.crc:08x}-{into.size_bytes:x}"
    except Exception:  # whatever a class of the user's raises
        return name + UNKNOWN


def _is_of_one_kind(value: Any, *scalars: type) -> bool:
    """Whether all elements are of one class, one of these of numpy: ``list(rng.permutation(n))`` is of numbers."""
    kinds = set(map(type, value))
    return len(kinds) == 1 and issubclass(kinds.pop(), scalars)


class _Sum(io.RawIOBase):
    """A checksum of what is written."""

    crc = 0
    size_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc = crc32c.crc32c(view, self.crc)
        self.size_bytes += len(view)
        return len(view)


class _Pickler(pickle.Pickler):
    """Writes what pickle would, without memory of what it has written: equal values are equal, whether they share parts or not."""

    def __init__(self, into: _Sum, dataset: Any, found: Found | None, whole: Any = None) -> None:
        super().__init__(
            into, protocol=5, buffer_callback=lambda part: into.write(part.raw()) and None
        )
        self.fast = True
        self._dataset = dataset
        self._found = found
        self._whole = whole  # a large array, which is written
        self._arrays: dict[int, tuple[Any, str]] = {}  # that stay where they are meanwhile

    def reducer_override(self, value: Any) -> Any:
        if value is _made_of:
            return NotImplemented
        if value is self._dataset:
            return _made_of, ("the dataset",)
        if type(value) is np.ndarray:
            return self._of_array(value)
        if isinstance(value, (type, types.ModuleType)):
            if self._found is not None:
                self._found.add(value)
            return _made_of, (f"{getattr(value, '__module__', '')}.{value.__name__}",)
        if is_closed(value):
            return _made_of, (description(value),)
        if type(value) is itertools.count:
            return _made_of, (repr(value),)
        if hasattr(type(value), "__next__"):
            raise TypeError("looking at what is left in an iterator may take it")
        if isinstance(value, GENERATORS) and _is_global(value):
            return _made_of, ("global random state",)  # which steps hold for themselves
        if isinstance(value, GENERATORS):  # whose seed need not be the same
            return _made_of, (type(value).__name__, _state_of(value))
        if type(value).__name__ == "_lru_cache_wrapper":
            return _made_of, ("cached", getattr(value, "__wrapped__", None))
        if isinstance(value, types.FunctionType):
            if _is_named_in_library(value):
                return _made_of, (value.__module__, value.__qualname__)
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            named = value.__defaults__, value.__kwdefaults__, value.__dict__
            return _made_of, (value.__qualname__, *named, cells)
        other: Any = value
        if package(type(value).__module__) == "torch" and hasattr(value, "detach"):
            return _made_of, (np.asarray(other.detach().cpu()),)
        if isinstance(value, keras_module().random.SeedGenerator):
            return _made_of, (np.asarray(other.state),)
        if not says_how(type(value)) or is_library(type(value).__module__):
            return NotImplemented
        return self._with_what_is_left_out(value)

    def _with_what_is_left_out(self, value: Any) -> Any:
        """What `__getstate__` leaves out may be the labels; in a library's class it is no data, and often cannot be written."""
        own = getattr(value, "__dict__", None)
        if not own:
            return NotImplemented
        try:
            _Pickler(_Sum(), self._dataset, self._found).dump(own)
        except Exception:
            return NotImplemented
        said = value.__reduce_ex__(5)
        parts = [said] if isinstance(said, str) else said
        return _made_of, (
            [list(part) if hasattr(part, "__next__") else part for part in parts],
            own,
        )

    def _of_array(self, value: np.ndarray) -> Any:
        """Of equal arrays the same, whatever their strides; a large one is read once, however many refer to it."""
        if value.nbytes >= _LARGE_BYTES and not value.dtype.hasobject and value is not self._whole:
            if id(value) not in self._arrays:
                into = _Sum()
                _Pickler(into, self._dataset, None, value).dump(value)
                self._arrays[id(value)] = value, f"{into.crc:08x}-{into.size_bytes:x}"
            return _made_of, (self._arrays[id(value)][1],)
        if value.flags.c_contiguous:
            return NotImplemented
        return np.ascontiguousarray(value).__reduce_ex__(5)


def _is_named_in_library(function: Any) -> bool:
    """Whether it is what a library has under this name, and no function that one has made for the program."""
    if not is_library(str(function.__module__)):
        return False
    there: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        there = getattr(there, name, None)
    return there is function


def _is_global(generator: Any) -> bool:
    """Whether the functions of `random` or `np.random` draw from it."""
    functions: Any = random.seed, np.random.shuffle
    return any(generator is getattr(one, "__self__", None) for one in functions)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return bits.state, getattr(bits.seed_seq, "n_children_spawned", 0)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.getstate()


def _made_of(*what: Any) -> Any:
    """What the pickle of something is made of; nobody reads it."""
    return what


def same(now: str, saved: str) -> bool:
    """Whether two fingerprints are of the same value, for sure."""
    return now == saved and not now.endswith(UNKNOWN)


def may_differ(now: Any, saved: str) -> bool:
    """Whether an attribute may be ``now`` what it is in this program, whatever it was in the step: a switch or a fraction, by which no
    sample is found, or what is opened or counted only when the dataset is used."""
    if isinstance(now, np.memmap):  # another part of the file
        return False
    if now is None or is_closed(now):
        return saved.startswith(_OPENED_LATER)
    return isinstance(now, _SETTINGS) and saved.startswith(
        (f"{type(now).__name__} ", "int ", "float ")
    )


def is_dict(value: Any) -> bool:
    """Whether it is a dict, which may be a cache."""
    return type(value) in _DICTS


def began_as(value: Any, count: int, text: str, dataset: Any) -> bool:
    """Whether the first ``count`` entries of a dict have this fingerprint: then it has only grown, as a cache does."""
    try:
        beginning = copy.copy(value)
        for key in list(beginning)[count:]:
            del beginning[key]
    except Exception:  # another thread fills it
        return False
    return len(beginning) == count and same(fingerprint(beginning, dataset), text)


def is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers, of numpy or Python, whose state can be set."""
    if type(value) is np.random.Generator:
        return not getattr(value.bit_generator.seed_seq, "n_children_spawned", 0)
    return type(value) in (np.random.RandomState, random.Random)


def is_order(value: Any) -> bool:
    """Whether it is an order of places: each of 0 to n - 1 once."""
    if type(value) is list:
        if not 1 < len(value) <= MOST_ELEMENTS or type(value[0]) is not int:
            return False
        return all(type(one) is int for one in value) and sorted(value) == list(range(len(value)))
    if type(value) is not np.ndarray or value.ndim != 1 or value.dtype.kind not in "iu":
        return False
    return 1 < value.nbytes <= MOST_BYTES and np.array_equal(np.sort(value), np.arange(len(value)))


def is_count(value: Any) -> bool:
    """Whether it is a number, or an array of numbers that a step can hold: drawing batches may count in it."""
    if type(value) in (int, float):
        return True
    return type(value) is np.ndarray and value.dtype.kind in "biuf" and value.nbytes <= MOST_BYTES


def is_sequence(value: Any) -> bool:
    """Whether its elements may be those of samples, one after the other."""
    return (
        type(value) in _ORDERED
        and (not isinstance(value, np.ndarray) or value.ndim > 0)
        and len(value) > 1
    )


# ---- in a step -----------------------------------------------------------------------------------


def stored(value: Any, *, is_cache: bool = False) -> dict[str, Any] | None:
    """The value for a step, or None where it has no form for it; of a cache no arrays, of which it gets more and more."""
    if is_generator(value):
        return {"generator": copy.deepcopy(value)}
    if type(value) is itertools.count:
        numbers = re.fullmatch(r"count\((-?\d+)(?:, (-?\d+))?\)", repr(value))
        return {"next": [int(one or 1) for one in numbers.groups()]} if numbers else None
    if isinstance(value, np.generic):
        held = _stored_array(np.asarray(value))
        return held | {"scalar": 1} if held and "array" in held else None
    if type(value) is np.ndarray:
        return _stored_array(value)
    if is_dict(value):
        value = dict(value)
    if type(value) in (list, tuple) and (held := _stored_scalars(value)):
        return held
    if type(value) not in (*PLAIN, list, tuple, dict) or isinstance(value, (bytes, complex)):
        return None
    if isinstance(value, (list, tuple)) and len(value) > MOST_ELEMENTS:
        return None
    try:
        text = json.dumps(value, default=_element)
        # From the text alone, tuples would come back as lists: then only an order of what is there can be made of it.
        as_it_is = int(json.loads(text) == (list(value) if type(value) is tuple else value))
    except (TypeError, ValueError, RecursionError):
        return None if is_cache else _stored_parts(value)
    if type(value) is dict:  # numbers of numpy would come back as others
        as_it_is = int(as_it_is and same(fingerprint(json.loads(text)), fingerprint(value)))
    held = {"text": text, "as_it_is": as_it_is, "tuple": int(type(value) is tuple)}
    if as_it_is or is_sequence(value):
        return held
    pairs = stored([*map(list, value.items())]) if type(value) is dict and value else None
    as_it_was = pairs is not None and same(fingerprint(_dict_in(pairs)), fingerprint(value))
    if pairs is not None and as_it_was:
        return pairs | {"pairs": 1}
    return None if is_cache else _stored_parts(value)


def _stored_parts(value: Any) -> dict[str, Any] | None:
    """Of a few arrays or lists, columns in a dict or a tuple; of any number of arrays of numbers, such as the places of each class."""
    if type(value) not in (dict, list, tuple) or not value:
        return None
    keys = _stored_keys([*value] if type(value) is dict else [*range(len(value))])
    values = [*value.values()] if type(value) is dict else [*value]
    if keys is None or sum(getattr(one, "nbytes", 0) for one in values) > MOST_BYTES:
        return None
    held = keys | {"kind": type(value).__name__}
    if len(values) > MOST_PARTS:
        kinds = {one.dtype if type(one) is np.ndarray and one.ndim == 1 else None for one in values}
        if len(kinds) > 1 or getattr(kinds.pop(), "kind", "") not in [*"biu"]:
            return None
        lengths = json.dumps([*map(len, values)])
        return held | {"array": np.concatenate(values), "lengths": lengths}
    parts = [stored(one) for one in values]
    if any(part is None or "generator" in part or not part.get("as_it_is", 1) for part in parts):
        return None
    return held | {"parts": {str(place): part for place, part in enumerate(parts)}}


def _stored_scalars(value: Any) -> dict[str, Any] | None:
    """Of a list of numbers or texts of numpy, which JSON would make those of Python."""
    if len(value) > MOST_ELEMENTS or not _is_of_one_kind(value, np.number, np.str_):
        return None
    held = _stored_array(np.array(value))
    return held and held | {"list": type(value).__name__}


def _stored_keys(keys: list[Any]) -> dict[str, Any] | None:
    if all(type(key) in (str, int) for key in keys):
        return {"keys": json.dumps(keys), "dtype_of_keys": ""}
    if isinstance(keys[0], np.integer) and len({type(key) for key in keys}) == 1:
        return {"keys": json.dumps([*map(int, keys)]), "dtype_of_keys": keys[0].dtype.str}
    return None


def _stored_array(value: np.ndarray) -> dict[str, Any] | None:
    if value.dtype.kind not in "biufcU" or value.nbytes > MOST_BYTES:
        return None
    if value.dtype.kind in "fc" and value.dtype.itemsize > {"f": 8, "c": 16}[value.dtype.kind]:
        return None  # long double
    if value.dtype.kind == "U":
        return {"texts": json.dumps(value.tolist()), "dtype": value.dtype.str}
    return {"array": value.copy()}


def restored(held: Mapping[str, Any], now: Any, *, renewed: bool = False) -> Any:
    """The value that ``stored`` took, for an attribute that is ``now`` there; ``renewed``: the program makes it anew.
    Raises ValueError if that is another kind of value, or has other elements than those that were saved.
    """
    value = _value_in(held)
    if is_dict(now) and type(value) is dict and type(now) is not dict:
        entries, value = value, copy.copy(now)
        value.clear()
        value.update(entries)
    if type(value) in (list, tuple) and type(now) is type(value):
        ordered = _in_order(value, now) if len(value) else None
        if ordered is not None:
            return type(value)(ordered)
        if not held.get("as_it_is", 1):
            raise ValueError("its elements are not those that were saved")
    numbers = {type(value), type(now)} <= {int, float}
    as_now = type(value) is type(now) or numbers or value is None or now is None
    if type(value) is np.ndarray and type(now) is np.ndarray:
        as_now = value.dtype == now.dtype or value.dtype.kind == now.dtype.kind == "U"
    if not (as_now or renewed):
        raise ValueError(f"it is a {type(now).__name__}")
    return value


def _value_in(held: Mapping[str, Any]) -> Any:
    if "generator" in held:
        return held["generator"]
    if "next" in held:
        return itertools.count(*held["next"])
    if "list" in held:
        array = {key: part for key, part in held.items() if key != "list"}
        return _KINDS[held["list"]](_value_in(array))
    if "kind" in held:
        return _value_of_parts(held)
    if held.get("pairs"):
        return _dict_in(held)
    if "text" in held:
        value = json.loads(held["text"])
        return tuple(value) if held.get("tuple") else value
    if "texts" in held:
        return np.array(json.loads(held["texts"]), held["dtype"])
    return held["array"][()] if held.get("scalar") else held["array"]


def _value_of_parts(held: Mapping[str, Any]) -> Any:
    keys, kind = json.loads(held["keys"]), held["kind"]
    if held["dtype_of_keys"]:
        keys = list(np.array(keys, held["dtype_of_keys"]))
    if "lengths" in held:
        ends = np.cumsum(json.loads(held["lengths"]))
        values = [one.copy() for one in np.split(held["array"], ends[:-1])]
    else:
        values = [_value_in(held["parts"][str(place)]) for place in range(len(keys))]
    return dict(zip(keys, values, strict=True)) if kind == "dict" else _KINDS[kind](values)


def _dict_in(held: Mapping[str, Any]) -> dict[Any, Any]:
    """A dict with keys that are no texts, from its keys and values."""
    return dict(json.loads(held["text"]))


def _in_order(wanted: Any, now: Any) -> list[Any] | None:
    """The elements of ``now`` in the order of their texts, if they are the same."""
    places: collections.defaultdict[str, list[Any]] = collections.defaultdict(list)
    for text, element in zip(reversed(texts(now) or ()), reversed(now), strict=False):
        places[text].append(element)
    ordered = [places[text].pop() for text in texts(wanted) or () if places[text]]
    return ordered if len(ordered) == len(wanted) == len(now) else None


def put(attribute: Attribute, value: Any, *, in_place: bool) -> None:
    """Sets an attribute; in place, as others may hold its value, too, if that is asked for and possible. A generator always is."""
    now: Any = attribute.value
    kind = type(now) if type(now) is type(value) else None
    if attribute.is_of_class:
        attribute.set(value)
    elif is_generator(now):
        _set_state(now, value)
    elif in_place and kind is list:
        now[:] = value
    elif in_place and kind in _DICTS:
        entries = dict(value)
        now.clear()
        now.update(entries)
    elif in_place and isinstance(now, np.ndarray) and _fits_into(value, now):
        now[...] = value
    elif attribute.value is not value:
        attribute.set(value)


def _fits_into(value: Any, now: np.ndarray) -> bool:
    if type(now) is not type(value) or not now.flags.writeable:
        return False
    if (now.shape, now.dtype) != (value.shape, value.dtype):
        return False
    base: Any = now
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    return base is None  # not of a file


def _set_state(generator: Any, saved: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = saved.bit_generator.state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(saved.get_state())
    else:
        generator.setstate(saved.getstate())


def put_back(attribute: Attribute, before: Any) -> None:
    """Undoes `put`: ``before`` is what `copied` gave."""
    if attribute.is_of_class:
        return delattr(attribute.owner, attribute.name)
    put(attribute, before, in_place=True)
    if getattr(attribute.owner, attribute.name) is not attribute.value:
        attribute.set(attribute.value)


def copied(value: Any) -> Any:
    """What `put_back` needs of a value that may be changed in place."""
    if is_generator(value):
        return copy.deepcopy(value)
    return copy.copy(value) if type(value) in (list, np.ndarray, *_DICTS) else value


def is_small(value: Any) -> bool:
    """Whether a step would hold as much, if it has a form for it."""
    if isinstance(value, np.ndarray):
        return value.nbytes <= MOST_BYTES
    return not isinstance(value, (list, tuple)) or len(value) <= MOST_ELEMENTS


def why_not(value: Any) -> str:
    """Why ``stored`` has no form for it, after "and"."""
    if isinstance(value, np.ndarray) and value.nbytes > MOST_BYTES:
        return f"is an array of {value.nbytes >> 20} MiB"
    if isinstance(value, (list, tuple)) and len(value) > MOST_ELEMENTS:
        return f"is a {type(value).__name__} of {len(value):,} elements"
    return f"is a {type(value).__name__}"


def _element(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else os.fspath(value)


def texts(value: Any) -> list[str] | None:
    """One for each element, the same for equal ones; None if one has none."""
    kinds = set(map(type, value))
    if kinds <= {int}:
        return list(map(repr, value))
    if kinds <= {float}:
        return list(map(repr, value))
    if kinds <= {str}:
        return list(map(json.encoder.encode_basestring_ascii, value))
    try:
        return list(map(json.JSONEncoder(default=_element).encode, value))
    except (TypeError, ValueError, RecursionError):
        return None
