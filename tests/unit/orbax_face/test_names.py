"""Every public name of Orbax is offered, or refused by name with what to write instead."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import types
from typing import Any

import pytest

import ckpt_orbax
from ckpt_orbax._refused import REFUSED
from tests.support.paths import ROOT

_MODULES = """
abstract_checkpoint_manager aggregate_handlers args arrays checkpoint_args checkpoint_manager
checkpoint_managers checkpoint_utils checkpointers experimental experimental.emergency
experimental.emergency.checkpoint_manager experimental.emergency.replicator_checkpoint_manager
experimental.v1 future handlers logging metadata metadata.tree metadata.value msgpack_utils multihost
options path path.atomicity path.atomicity_defaults path.atomicity_types path.format_utils path.step
pathways serialization test_utils transform_utils tree type_handlers utils v1
"""
MODULES = _MODULES.split()
REEXPORTING = ["", "experimental", "metadata", "path", "v1"]
"""Modules in which other modules are names for users; elsewhere they are what Orbax imports for itself."""
PAGE = ROOT / "docs" / "moving_from_orbax.md"


def of_orbax(module: str) -> types.ModuleType:
    """A module of Orbax, some of which are only attributes of others."""
    found: Any = importlib.import_module("orbax.checkpoint")
    for part in filter(None, module.split(".")):
        package, alias = found, getattr(found, part, None)
        try:
            found = importlib.import_module(f"{package.__name__}.{part}")
        except ModuleNotFoundError:
            found = alias
        if alias is not None and alias is not found:
            setattr(package, part, alias)  # Keras takes what it needs from Orbax by that name
    return found


@functools.cache
def public_names(module: str) -> list[str]:
    """The names of a module of Orbax that are Orbax's own."""
    for one in MODULES:  # a package has its submodules as names once they were imported
        of_orbax(one)
    found = of_orbax(module)
    return [name for name in dir(found) if _is_public(name, getattr(found, name), module)]


def _is_public(name: str, value: Any, module: str) -> bool:
    if name.startswith("_"):
        return False
    if isinstance(value, types.ModuleType):
        return module in REEXPORTING and value.__name__.startswith("orbax.checkpoint")
    made_in = str(getattr(value, "__module__", ""))
    if isinstance(value, (type, types.FunctionType)):
        return made_in.startswith("orbax.checkpoint")
    return made_in.partition(".")[0] not in ("typing", "__future__")


def ours(module: str) -> types.ModuleType:
    return importlib.import_module(f"ckpt_orbax.{module}".rstrip("."))


def refusal(module: str, name: str) -> str:
    with pytest.raises(ImportError) as caught:
        exec(f"from {ours(module).__name__} import {name}")
    return str(caught.value)


@pytest.mark.parametrize("module", ["", *MODULES])
def test_no_name_is_silently_missing(module):
    names = public_names(module)
    assert names or module == "experimental.emergency"
    missing = [name for name in names if not hasattr(ours(module), name)]
    silent = [name for name in missing if "Instead: " not in refusal(module, name)]
    assert not silent
    for name in missing:
        with pytest.raises(AttributeError, match=f"does not offer {name}: .* Instead: "):
            getattr(ours(module), name)


@pytest.mark.parametrize("module", ["", *MODULES])
def test_the_page_says_each_name(module):
    """One row for each module: what is offered, what is refused; and why, in the table below it."""
    if module in ("v1", "experimental.v1"):
        return  # its own table, in the README
    page = PAGE.read_text()
    rows = re.findall(rf"^\| `{re.escape(module or 'ckpt_orbax')}` \| (.*) \| (.*) \|$", page, re.M)
    assert len(rows) == 1
    offered, refused = (set(re.findall(r"`(\w+)`", text)) for text in rows[0])
    names = set(public_names(module))
    assert offered == {name for name in names if hasattr(ours(module), name)}
    assert refused == {name for name in names if not hasattr(ours(module), name)}
    instead = page.partition("### What to write instead")[2]
    assert all(f"`{name}`" in instead for name in refused)


def test_every_refusal_is_of_a_name_of_orbax():
    """Nothing stays in the table of refusals after it was offered everywhere, or was misspelled."""
    known = {name for module in ["", *MODULES, "path.deleter"] for name in public_names(module)}
    known |= {"_src", "CloudLogger", "CloudLoggerOptions"}  # the latter need a package of Google's
    known |= {"handler_registration", "step_statistics", "tensorstore_utils", "ts_utils"}
    assert set(REFUSED) <= known


def test_submodules_can_be_imported():
    found = {module.name for module in pkgutil.walk_packages(ckpt_orbax.__path__, "ckpt_orbax.")}
    for name in MODULES:
        assert f"ckpt_orbax.{name}" in found or name == "v1"
    from ckpt_orbax import checkpoint_managers
    from ckpt_orbax.checkpoint_managers import LatestN
    from ckpt_orbax.path import atomicity
    from ckpt_orbax.path.atomicity import AtomicRenameTemporaryPath

    assert checkpoint_managers.LatestN is LatestN
    assert atomicity.AtomicRenameTemporaryPath is AtomicRenameTemporaryPath
    assert ckpt_orbax.path.atomicity is atomicity


def test_private_modules_say_so_at_their_import():
    for line in ("import ckpt_orbax._src.tree", "from ckpt_orbax._src.tree import utils"):
        with pytest.raises(ImportError, match=r"private to Orbax\. Instead: "):
            exec(line)
    with pytest.raises(AttributeError, match="private to Orbax"):
        ckpt_orbax._src  # noqa: B018


def test_a_refused_name_is_no_attribute():
    assert not hasattr(ckpt_orbax, "Transform")
    assert getattr(ckpt_orbax.handlers, "ProtoCheckpointHandler", None) is None
    with pytest.raises(ImportError, match="docs/moving_from_orbax"):
        exec("from ckpt_orbax.handlers import Something")


def test_the_version_is_one_of_orbax():
    import orbax.checkpoint

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")[:2]))

    assert numbers(ckpt_orbax.__version__) == numbers(orbax.checkpoint.__version__)


@pytest.mark.parametrize(
    "make",
    [
        lambda emergency: emergency.checkpoint_manager.CheckpointManager("a", None, None, None),
        lambda emergency: emergency.checkpoint_manager.CheckpointManagerOptions(),
        lambda emergency: emergency.checkpoint_manager.LocalCheckpointOptions(),
        lambda emergency: emergency.checkpoint_manager.PersistentCheckpointOptions(),
        lambda emergency: emergency.replicator_checkpoint_manager.ReplicatorCheckpointManager("a"),
    ],
)
def test_emergency_managers_say_what_to_use_when_they_are_made(make):
    with pytest.raises(ckpt_orbax.NotOffered, match=r"local_directory=\.\.\."):
        make(ckpt_orbax.experimental.emergency)
