"""Rooms have doors: no circles of imports, few reach past a face, state lies in named places; and files of tests stay small."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.mutants import run as mutants
from tests.support import seconds, sums
from tests.support.paths import ROOT, modules

# Rooms with a face: one imports what their `__init__` names. Imports of other rooms that go past it; they only fall.
# The pure rooms (`_format`, `_layout`, `_tree`, `_run.policies`) and `_devices` are shelves: one takes
# the module that is named for what one needs, and what does not need jax does not import it.
PAST_THE_FACE = {
    "_directory": 2,  # hidden names of what `doctor` measures with, and mounted buckets
    "_load": 2,
    "_look": 4,
    "_read": 0,
    "_results": 0,
    "_run": 9,  # the command line and the report read a run without opening it
    "_save": 4,  # a save into local directories is made of the same pieces; imports write piece by piece
    "_saved": 0,
    "_storage": 0,
    "_adapters": 0,
    "_exchange": 0,
    "_processes": 0,
    "_verify": 0,
}

# Module -> what of it changes while a program runs, and why that is no property of an object.
STATE = {
    "ckpt_core._adapters": {"_registered"},  # what `ckpt.register` was given, for one program
    "ckpt_core._background": {"_at_exit", "unfinished"},  # saves that exit waits for
    "ckpt_core._directory.owner": {"_forking", "open_files"},  # descriptors that a child must close
    "ckpt_core._directory.object_store": {"_asked_of_conditions"},  # endpoints that were probed
    "ckpt_core._storage.location": {"_expecting"},  # a lock: answers of stores that were expected
    "ckpt_core._fork": {"HOME"},  # the process that has used ckpt, for its forked children
    "ckpt_core._processes": {"_absent"},  # for whom this process waits, for those reports
    "ckpt_core._run.preemption": {"_calls", "_listeners", "_previous"},  # signals of this process
    "ckpt_core._storage.files": {"_alive"},  # files that a forked child must close
    "ckpt_keras._assets": {"_saved_beside"},  # Keras' hooks get no argument of ours
    "ckpt_orbax.v1._context": {"_ACTIVE"},  # Orbax's own `with Context(...)`
    "ckpt_orbax._checkpointables": {"_GLOBAL"},  # Orbax's own global registry
    "ckpt_orbax.handlers": {"_FOR_RESTORE", "_FOR_SAVE"},  # as the registry
    "ckpt_core.bench._measure": {"TRACE_ROOT"},  # set around one measurement
}
_CHANGES = (
    r"(\.(append|add|update|pop|setdefault|clear|discard|extend|remove)\(|\[[^\]\n]*\] = |\.set\()"
)
_CHANGING = re.compile(
    r"(Lock|RLock|WeakSet|ContextVar|Registry|_Allocator|_Home|_Blocked|Event|deque)$"
)


def imported(tree: ast.AST, known: Mapping[str, Path], *, at_once: bool) -> Iterator[str]:
    """The modules that a module imports; ``at_once``: while it is imported itself."""
    for node in ast.iter_child_nodes(tree):
        if at_once and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module
        else:
            yield from imported(node, known, at_once=at_once)


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that import themselves through others, by peeling off all that do not."""
    left = {name: {*others} - {name} for name, others in graph.items()}
    while True:
        done = {name for name, others in left.items() if not others & left.keys()}
        if not done:
            break
        left = {name: others for name, others in left.items() if name not in done}
    # what is left leads into a circle; what nothing left imports only leads to it
    while True:
        needed = {other for others in left.values() for other in others}
        if left.keys() <= needed:
            return sorted(left)
        left = {name: others for name, others in left.items() if name in needed}


def room_of(module: str, known: Mapping[str, Path]) -> str:
    """The innermost package in which a module is."""
    while known[module].name != "__init__.py":
        module = module.rpartition(".")[0]
    return module


def state_of(source: str) -> set[str]:
    """Names at the top of a module whose values change while a program runs."""
    tree = ast.parse(source)
    rebound = {
        name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        name = ast.unparse(target)
        made = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        holds = isinstance(value, ast.Dict | ast.List | ast.Set) or made in ("set", "dict", "list")
        if _CHANGING.search(made) or (holds and re.search(rf"\b{name}{_CHANGES}", source)):
            rebound.add(name)
    return rebound


def test_no_module_imports_itself_through_others() -> None:
    known = modules()
    graph = {
        name: set(imported(ast.parse(file.read_text()), known, at_once=True))
        for name, file in known.items()
    }
    assert len(graph) > 200 and circles(graph) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_few_imports_go_past_the_face_of_a_room() -> None:
    known = modules()
    past: dict[str, list[str]] = {room: [] for room in PAST_THE_FACE}
    for name, file in known.items():
        if not name.startswith("ckpt_core"):
            continue
        for other in set(imported(ast.parse(file.read_text()), known, at_once=False)):
            room = room_of(other, known)
            inside = name == room or name.startswith(f"{room}.")
            short = room.removeprefix("ckpt_core.")
            if other != room and not inside and short in past:
                past[short].append(f"{name} imports {other}")
    assert {room: len(found) for room, found in past.items()} == PAST_THE_FACE, past


def test_state_of_modules_lies_in_named_places() -> None:
    found = {name: state_of(file.read_text()) for name, file in modules().items()}
    assert {name: names for name, names in found.items() if names} == STATE


def test_state_is_found() -> None:
    assert state_of("seen = set()\ndef f(x): seen.add(x)\n") == {"seen"}
    assert state_of("count = 0\ndef f():\n    global count\n    count += 1\n") == {"count"}
    assert state_of("import threading\nlock = threading.Lock()\nNAMES = {'a': 1}\n") == {"lock"}


TESTS = ROOT / "tests"
BRIDGES = {"places", "replacing", "seams", "stores"}
"""Helpers of contract tests that know private names: whoever rewrites the inside carries these over, and nothing else."""
MAX_LINES = 600


def test_no_file_of_tests_is_long():
    lines = {
        file.relative_to(TESTS).as_posix(): len(file.read_text().splitlines())
        for file in TESTS.rglob("*.py")
    }
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}, "split them"


def test_every_test_lies_in_a_folder():
    assert [file.name for file in TESTS.glob("test_*.py")] == []


def test_every_mutation_applies_and_its_test_is_there():
    for one in mutants.parsed((TESTS / "mutants" / "table.txt").read_text()):
        one.broken()  # raises where its lines are no longer there
        assert seconds.is_there(one.test), one.test


def test_a_contract_knows_nothing_private():
    """Neither by itself nor through its helpers, so that a rewrite of the inside changes nothing but the bridges."""
    todo, seen = [*(TESTS / "contract").rglob("*.py")], set[Path]()
    while todo:
        file = todo.pop()
        if file not in seen and file.exists() and file.stem not in BRIDGES:
            seen.add(file)
            todo += imported_files(ast.parse(file.read_text()))
    known = [
        one.relative_to(TESTS).as_posix()
        for one in seen
        if sums.imports_private_names(one.read_text())
    ]
    assert sorted(known) == []


def imported_files(tree: ast.AST) -> list[Path]:
    """Files of tests that a module imports, and some that are not there."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(f"{node.module}.{one.name}" for one in node.names)]
        elif isinstance(node, ast.Import):
            names += [one.name for one in node.names]
    return [ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.")]
