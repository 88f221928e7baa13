"""What a type checker says of users' scripts, of the programs of examples/ and of every page."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.house.test_readme import READMES, blocks_of
from tests.support.paths import INTEGRATIONS, ROOT

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
SCRIPTS = {"good.py": GOOD, "bad.py": BAD}
_PACKAGES = [str(ROOT), *(str(one) for one in INTEGRATIONS.iterdir() if one.is_dir())]


@pytest.fixture(name="folder", scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for each page, of all its blocks, the examples, and two scripts, which are to be checked strictly."""
    folder = tmp_path_factory.mktemp("programs")
    for page in READMES:
        name = "_".join(page.relative_to(ROOT).with_suffix("").parts)
        code = "\n".join(block for _, block in blocks_of(page.read_text("utf-8")))
        (folder / f"page_{name}.py").write_text(code)
    for example in (ROOT / "examples").glob("*.py"):
        (folder / example.name).write_text(example.read_text("utf-8"))
    for name, text in SCRIPTS.items():
        (folder / name).write_text(f"{text}\n# pyright: strict\n")  # behind it: lines keep numbers
    return folder


@pytest.fixture(name="errors", scope="module")
def make_errors(folder: Path) -> list[dict[str, Any]]:
    """Pyright's errors, for a user who has the packages installed."""
    pytest.importorskip("pyright")
    settings = {
        "typeCheckingMode": "standard",
        "extraPaths": _PACKAGES,
        "reportMissingModuleSource": False,
        "reportMissingTypeStubs": False,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    text = _run(folder, "pyright", "--outputjson", "--pythonpath", sys.executable, ".")
    if not text.startswith("{"):
        pytest.skip(f"pyright does not run here: {text[-200:]}")
    told = json.loads(text)
    assert told["summary"]["filesAnalyzed"] == len([*folder.glob("*.py")])
    return [one for one in told["generalDiagnostics"] if one["severity"] == "error"]


def _run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=os.environ | {"MYPYPATH": os.pathsep.join(_PACKAGES)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.stdout or done.stderr


def test_right_calls_have_their_types(errors):
    assert [one for one in errors if one["file"].endswith("good.py")] == []


def test_misspelt_names_are_errors(errors):
    lines = {one["range"]["start"]["line"] for one in errors if one["file"].endswith("bad.py")}
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


NOT_OURS = (
    '"verbose" of type "str"',  # Keras annotates fit's verbose as text
    '"optimizer" is not a known attribute of "None"',  # a Keras model that was compiled has one
    '"tobytes"',  # keras.ops.convert_to_numpy has no return type
    '"issubdtype" is not exported from module "jax.dtypes"',
    '"save" is not exported from module "torch.distributed.checkpoint"',
    'parameter "source" of type "Sequence',  # Grain reads numpy arrays, too
    'for class "FunctionType"',  # nnx.Sequential holds functions, and modules
    '"Callable[..., Any]" has no attribute "kernel"',
    'for class "Group"',  # a class whose attributes are set by name
    '"Group" has no attribute',
    '"hyperparams"',  # optax states are a union of all that a tree may hold
    'Cannot access attribute "all" for class "bool"',  # comparison of a field of type Any or None
    '"scaled_dot_product_attention" gets multiple values',
    "Expected mapping for dictionary unpack",  # what train_step of torchax returns has no type
    "Unsupported operand types for - (",
    'Operator "-" not supported for types "Tensor"',  # an attribute of a torch module is either
    'Object of type "Tensor" is not callable',
    '"Tensor" not callable',
    'Argument 2 to "savez"',  # keywords are arrays, and one of them is a bool
    'Unsupported operand types for + ("object"',  # mypy joins an array and a number to object
    '"list[dict[str, ShapeDtypeStruct]]"',  # a page gives one name to two targets
)


def _ours(lines: list[str]) -> list[str]:
    return [line for line in lines if not any(known in line for known in NOT_OURS)]


def test_for_pyright(errors):
    found = [
        f"{Path(one['file']).name}:{one['range']['start']['line'] + 1}: {one['message']}"
        for one in errors
        if Path(one["file"]).name not in SCRIPTS
    ]
    assert _ours(found) == []


def test_for_mypy(folder):
    pytest.importorskip("mypy")
    options = ("--ignore-missing-imports", "--check-untyped-defs", "--follow-imports=silent")
    files = sorted(one.name for one in folder.glob("*.py") if one.name not in SCRIPTS)
    lines = _run(folder, "mypy", *options, *files).splitlines()
    assert "checked" in lines[-1] or "no issues found" in lines[-1], lines
    assert _ours([line for line in lines if ": error:" in line]) == []
