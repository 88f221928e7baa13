"""What docs/versions.md says of versions is what pyproject.toml and constraints.txt say; private names of others are listed."""

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import floors
from tests.support.paths import ROOT, modules

PAGE = ROOT / "docs" / "versions.md"
ROW = re.compile(r"^\| ([A-Za-z0-9_-]+) \|[^|]*\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def rows() -> dict[str, list[str]]:
    """Package to its cells on the page: floor, tested, newest tried."""
    found = ROW.findall(PAGE.read_text("utf-8"))
    return {name: cells for name, *cells in found if name not in ("Package", "Python")}


def as_number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def test_the_floors_on_the_page_are_those_of_the_package():
    assert {name: cells[0] for name, cells in rows().items()} == floors.floors()


def test_the_tested_versions_on_the_page_are_those_that_are_held():
    held = floors.tested()
    assert {name: cells[1] for name, cells in rows().items()} == {
        name: held[name] for name in rows()
    }


@pytest.mark.parametrize("name", floors.floors())
def test_no_version_is_below_one_before_it(name):
    floor, tested, newest = map(as_number, rows()[name])
    assert floor <= tested <= newest


def test_constraints_install_the_floors_and_hold_torch():
    lines = dict(line.split("==") for line in floors.constraints())
    expected = floors.floors()
    assert lines.pop("torch") == floors.tested()["torch"] != expected.pop("torch")
    assert lines == expected


def test_the_pythons_on_the_page_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = re.findall(r"^\| Python (3\.\d+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    prefix = "Programming Language :: Python :: 3."
    classified = [
        one.removeprefix(prefix[:-2]) for one in project["classifiers"] if one.startswith(prefix)
    ]
    assert named == classified
    assert project["requires-python"] == f">={named[0]}"


# A file of another package, and the private names in it that the product reads.
PRIVATE = """
jax/_src/config explicit_device_get_scope explicit_device_put_scope
jax/_src/distributed global_state
jax/_src/interpreters/pxla batched_device_put
jax/_src/xla_bridge _backends
equinox/_ad _fun
keras/src/saving/saving_lib _load_state
keras/src/backend/common/variables _value
keras/src/utils/naming to_snake_case
keras/src/callbacks/callback _model
keras/src/callbacks/swap_ema_weights _ema_weights_in_model
keras/src/layers/layer _flatten_layers _layers _non_trainable_variables _seed_generators _trainable_variables
keras/src/metrics/reduction_metrics _direction
keras/src/optimizers/base_optimizer _model_variables_moving_average _trainable_variables _variables
keras/src/trainers/compile_utils _flat_metrics _flat_weighted_metrics
keras/src/trainers/data_adapters/generator_data_adapter _first_batches
keras/src/trainers/data_adapters/grain_dataset_adapter _dataset
keras/src/trainers/epoch_iterator _current_iterator _enumerate_iterator
keras/src/trainers/trainer _compile_metrics _initial_epoch
grain/_src/python/data_loader _data_loader _data_source _iterator _operations _sampler _shard_options
grain/_src/python/dataset/dataset _closed _parents _seed_rng_seed
grain/_src/python/dataset/elastic_iterator _ElasticMapDatasetIterator _ds
grain/_src/python/dataset/transformations/interleave _datasets _iterators_in_use
grain/_src/python/dataset/transformations/map _map_fn _rng_pool _seed _transform
grain/_src/python/dataset/transformations/prefetch _MpContextIterDataset _map_parent _maybe_nonnative_parent
grain/_src/python/dataset/transformations/process_prefetch _LazyWorkerSliceIterDataset _iter_parent _next_index _state
grain/_src/python/dataset/transformations/source _source
torch/_C/__init__ DisableTorchFunction
torch/_dynamo/eval_frame OptimizedModule _orig_mod
torch/nn/modules/module _buffers _parameters
torch/overrides _get_current_function_mode_stack
torch/utils/_mode_utils no_dispatch
torchax/interop _model
torchax/tensor _elem
"""
_LISTED = [(line.split()[0], line.split()[1:]) for line in PRIVATE.strip().splitlines()]
# With an underscore, and in CPython's documentation.
_DOCUMENTED = {"_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_replace", "_thread"}


@pytest.mark.parametrize(("where", "names"), _LISTED)
def test_others_have_the_private_names_that_we_read(where, names):
    package, _, rest = where.partition("/")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    (file,) = Path(spec.origin).parent.glob(f"{rest}.py*")  # of torch._C only a .pyi can be read
    text = file.read_text("utf-8")
    made = r"(?m)(^ *|self\.|def |class |\"){}\b".format
    assert [name for name in names if not re.search(made(name), text)] == []


def _read_of_others(source: str) -> Iterator[tuple[int, str]]:
    """Line and private name, wherever a module imports one, or reads one that it does not make."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    read: list[tuple[int, object]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(ast.Name("self" | "cls"), name):
                own.add(name)
            case ast.Attribute(attr=name) | ast.Call(
                ast.Name("getattr" | "hasattr"), [_, ast.Constant(name), *_]
            ):
                read.append((node.lineno, name))
            case ast.ImportFrom(str(module), names) if not module.startswith("ckpt_"):
                read += [(node.lineno, f"{module}.{one.name}") for one in names]
            case ast.Import(names):
                read += [(node.lineno, one.name) for one in names]
    for line, name in read:
        if re.search(r"(^|\.)(_[A-Za-z]\w*(?<!__)|src)(\.|$)", str(name)) and name not in own:
            yield line, str(name)


def test_no_other_private_name_is_read():
    listed = {"_C", *_DOCUMENTED}
    for where, names in _LISTED:
        listed |= {*names, *(f"{where}/{name}".replace("/", ".") for name in ("", *names))}
    sources = {module: file.read_text("utf-8") for module, file in modules().items()}
    assert [
        f"{module}:{line}: {name}"
        for module, source in sources.items()
        for line, name in _read_of_others(source)
        if name not in listed and f"{name}." not in listed
    ] == []
    words = {*re.findall(r"\w+", "".join(sources.values()))}
    assert {name for _, names in _LISTED for name in names} - words == set(), "nothing reads these"
