"""Streams of batches that have no state: made anew at a restore, and moved on to where they stood."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from ckpt_core._adapters import adapter_for
from ckpt_core._errors import CheckpointError, Mismatch, StructureMismatch
from ckpt_core._format.checksums import bytes_of, crc_of
from ckpt_core._lazy import jax
from ckpt_core._operation import logger
from ckpt_core.arguments import an

T = TypeVar("T")

_NOT_COMPARED = -1
_PLAIN = (str, bytes, bool, int, float, complex, type(None))
_SEED = (
    "Give each shuffle, sampler, worker and augmentation a seed, so that each call of the function makes the same "
    "batches. To begin these data anew, open another Checkpointer, and restore without them by unexpected='ignore'"
)


@dataclasses.dataclass(frozen=True)
class _Position:
    """Where a stream stands, with what the digest of its last batch is made of."""

    epoch: int = 0
    batches: int = 0  # of this epoch that were taken
    ended: bool = False  # the epoch before has ended, and nobody has begun this one
    crc32c: int = 0  # of the batch but for its arrays of jax, which follow
    arrays: tuple[Any, ...] = ()  # they do not change, so their copy to the host waits until a save

    def digest(self) -> int:
        """CRC-32C of the last batch, by what this process holds of it; _NOT_COMPARED if one of its arrays is gone."""
        crc = self.crc32c
        for array in self.arrays if crc != _NOT_COMPARED else ():
            if array.is_deleted():
                return _NOT_COMPARED
            whole = array.is_fully_addressable
            for part in [array] if whole else [shard.data for shard in array.addressable_shards]:
                crc = crc_of(np.asarray(part).tobytes(), crc)
        return crc


class Replayed(Generic[T]):
    """An iterator over batches whose position is saved, though what makes them has none: a generator, a torch ``DataLoader``.

    A restore calls ``make`` again, takes the batches that were taken before and drops them. The last one must be the
    batch that the saved run took: their digests are compared, so seed ``make``. The restore blocks meanwhile; the log
    says how long. Each process saves the position of its own stream, so as many processes must restore.

    - ``next`` and ``for`` continue where the stream stands. At its end they stop, and the next ``iter`` or ``for``
      begins another epoch, for which ``make`` is called again. At the end of an epoch a restore skips, and compares,
      nothing.
    - Put threads that prefetch inside of ``make``: around this object, batches that they hold count as taken.
    - If the stream raises, or Ctrl-C stops it, the next call makes it anew and moves it on.
    - A part of a batch that is neither array, number nor text is not compared, and one warning names it. Neither is a batch
      that was donated to jit when it is saved.

    Args:
        make: gives an iterable, a new one at each call. If it has an argument without a default, that is the number of the
            epoch, from 0: ``lambda epoch: make_batches(seed=epoch)``.

    Raises:
        StructureMismatch: (at a restore) the batch at the place is another one, or the stream is shorter.

    Example:
        >>> import ckpt_core as ckpt, numpy as np, tempfile
        >>> def make_batches(seed):
        ...     numbers = np.random.default_rng(seed)
        ...     return ({"x": numbers.normal(size=3)} for _ in range(100))
        >>> data = ckpt.Replayed(lambda: make_batches(seed=0))
        >>> first, second = next(data), next(data)
        >>> path = tempfile.mkdtemp() + "/step"
        >>> ckpt.save(path, data=data)
        >>> third, resumed = next(data), ckpt.Replayed(lambda: make_batches(seed=0))
        >>> _ = ckpt.restore(path, data=resumed)
        >>> resumed.batches, bool((next(resumed)["x"] == third["x"]).all())
        (2, True)
    """

    per_process = True

    def __init__(self, make: Callable[..., Iterable[T]]) -> None:
        if not callable(make):
            raise TypeError(
                f"Replayed takes a function that makes the stream anew, got {an(make)}: write "
                "ckpt.Replayed(lambda: make_batches(seed=0))"
            )
        self._make = make
        self._at = _Position()
        self._stream: Iterator[T] | None = None  # the one that was made last
        self._moved = False  # whether it stands at the position
        self._turn = threading.RLock()  # one thread at a time takes a batch
        self._said_left_out = False

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next batch belongs to, from 0."""
        return self._at.epoch

    @property
    def batches(self) -> int:
        """How many batches of the epoch were taken."""
        return self._at.batches

    def __iter__(self) -> Iterator[T]:
        if self._at.ended:
            self._at = _Position(self._at.epoch)
        return self

    def __next__(self) -> T:
        with self._turn:
            at = self._at
            if at.ended:
                raise StopIteration
            if self._stream is None or not self._moved:
                self._stream = self._stream_at(at)
            self._moved = False  # until it is known what becomes of this call
            try:
                batch = next(self._stream)
            except StopIteration:
                self._at = _Position(at.epoch + 1, ended=True)
                raise
            self._at = self._after(at, batch)
            self._moved = True
            return batch

    def get_state(self) -> dict[str, Any]:
        """The position, as plain values."""
        at = self._at
        place = {"epoch": at.epoch, "batches": at.batches, "ended": at.ended}
        return {**place, "crc32c": at.digest()}

    def set_state(self, state: Any, /) -> None:
        """Makes the stream anew and moves it on to a position from ``get_state``; if it raises, nothing is changed."""
        try:
            epoch, batches, crc = (int(state[name]) for name in ("epoch", "batches", "crc32c"))
            at = _Position(epoch, batches, bool(state["ended"]), crc)
        except (KeyError, TypeError, ValueError):
            saved = Mismatch("(root)", "kind", an(state), "the position of a ckpt.Replayed")
            raise StructureMismatch([saved], where="the stream of batches") from None
        with self._turn:
            if batches:
                self._stream = self._stream_at(at)
            self._at, self._moved = at, batches > 0

    def _stream_at(self, at: _Position) -> Iterator[T]:
        """A new stream at a position; raises StructureMismatch if the batch that was taken last is not the one of its digest."""
        began = time.monotonic()
        made = self._make(at.epoch) if _takes_epoch(self._make) else self._make()
        stream = iter(made)
        if stream is self._stream:
            raise CheckpointError(
                f"ckpt.Replayed: its function gave the same {type(stream).__name__} as before, where others have taken "
                "batches: make the generator or iterator inside of the function, anew at each call"
            )
        batch: Any = None
        for number in range(at.batches):
            try:
                batch = next(stream)
            except StopIteration:
                taken = f"{at.batches} batches taken"
                raise _misfit(at, "length", taken, f"{number} batches in all") from None
        if at.batches:
            digest, found = at.digest(), self._after(at, batch).digest()
            if digest == _NOT_COMPARED or found == _NOT_COMPARED:
                text = "ckpt.Replayed: batch %d of epoch %d has no digest, so it was not compared"
                logger.warning(text, at.batches, at.epoch)
            elif found != digest:
                raise _misfit(at, "digest", f"{digest:08x}", f"{found:08x}")
            text = "ckpt.Replayed has taken and dropped %d batches of epoch %d again, in %.2f s"
            logger.info(text, at.batches, at.epoch, time.monotonic() - began)
        return stream

    def _after(self, at: _Position, batch: Any) -> _Position:
        """The position after one more batch."""
        crc, arrays, left_out = _digested(batch)
        if left_out and not self._said_left_out:
            self._said_left_out = True
            text = "ckpt.Replayed compares arrays, numbers and text of a batch: it leaves out %s"
            logger.warning(text, left_out)
        return _Position(at.epoch, at.batches + 1, False, crc, arrays)


def _takes_epoch(make: Callable[..., Any]) -> bool:
    """Whether a function has an argument without a default."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # one of C
        return False
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.kind in by_position and one.default is one.empty for one in parameters)


def _misfit(at: _Position, kind: str, saved: str, wanted: str) -> StructureMismatch:
    found = Mismatch(f"batch {at.batches} of epoch {at.epoch}", kind, saved, wanted)
    return StructureMismatch([found], where="the stream of batches, made anew", advice=_SEED)


def _digested(batch: Any) -> tuple[int, tuple[Any, ...], str]:
    """CRC-32C of a batch without its arrays of jax; those; and what has no digest, in words, or nothing."""
    crc, arrays, left_out = 0, list[Any](), ""
    try:
        for path, leaf in _leaves(batch, ""):
            head, data = type(leaf).__name__, b""
            if isinstance(leaf, jax.Array):
                typed = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
                arrays.append(jax.random.key_data(leaf) if typed else leaf)
                head = f"{leaf.dtype}{leaf.shape}"
            elif isinstance(leaf, (*_PLAIN, list, tuple)):
                data = repr(leaf).encode(errors="surrogatepass")
            elif (array := _as_array(leaf)) is None:
                left_out = left_out or f"{path or 'all of it'}, {an(leaf)}"
            else:
                head, data = f"{array.dtype}{array.shape}", bytes_of(array) if array.nbytes else b""
            crc = crc_of(data, crc_of(f"{path} {head}\n".encode(errors="surrogatepass"), crc))
    except Exception as error:  # whatever a batch is, training goes on
        return _NOT_COMPARED, (), f"all of it, since {error!r}"
    return crc, tuple(arrays), left_out


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Path and value of each leaf, and of each list of plain values, which may be long."""
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items: Any = value.items()
        parts = sorted(items, key=lambda item: repr(item[0]))  # their order does not count
    elif isinstance(value, (list, tuple)) and not {*map(type, value)} <= {*_PLAIN}:
        parts = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(one.name, getattr(value, one.name, None)) for one in dataclasses.fields(value)]
    elif (adapter := adapter_for(value)) is not None:  # such as that of torch's tensors
        parts = [("", adapter.get_state(value))]
    else:
        yield path, value
        return
    for key, part in parts:
        yield from _leaves(part, f"{path}/{key}" if path else f"{key}")


def _as_array(leaf: Any) -> np.ndarray[Any, Any] | None:
    """What numpy makes of a leaf; None if it is an object to numpy, too."""
    with contextlib.suppress(Exception):  # whatever it is
        array = np.asarray(leaf)
        return None if array.dtype.hasobject else array
    return None
