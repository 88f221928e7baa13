"""The layers of `ckpt_core` point down, each effect has one module, and importing it is free.

The table is the one of docs/design.md. A module without a layer fails, so that a new one has to
say where it belongs.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import ckpt_core
from tests.support.paths import PACKAGE

# From the ground up. A module imports from lower rows only; a room (a package, or a package in one)
# counts as one module and may import within itself as it likes.
LAYERS: list[tuple[str, set[str]]] = [
    ("0 errors", {"_errors"}),
    ("0 arguments that a call does not have", {"arguments"}),
    ("0 ground", {"_fork", "_items", "_lazy", "_options", "_platform", "_words"}),
    ("0 threads, pending work, exit", {"_background"}),
    ("1 pure: trees, and saved against wanted", {"_tree"}),
    ("1 pure: regions and chunks", {"_layout"}),
    ("1 pure: what stands on disk", {"_format"}),
    ("1 pure: which steps to save and keep", {"_run.policies"}),
    ("1 pure: where a run stands, and which saves count", {"_run.history", "_run.run_file"}),
    ("2 effects", {"_devices", "_directory", "_exchange", "_processes"}),
    ("2 effects: arrays in files", {"_storage"}),
    ("3 what the spines are made of", {"_adapters", "_results"}),
    ("3 one save or load as it goes", {"_operation"}),
    ("3 a checkpoint, its metadata read", {"_saved"}),
    ("3 stored arrays into memory", {"_read"}),
    ("3 the spines", {"_load", "_save"}),
    ("3 beside the spines", {"_publish", "_replayed", "_verify"}),
    ("4 what a directory of steps is made of", {"_run.in_flight", "_run.lease", "_run.steps"}),
    ("4 the tiers of a directory of steps", {"_run.tiers"}),
    ("4 a directory of steps", {"_run"}),
    ("5 listeners, other formats, numbers", {"_doctor", "_look", "convert", "events"}),
    ("5 a run as a page", {"report"}),
    ("5 the front door", {"__init__"}),
    ("5 faces", {"bench", "testing"}),
    ("6 the command line", {"cli"}),
]
RANK = {module: rank for rank, (_, modules) in enumerate(LAYERS) for module in modules}
FRAMEWORKS = {"flax", "grain", "keras", "optax", "orbax", "tensorflow", "torch", "torchax"}
MAY_IMPORT_FRAMEWORKS_LAZILY = {"bench"}

# effect -> (the only module that may have it, names that give it away)
DELETING = {
    "os": {"remove", "removedirs", "rename", "renames", "replace", "rmdir", "unlink"},
    "shutil": {"move", "rmtree"},
}
SOCKETS = {"http", "socketserver"}
PATH_METHODS = {"rename", "rmdir", "unlink"}  # `replace` is a method of str, too
COORDINATION = {
    "blocking_key_value_get",
    "get_distributed_runtime_client",
    "key_value_dir_get",
    "key_value_set",
    "multihost_utils",
    "wait_at_barrier",
}


def room_of(parts: Sequence[str]) -> str:
    """The deepest room with a layer that a dotted name lies in, or else its first part."""
    inner = ".".join(parts[:2])
    return inner if inner in RANK else parts[0]


def module_of(file: Path, package: Path) -> str:
    """The room that a file is in."""
    return room_of(file.relative_to(package).with_suffix("").parts)


def imports(tree: ast.AST, file: Path, package: Path) -> Iterator[tuple[ast.AST, str]]:
    """Every import as (node, absolute dotted name); names taken from a package are appended."""
    folder = [package.name, *file.relative_to(package).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield node, ".".join([*base, alias.name])
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else None
            name = function.id if isinstance(function, ast.Name) else name
            argument = node.args[0]
            if name in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield node, str(argument.value)


def nodes_run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those inside of functions."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from nodes_run_at_import(child)


def check_layers(tree: ast.AST, file: Path, package: Path, inside: set[str]) -> Iterator[str]:
    """What a file imports from its own row or above; `inside` is what the package holds."""
    module = module_of(file, package)
    if module not in RANK:
        yield f"{module} has no layer"
        return
    for node, name in imports(tree, file, package):
        parts = name.split(".")
        if parts[0] != package.name:
            continue
        target = room_of(parts[1:]) if len(parts) > 1 and parts[1] in inside else "__init__"
        if target != module and RANK.get(target, len(LAYERS)) >= RANK[module]:
            yield f"{module}:{node.lineno} imports {target}, which is not below it"


def check_effects(tree: ast.AST, file: Path, package: Path) -> Iterator[str]:
    module = module_of(file, package)
    at_import = set(nodes_run_at_import(tree))
    for node, name in imports(tree, file, package):
        root = name.partition(".")[0]
        if root == "tensorstore" and module != "_storage":
            yield f"{module}:{node.lineno} imports tensorstore; only _storage does"
        if root in SOCKETS and module != "_exchange":
            yield f"{module}:{node.lineno} imports {name}; only _exchange serves and fetches"
        if root in FRAMEWORKS and module not in MAY_IMPORT_FRAMEWORKS_LAZILY:
            yield f"{module}:{node.lineno} imports {root}: the core knows no framework"
        elif root in FRAMEWORKS and node in at_import:
            yield f"{module}:{node.lineno} imports {root} at the top; inside of a function, please"
        if root in DELETING and name.split(".")[-1] in DELETING[root] and module != "_directory":
            yield f"{module}:{node.lineno} imports {name}; only _directory renames and deletes"
        coordinates = COORDINATION | {"distributed"}
        if module != "_processes" and root == "jax" and coordinates & set(name.split(".")):
            yield f"{module}:{node.lineno} imports {name}; only _processes coordinates"
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from _check_attribute(node, node in called, module)


def _check_attribute(node: ast.Attribute, called: bool, module: str) -> Iterator[str]:
    owner = node.value.id if isinstance(node.value, ast.Name) else ""
    if owner in DELETING:
        deletes = node.attr in DELETING[owner]
    else:
        deletes = called and node.attr in PATH_METHODS  # `rules.rename` may be a plain field
    if deletes and module != "_directory":
        yield f"{module}:{node.lineno} uses .{node.attr}; only _directory renames and deletes"
    coordinates = node.attr in COORDINATION or (owner == "jax" and node.attr == "distributed")
    if coordinates and module != "_processes":
        yield f"{module}:{node.lineno} uses .{node.attr}; only _processes coordinates"


def problems_of(package: Path) -> list[str]:
    """Every violation in a package, in words."""
    found: list[str] = []
    files = sorted(package.rglob("*.py"))
    inside = {file.relative_to(package).with_suffix("").parts[0] for file in files}
    for file in files:
        tree = ast.parse(file.read_text())
        found += check_layers(tree, file, package, inside)
        found += check_effects(tree, file, package)
    return found


def test_the_core_keeps_its_layers():
    assert problems_of(PACKAGE) == []


def test_every_layer_has_a_module():
    """A row must not be empty by a typing error."""
    present = {module_of(file, PACKAGE) for file in PACKAGE.rglob("*.py")}
    empty = [name for name, modules in LAYERS if not modules & present]
    assert empty == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("_new.py", "", "has no layer"),
        ("_new/inner.py", "", "has no layer"),
        ("_errors.py", "from ._tree import flatten", "not below"),
        ("_errors.py", "from . import _tree", "not below"),
        ("_errors.py", "def f():\n    import ckpt_core._save", "not below"),
        ("_errors.py", "from ckpt_core import save", "imports __init__"),
        ("_errors.py", "import ckpt_core", "imports __init__"),
        ("_errors.py", "import importlib\nimportlib.import_module('ckpt_core._save')", "not below"),
        ("_load.py", "from ckpt_core._save import save", "not below"),
        ("_storage/deep.py", "from .._load import load", "not below"),
        ("_storage/deep.py", "from .._run.checkpointer import Checkpointer", "not below"),
        ("_read/deep.py", "from ckpt_core._load.request import Request", "not below"),
        ("_run/policies/deep.py", "from ckpt_core._run import steps", "not below"),
        ("_save.py", "import tensorstore as ts", "only _storage"),
        ("_save.py", "def f():\n    from tensorstore import open", "only _storage"),
        ("_save.py", "def f():\n    import flax", "knows no framework"),
        ("_save.py", "from orbax import checkpoint", "knows no framework"),
        ("bench/deep.py", "try:\n    import torch\nexcept ImportError:\n    pass", "at the top"),
        ("_save.py", "import os\nos.replace('a', 'b')", "renames and deletes"),
        ("_save.py", "from os import unlink", "renames and deletes"),
        ("_save.py", "import shutil\ngone = shutil.rmtree", "renames and deletes"),
        ("_save.py", "def f(path):\n    path.unlink()", "renames and deletes"),
        ("_save.py", "from http.client import HTTPConnection", "only _exchange"),
        ("_directory.py", "def f():\n    import socketserver", "only _exchange"),
        ("_save.py", "import jax\njax.distributed.initialize()", "coordinates"),
        ("_save.py", "from jax._src import distributed", "coordinates"),
        ("_save.py", "from jax.experimental import multihost_utils", "coordinates"),
        ("_save.py", "def f(client):\n    client.wait_at_barrier('a', 1)", "coordinates"),
    ],
)
def test_the_checker_can_fail(tmp_path, file, source, complaint):
    """One bad file among empty ones: every other file of the real package passes, see above."""
    package = tmp_path / PACKAGE.name
    package.mkdir()
    for module in {module.partition(".")[0] for module in RANK}:
        (package / f"{module}.py").touch()
    planted = package / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(source)
    found = problems_of(package)
    assert len(found) == 1, found
    assert found[0].startswith(module_of(planted, package))
    assert complaint in found[0]


LOADED_AFTER = """
import json, sys
exec(sys.argv[1])
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


def test_saving_arrays_imports_no_framework(run_python, tmp_path):
    code = (
        "import ckpt_core, jax.numpy as jnp; "
        f"ckpt_core.save({str(tmp_path / 'step')!r}, {{'a': jnp.ones(3)}}); "
        f"ckpt_core.load({str(tmp_path / 'step')!r})"
    )
    assert set(run_python(LOADED_AFTER, code)) & FRAMEWORKS == set()


def test_every_public_name_is_there():
    assert ckpt_core.__all__
    for name in ckpt_core.__all__:
        assert getattr(ckpt_core, name) is not None, name
        assert name in dir(ckpt_core)
