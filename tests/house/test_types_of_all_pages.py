"""The programs of examples/ and of every page pass mypy and pyright, as a reader's editor checks them.

What the stubs of other packages get wrong is named in ``NOT_OURS``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.test_readme import READMES, blocks_of
from tests.support.paths import INTEGRATIONS, ROOT

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


@pytest.fixture(name="folder", scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for each page, of all its blocks, and the examples."""
    folder = tmp_path_factory.mktemp("programs")
    for page in READMES:
        name = "_".join(page.relative_to(ROOT).with_suffix("").parts)
        code = "\n".join(block for _, block in blocks_of(page.read_text("utf-8")))
        (folder / f"page_{name}.py").write_text(code)
    for example in (ROOT / "examples").glob("*.py"):
        (folder / example.name).write_text(example.read_text("utf-8"))
    return folder


def _ours(lines: list[str]) -> list[str]:
    return [line for line in lines if not any(known in line for known in NOT_OURS)]


def _run(folder: Path, *arguments: str) -> str:
    packages = [ROOT, *(one for one in INTEGRATIONS.iterdir() if one.is_dir())]
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=os.environ | {"MYPYPATH": os.pathsep.join(map(str, packages))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.stdout or done.stderr


def test_for_pyright(folder):
    pytest.importorskip("pyright")
    packages = [ROOT, *(one for one in INTEGRATIONS.iterdir() if one.is_dir())]
    settings = {
        "typeCheckingMode": "standard",
        "extraPaths": [str(one) for one in packages],
        "reportMissingModuleSource": False,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    text = _run(folder, "pyright", "--outputjson", "--pythonpath", sys.executable, ".")
    if not text.startswith("{"):
        pytest.skip(f"pyright does not run here: {text[-200:]}")
    told = json.loads(text)
    assert told["summary"]["filesAnalyzed"] == len([*folder.glob("*.py")])
    found = [
        f"{Path(one['file']).name}:{one['range']['start']['line'] + 1}: {one['message']}"
        for one in told["generalDiagnostics"]
        if one["severity"] == "error"
    ]
    assert _ours(found) == []


def test_for_mypy(folder):
    pytest.importorskip("mypy")
    options = ("--ignore-missing-imports", "--check-untyped-defs", "--follow-imports=silent")
    files = sorted(one.name for one in folder.glob("*.py"))
    lines = _run(folder, "mypy", *options, *files).splitlines()
    assert "checked" in lines[-1] or "no issues found" in lines[-1], lines
    assert _ours([line for line in lines if ": error:" in line]) == []
