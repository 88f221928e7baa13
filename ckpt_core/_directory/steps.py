"""What a directory of steps has of its own: the names of the steps, and metadata of the whole run, as in Orbax."""

from __future__ import annotations

import contextlib
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.plain_json import frozen_metadata
from ckpt_core._format.record import dump_json, parse_json
from ckpt_core.arguments import an

if TYPE_CHECKING:
    from ckpt_core._directory import Backend

_ANY = re.compile(r"(?:.*_)?(\d+)", re.ASCII)
MAX_STEP = 2**63 - 1
_FOLDER = "metadata"
_FILE = "_ROOT_METADATA"
_EARLIER_FILE = "metadata"  # in which Orbax wrote the value itself until November 2024


def is_file_name(name: object) -> bool:
    """Whether a user's name is safe as a directory name, for all tools that read the path."""
    return (
        isinstance(name, str)
        and 0 < len(name.encode(errors="replace")) <= 200
        and not any(mark in name for mark in "/\\")
        and not name.startswith(".")
        and name.isprintable()
    )


@dataclass(frozen=True)
class StepNames:
    """How new steps are named; ``parse`` accepts every combination."""

    prefix: str | None = None  # joined to the number with ``_``, as in Orbax
    fixed_length: int | None = None  # minimum number of digits, padded with zeros

    def __post_init__(self) -> None:
        if (length := self.fixed_length) is not None and length < 1:
            raise ValueError(f"step_format_fixed_length must be at least 1, got {length}")
        if self.prefix is not None and not is_file_name(self.prefix):
            raise ValueError(
                "step_prefix must be printable text of at most 200 bytes without '/' and '\\', and must not begin "
                f"with '.', got {self.prefix!r}"
            )

    def name(self, step: int) -> str:
        """The directory name of a step."""
        digits = f"{step:0{self.fixed_length or 1}d}"
        return digits if self.prefix is None else f"{self.prefix}_{digits}"

    def parse(self, name: str) -> int | None:
        """The step number in a directory name, or None."""
        found = _ANY.fullmatch(name)
        step = int(found[1]) if found and len(found[1]) < 30 else None
        return step if step is not None and step <= MAX_STEP else None

    def is_of_another_series(self, name: str) -> bool:
        """Whether the name of a step's directory has a prefix that is not the one of new steps."""
        return series_of(name) not in ("", f"{self.prefix}_")


def series_of(name: str) -> str:
    """What stands before the number in the name of a step's directory."""
    return name.rstrip("0123456789")


def check_step(step: int) -> int:
    """The step as an int; TypeError if it is no integer, ValueError if it is negative, above ``MAX_STEP``, or a bool."""
    try:
        number = operator.index(step)
    except TypeError:
        shown = repr(step) if isinstance(step, (str, float)) else an(step)
        advice = f"{shown}: the step comes first, as in save(step, state)"
        if isinstance(step, str) and step.isdecimal():
            advice = f"the text {shown}: pass {step}"
        raise TypeError(f"step must be an integer, got {advice}") from None
    if isinstance(step, bool) or not 0 <= number <= MAX_STEP:
        raise ValueError(f"step must be an integer from 0 to 2**63-1, got {step!r}")
    return number


def read_run_metadata(backend: Backend, directory: str) -> Any:
    """The metadata of the run with its steps in ``directory``; None if there is none."""
    data = backend.read(f"{directory}/{_FOLDER}", _FILE)
    if data is None:
        # what an early Orbax wrote; whatever else has that name is somebody else's
        with contextlib.suppress(CheckpointCorrupt):
            data = backend.read(f"{directory}/{_FOLDER}", _EARLIER_FILE)
            value = None if data is None else parse_json(data, _EARLIER_FILE)
            return value if isinstance(value, dict) else None
        return None
    file = f"{_FOLDER}/{_FILE}"
    value = parse_json(data, file)
    if not isinstance(value, dict):
        raise CheckpointCorrupt(f"{directory}/{file}: not a JSON object", file=file)
    return value.get("custom_metadata")


def write_run_metadata(backend: Backend, directory: str, value: Any) -> None:
    """Atomically replaces the metadata; raises TypeError if ``value`` is not a dict of plain JSON values."""
    value = frozen_metadata(value)
    if not isinstance(value, dict):
        raise TypeError(f"a run's metadata is a dict of JSON values, got {an(value)}")
    data = dump_json({"internal_metadata": {}, "custom_metadata": value})
    backend.put(f"{directory}/{_FOLDER}", _FILE, data)
