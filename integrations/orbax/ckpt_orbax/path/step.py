"""Names of step directories, and the steps in a directory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import ckpt_core as ckpt
from ckpt_orbax._paths import as_path, as_text, exists
from ckpt_orbax._refused import not_offered
from ckpt_orbax.checkpoint_managers import CheckpointMetadata, Step as Step
from ckpt_orbax.metadata import is_orbax_checkpoint, only_to_resume

StepT = TypeVar("StepT", covariant=True)
TMP_DIR_SUFFIX = ".orbax-checkpoint-tmp"
"""In the names of directories that Orbax has not finished."""
_STEP_NAME = re.compile(r"(?:.*_)?(\d+)")
_PROBES = (0, 7, 42, 98765432109)


@runtime_checkable
class NameFormat(Protocol, Generic[StepT]):
    """Names step directories and finds them; ``NameFormat[Metadata]`` says what it finds."""

    def build_name(self, step: int) -> str:
        """The directory name of a step."""
        ...

    def find_all(self, base_path: Any) -> Iterator[StepT]:
        """All committed steps in a directory."""
        ...

    def find_step(self, base_path: Any, step: int) -> StepT:
        """A committed step in a directory; ValueError if there is none."""
        ...


@dataclass(frozen=True)
class _Standard:
    """``prefix_000042``; reads only names of its own form."""

    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    single_host_load_and_broadcast: bool = False

    def build_name(self, step: int) -> str:
        digits = f"{step:0{self.step_format_fixed_length or 1}d}"
        return digits if self.step_prefix is None else f"{self.step_prefix}_{digits}"

    def find_all(self, base_path: Any) -> Iterator[Step]:
        directory = as_text(base_path)
        with ckpt.Checkpointer(directory, read_only=True) as reader:
            paths = {n: as_path(directory) / self.build_name(n) for n in reader.all_steps()}
        yield from _kept([CheckpointMetadata(n, one) for n, one in paths.items() if exists(one)])

    def find_step(self, base_path: Any, step: int) -> Step:
        for found in self.find_all(base_path):
            if found.step == step:
                return found
        raise ValueError(
            f"{base_path}: there is no step {step}, which would be {self.build_name(step)}"
        )


def standard_name_format(
    *,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    single_host_load_and_broadcast: bool = False,
) -> NameFormat[Step]:
    """Names such as ``42``, ``000042``, ``step_42``.

    Example:
        >>> from ckpt_orbax import v1 as ocp
        >>> ocp.path.step.standard_name_format(step_prefix="s", step_format_fixed_length=4).build_name(7)
        's_0007'
    """
    return _Standard(step_prefix, step_format_fixed_length, single_host_load_and_broadcast)


def prefix_and_length(names: Any) -> tuple[str | None, int | None]:
    """``step_prefix`` and ``step_format_fixed_length``, from the names a format builds; NotOffered for other names."""
    built = names.build_name(0)
    found = re.fullmatch(r"(?:(.*)_)?(0+)", built, re.DOTALL)
    if found is not None:
        same = _Standard(found[1], len(found[2]) if len(found[2]) > 1 else None)
        if all(names.build_name(step) == same.build_name(step) for step in _PROBES):
            return same.step_prefix, same.step_format_fixed_length
    raise not_offered(
        f"the NameFormat with names such as {built!r}",
        "steps are named by an optional prefix with '_' and the number",
        "ocp.path.step.standard_name_format(step_prefix=, step_format_fixed_length=)",
    )


def checkpoint_steps(checkpoint_dir: Any) -> list[int]:
    """The numbers of the steps in a directory, whatever their names begin with.

    Example:
        >>> import ckpt_orbax as ocp, numpy as np, tempfile
        >>> directory = tempfile.mkdtemp()
        >>> ocp.PyTreeCheckpointer().save(directory + "/step_7", {"w": np.ones(2)})
        >>> ocp.utils.checkpoint_steps(directory)
        [7]
    """
    return [one.step for one in _steps_in(checkpoint_dir)]


def checkpoint_steps_paths(checkpoint_dir: Any) -> list[Any]:
    """The paths of the steps in a directory."""
    return [one.path for one in _steps_in(checkpoint_dir)]


def _steps_in(checkpoint_dir: Any) -> list[Step]:
    directory = as_path(as_text(checkpoint_dir))
    return _kept(
        [
            CheckpointMetadata(int(name[1]), one)
            for one in (directory.iterdir() if exists(directory) else ())
            if (name := _STEP_NAME.fullmatch(one.name)) and is_orbax_checkpoint(one)
        ]
    )


def _kept(steps: list[Step]) -> list[Step]:
    """The steps without those that are there only for resuming."""
    gone = only_to_resume([(one.step, one.path) for one in steps])
    return [one for one in steps if one.step not in gone]


is_checkpoint_finalized = is_path_finalized = is_orbax_checkpoint


def build_step_path(base_path: Any, name_format: Any, step: int) -> Any:
    """The path of a step."""
    return as_path(as_text(base_path)) / name_format.build_name(step)
