"""The names of Orbax that the page of the API lists are here; any other is refused with where to read on."""

from __future__ import annotations

import importlib
import re

import pytest

import ckpt_orbax
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "api" / "orbax.md").read_text()
NAMES = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in re.findall(r"^\| `ckpt_orbax\.?([\w.]*)` \| (.*) \|$", PAGE, re.MULTILINE)
}


@pytest.mark.parametrize("module", NAMES)
def test_names_that_clients_use(module: str) -> None:
    found = ckpt_orbax
    for part in filter(None, module.split(".")):
        found = getattr(found, part)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []
    assert NAMES[module] and len(NAMES) >= 11
    if module != "v1.training":
        assert importlib.import_module(f"ckpt_orbax.{module}".rstrip(".")) is found


@pytest.mark.parametrize("module", ["ckpt_orbax", "ckpt_orbax.args", "ckpt_orbax.v1"])
def test_any_other_name_is_refused(module: str) -> None:
    with pytest.raises(AttributeError, match="docs/api/orbax"):
        getattr(importlib.import_module(module), "NoSuchName")  # noqa: B009
    with pytest.raises(ImportError, match="docs/api/orbax"):
        exec(f"from {module} import NoSuchName")
    with pytest.raises(ImportError, match=r"Instead: ckpt_core\.writer"):
        exec("from ckpt_orbax.v1 import partial")


def test_the_version_is_one_of_orbax() -> None:
    theirs = pytest.importorskip("orbax.checkpoint")
    assert ckpt_orbax.__version__.split(".")[:2] == theirs.__version__.split(".")[:2]
