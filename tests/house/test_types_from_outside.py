"""What a user's type checker sees: the right types of results, and errors where a name is misspelt."""

from typing import Any

import pytest

from tests.support.paths import INTEGRATIONS, ROOT
from tests.support.typed import diagnostics_of

GOOD = """
from typing import Any, assert_type

import jax

import ckpt_core as ckpt

ckpt.save("runs/tree", {"w": 1}, options=ckpt.Options(compression="zstd"))
tree: Any = ckpt.load("runs/tree")
abstract = {"w": jax.ShapeDtypeStruct((3,), "float32"), "step": 0}
assert_type(ckpt.load("runs/tree", abstract), dict[str, Any])  # arrays, where the target has descriptions
assert_type(ckpt.load("runs/tree", [abstract]), list[Any])
some = ckpt.load("runs/tree", only=lambda path, leaf: path.startswith("params/") and not leaf.shape)
restored = ckpt.restore("runs/tree", model=tree)
assert_type(restored, ckpt.Restored)
assert_type(restored.step, int | None)
assert_type(restored.report.loaded, tuple[str, ...])
with ckpt.Checkpointer("runs/first", save_policy=ckpt.when.every_steps(10)) as checkpointer:
    newest = checkpointer.restore_latest(model=tree)
    if newest is not None:
        assert_type(newest.step, int)
        print(newest.step + 1)
    assert_type(checkpointer.restore(3, model=tree).step, int)
    assert_type(checkpointer.save(3, model=tree, metrics={"loss": 1.0}), bool)
    assert_type(checkpointer.all_steps(), list[int])
assert_type(ckpt.inspect("runs/tree").items["state"].leaves[0].shape, tuple[int, ...])
assert_type(ckpt.convert.export_npz("runs/tree", "x.npz"), list[str])
pending = ckpt.save_async("runs/async", tree)
pending.result(timeout_secs=60)
"""
BAD = """
import ckpt_core as ckpt

ckpt.svae("runs/tree", 1)
ckpt.save("runs/tree", 1, overwrite="yes")
ckpt.Options(compresion="zstd")
ckpt.Checkpointer("runs", max_to_kepp=3)
ckpt.load("runs/tree").x
ckpt.restore("runs/tree", model=1).stpe.bit_length
ckpt.inspect("runs/tree").itms
ckpt.when.every_step(3)
"""


STRICT = "\n# pyright: strict\n"
"""Behind a script, whose lines keep their numbers."""


@pytest.fixture(name="errors", scope="module")
def make_errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Pyright's errors in scripts that use the installed packages, as a user has them."""
    settings = {
        "extraPaths": [str(ROOT), *(str(path) for path in INTEGRATIONS.iterdir() if path.is_dir())],
        "reportMissingTypeStubs": False,
    }
    texts = {"good.py": GOOD + STRICT, "bad.py": BAD + STRICT}
    found = diagnostics_of(tmp_path_factory.mktemp("typed"), texts, settings)
    return {
        name: [one for one in told if one["severity"] == "error"] for name, told in found.items()
    }


def test_right_calls_have_their_types(errors):
    assert errors["good.py"] == []


def test_misspelt_names_are_errors(errors):
    lines = {one["range"]["start"]["line"] for one in errors["bad.py"]}
    wrong = {n for n, line in enumerate(BAD.splitlines()) if line and "import" not in line}
    unknown = {
        n for n, line in enumerate(BAD.splitlines()) if ".load(" in line
    }  # Any has all names
    # an item may have any name, and is an attribute: ckpt cannot tell it from a misspelt one
    items = {n for n, line in enumerate(BAD.splitlines()) if ".stpe" in line}
    assert lines >= wrong - unknown - items


def test_every_package_says_that_it_is_typed():
    packages = [ROOT / "ckpt_core", *INTEGRATIONS.glob("*/ckpt_*")]
    assert len(packages) == 6 and all((package / "py.typed").exists() for package in packages)
