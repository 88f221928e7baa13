"""Unpickles what ``torch.save`` and its distributed checkpoints write, without torch, and without running code.

A pickle names functions and classes, and calls them. Here each name stands for a stand-in that only holds what it is
given, and a name that is not known ends the reading.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, cast

from ckpt_core._errors import CheckpointCorrupt, UnsupportedLeaf

_MOST_VALUES = 2_000_000
_MOST_STEPS = 3_000_000
"""Maximum number of instructions of a pickle: a tensor in a state takes about 40, and a million of them a second or two."""
_MOST_ODD_KEYS = 10_000
"""Maximum number of keys that are neither text nor small numbers: those can be made to have one hash."""
_MOST_LETTERS = 2**27
_MOST_LEVELS = 100
_MOST_PARTS_OF_KEY = 1000

DTYPES = {
    **{"torch.Float": "float32", "torch.Double": "float64", "torch.Half": "float16"},
    **{"torch.BFloat16": "bfloat16", "torch.Long": "int64", "torch.Int": "int32"},
    **{"torch.Short": "int16", "torch.Char": "int8", "torch.Byte": "uint8"},
    **{"torch.Bool": "bool", "torch.ComplexFloat": "complex64"},
    **{"torch.ComplexDouble": "complex128"},
}
"""Name of a typed storage, without ``Storage`` -> dtype."""
OTHER_DTYPES = (
    *("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
"""Dtypes that have no typed storage."""


class Storage(NamedTuple):
    """Memory of ``size`` elements of a dtype (None: bytes), in the file ``key``."""

    key: str
    dtype: str | None
    size: int


class Tensor(NamedTuple):
    """A view of a storage, with offset and strides as in torch."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    conj: bool = False  # the storage holds the conjugates of the values
    neg: bool = False  # the storage holds their negatives


class Made:
    """Stands for an object of a known class; a pickle sets its attributes."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, dtype: str | None, more: Any
) -> Tensor:
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, Storage) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("a tensor of impossible parts")
    if len(shape) != len(strides) or (dtype or storage.dtype) is None:
        raise ValueError("a tensor of impossible parts")
    marks = dict(more or {})
    lazy = bool(marks.pop("conj", False)), bool(marks.pop("neg", False))
    if any(marks.values()):  # they may change what the bytes mean
        raise ValueError(f"a tensor with marks that are not known: {', '.join(map(str, marks))}")
    return Tensor(
        storage, offset, tuple(shape), tuple(strides), dtype or storage.dtype or "", *lazy
    )


def _known(checked: Callable[[Any], Any]) -> dict[str, Any]:
    """What stands for each name; made anew for each pickle, which might set attributes of it. ``checked`` gives a key of
    a dict, or raises.
    """

    def tensor(
        storage: Any, offset: Any, shape: Any, strides: Any, _: Any, __: Any, more: Any = None
    ) -> Tensor:
        return _tensor(storage, offset, shape, strides, None, more)

    def tensor_of_dtype(
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        _: Any,
        __: Any,
        dtype: Any,
        more: Any = None,
    ) -> Tensor:
        return _tensor(storage, offset, shape, strides, str(dtype), more)

    def parameter(data: Any, *_: Any) -> Any:
        return data

    class Ordered(dict[Any, Any]):
        """Takes the attributes that modules set on their states, too."""

        def __init__(self, pairs: Iterable[tuple[Any, Any]] = ()) -> None:
            super().__init__((checked(key), value) for key, value in pairs)

    return {
        "torch._utils._rebuild_tensor_v2": tensor,
        "torch._utils._rebuild_tensor_v3": tensor_of_dtype,
        "torch._utils._rebuild_parameter": parameter,
        "torch._utils._rebuild_parameter_with_state": parameter,
        "torch.Size": lambda sizes=(): tuple(sizes),
        "collections.OrderedDict": Ordered,
        "torch.storage.UntypedStorage": "bytes",
        **{f"{name}Storage": dtype for name, dtype in DTYPES.items()},
        **{f"torch.{dtype}": dtype for dtype in (*DTYPES.values(), *OTHER_DTYPES)},
    }


_Python: Any = vars(pickle)["_Unpickler"]
"""The one in Python: in that in C, a pickle of 20 bytes takes 32 GiB for its memo, or crashes the process."""
_NEVER_WRITTEN = (
    *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.EXT1, pickle.EXT2),
    *(pickle.EXT4, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET),
)


class _Counted(dict[int, Any]):
    """The instructions of a pickle; raises when more are looked up than a state has."""

    def __init__(self, known: Mapping[int, Any]) -> None:
        super().__init__(known)
        self._left = _MOST_STEPS

    def __getitem__(self, code: int, /) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {_MOST_STEPS} instructions")
        return super().__getitem__(code)


def _is_odd(key: Any) -> bool:
    """Whether it is easy to make many keys like this one that have the same hash."""
    if type(key) is tuple and key:
        return type(key[0]) is not str
    return type(key) is not str and (type(key) is not int or not -(2**31) < key < 2**31)


def _checked_key(key: Any) -> Any:
    """A key of a dict; the hash of tuples nested without end would overflow the stack."""
    left, seen = [key], 0
    while left:
        one = left.pop()
        seen += 1
        if isinstance(one, tuple) and seen < _MOST_PARTS_OF_KEY:
            left += cast("tuple[Any, ...]", one)
    if seen >= _MOST_PARTS_OF_KEY:
        raise ValueError("a key of too many parts")
    return key


class _Unpickler(_Python):
    """Calls and makes only what is known, and takes no more memory than the pickle has."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in _Python.dispatch.items() if bytes([code]) not in _NEVER_WRITTEN
    }

    def load_dict(self) -> None:
        items = self.pop_mark()
        pairs = zip(items[::2], items[1::2], strict=True)
        self.append({self._checked(key): value for key, value in pairs})

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][self._checked(key)] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][self._checked(key)] = value

    def _checked(self, key: Any) -> Any:
        if _is_odd(key):
            self._odd_left -= 1
            if self._odd_left < 0:
                raise ValueError(
                    f"more than {_MOST_ODD_KEYS} keys that are neither text nor numbers"
                )
        return _checked_key(key)

    dispatch |= {
        pickle.DICT[0]: load_dict,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }

    def __init__(self, data: bytes, where: str, more: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where
        self._known = {**_known(self._checked), **more}
        self._odd_left = _MOST_ODD_KEYS
        self.dispatch = _Counted(type(self).dispatch)  # pyright: ignore[reportAttributeAccessIssue]

    def find_class(self, module: str, name: str, /) -> Any:
        found = self._known.get(f"{module}.{name}")
        if found is None:
            raise UnsupportedLeaf(
                f"{self._where} holds an object of {module}.{name}, and to make it would run code that the file names: "
                "ckpt reads tensors and plain containers. In a program that has the class and trusts the file, "
                "save model.state_dict() instead",
                type_name=f"{module}.{name}",
            )
        return found

    def persistent_load(self, pid: Any, /) -> Storage:
        word, dtype, key, _, count = pid
        if word != "storage" or not isinstance(key, str) or type(count) is not int or count < 0:
            raise ValueError("a storage of impossible parts")
        if not isinstance(dtype, str):
            raise ValueError("a storage without a dtype")
        return Storage(key, None if dtype == "bytes" else dtype, count)


def unpickled(data: bytes, where: str, more: Mapping[str, Any] | None = None) -> Any:
    """The value in a pickle: plain containers and numbers, ``Tensor`` for tensors, and what stands for ``more`` names."""
    try:
        return _Unpickler(data, where, more or {}).load()
    except (UnsupportedLeaf, MemoryError):
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointCorrupt(
            f"{where}: damaged, or not what torch.save writes: {error!r}", file=where
        ) from error


def plain(value: Any, where: str, change: Callable[[Tensor, str], Any]) -> Any:
    """A tree of dicts, lists and tuples, with ``change(tensor, path)`` for each tensor."""
    left = iter(range(_MOST_VALUES))  # shared parts may stand in it without end
    letters = 0

    def walk(one: Any, path: str, depth: int) -> Any:
        nonlocal letters
        letters += len(path)
        if next(left, None) is None or depth > _MOST_LEVELS or letters > _MOST_LETTERS:
            raise CheckpointCorrupt(f"{where}: a tree without end", file=where)
        if isinstance(one, Tensor):
            return change(one, path)
        if isinstance(one, dict):  # its own method: a pickle may have set an attribute of that name
            pairs = dict.items(one)
            return {key: walk(part, f"{path}/{key}", depth + 1) for key, part in pairs}
        if type(one) in (list, tuple):
            return type(one)(walk(part, f"{path}/{n}", depth + 1) for n, part in enumerate(one))
        if one is None or type(one) in (bool, int, float, complex, str, bytes):
            return one
        kind = type(one).__name__
        raise UnsupportedLeaf(
            f"{where}: {path.removeprefix('/')} is a {kind}: a checkpoint holds tensors, numbers and text",
            leaf=path,
            type_name=kind,
        )

    return walk(value, "", 0)
