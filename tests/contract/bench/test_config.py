"""Suite files: Orbax's load unchanged, what is wrong is named, lists become sweeps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import bench
from tests.support.paths import BENCHMARKS


@dataclass(frozen=True)
class SweptOptions(bench.BenchmarkOptions):
    flag: bool | list[bool] = True
    number: int | list[int | None] | None = None
    word: str | list[str] = "a"

    def is_valid(self) -> bool:
        return not (self.flag and self.number == 2)


@bench.benchmark_options(SweptOptions)
class Swept(bench.BenchmarksGenerator):
    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        return bench.TestResult(metrics=bench.Metrics())


def cases_of(suite: bench.SuiteConfig, place: Path) -> tuple[Any, ...]:
    return bench.run_suite(suite, bench.RunSettings(place, repeats=1)).cases


def suite(options: str = "", more: str = "", generator: str = "Swept") -> bench.SuiteConfig:
    text = f"suite_name: s\nbenchmarks:\n- generator: {__name__}.{generator}\n"
    return bench.parse_suite(text + (f"  options: {options}\n" if options else "") + more, "s.yaml")


def test_orbaxs_own_suites_load():
    """All that the installed wheel ships, but those which ask for what the guide does not have."""
    orbax = pytest.importorskip("orbax.checkpoint")
    folder = Path(orbax.__file__).parent / "_src/testing/benchmarks/configs"
    files = sorted(folder.rglob("*.yaml"))
    if not files:
        pytest.skip("this Orbax ships no suites")
    refused = {}
    for file in files:
        try:
            bench.load_suite(file)
        except bench.ConfigError as error:
            refused[file.name] = str(error)
    expected = {  # Pathways; an undocumented key; axes that its own mesh_axes lack
        "llama-70b-v5p-64-pw-example.yaml": "Pathways is not supported",
        "llama-8b-v5p-8.yaml": "'reuse_checkpoint'",
        "single_replica_benchmark.yaml": "the mesh_axes lack",
    }
    assert len(files) > 40
    for name, text in refused.items():
        assert expected[name] in text, text


@pytest.mark.parametrize("name", sorted(path.name for path in BENCHMARKS.glob("*.yaml")))
def test_our_own_suites_expand(name: str, tmp_path: Path):
    with pytest.raises(bench.ConfigError, match="no case matches"):
        bench.run_suite(bench.load_suite(BENCHMARKS / name), bench.RunSettings(tmp_path, only="-"))


GOOD = "suite_name: s\nbenchmarks:\n- generator: a.B\n"


SPEC = GOOD + "checkpoint_config:\n  spec:\n    w: "
MESH = GOOD + "mesh_config: "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the suite must be a mapping, not empty"),
        ("a: [", "not YAML"),
        ("- a", "the suite must be a mapping, not a list"),
        ("suite_name: s", "lacks the key 'benchmarks'"),
        (GOOD + "num_repeat: 3", "no key 'num_repeat' (did you mean 'num_repeats'?)"),
        (GOOD + "num_repeats: many", "num_repeats must be an integer of at least 1, not text"),
        (GOOD + "num_repeats: 0", "at least 1, not integer 0"),
        (GOOD + "order: random", "'interleaved' or 'sequential'"),
        (GOOD + "simdevice: {device_type: v5p}", "Pathways is not supported"),
        (GOOD + "checkpoint_config: {path: p, spec: {a: int}}", "give exactly one"),
        (GOOD + "checkpoint_config: {}\ncheckpoint_configs: [{}]", "not both"),
        (GOOD + "checkpoint_configs: []", "at least one, not an empty list"),
        (SPEC + "{dtype: float33, shape: [2]}", "dtype must be the name of a dtype"),
        (SPEC + "{dtype: int8, shape: 2}", "list of integers"),
        (SPEC + "float", "'int' and 'str' are"),
        (MESH + "{ici_parallelism: {a: 1}}", "lacks the key 'mesh_axes'"),
        (MESH + "{mesh_axes: [data], ici_parallelism: {dat: 2}}", "(did you mean 'data'?)"),
        (
            GOOD + "mesh_configs: [{mesh_axes: [a], dcn_parallelism: {a: x}}]",
            "mesh_configs[0].dcn_parallelism must be",
        ),
        (GOOD + "on: 3", "no key True"),
        ("suite_name: s\nbenchmarks:\n- options: {}\n", "lacks the key 'generator'"),
    ],
)
def test_what_is_wrong_is_named(text: str, expected: str):
    with pytest.raises(bench.ConfigError, match=re.escape(expected)) as caught:
        bench.parse_suite(text, "suite.yaml")
    assert str(caught.value).startswith("suite.yaml")


def test_every_problem_is_reported_at_once():
    with pytest.raises(bench.ConfigError) as caught:
        bench.parse_suite("suite_nam: s\nnum_repeats: x\nbenchmarks: []\n", "s.yaml")
    assert all(name in str(caught.value) for name in ("suite_nam", "num_repeats", "benchmarks"))


def test_lists_are_swept_and_invalid_combinations_dropped(tmp_path: Path):
    cases = cases_of(suite("{flag: [true, false], number: [1, 2], word: [x, y]}"), tmp_path)
    assert len(cases) == 8 == len({case.name for case in cases})
    assert [case.skipped for case in cases].count("SweptOptions.is_valid() says no") == 2
    assert cases[0].label == "flag=true, number=1, word=x"


def test_checkpoints_and_meshes_are_swept(tmp_path: Path):
    more = (
        "checkpoint_configs:\n- {spec: {a: int}}\n- {name: other, spec: {a: str}}\n"
        "mesh_configs:\n- {mesh_axes: [x], ici_parallelism: {x: 8}}\n- {mesh_axes: [y]}\n"
    )
    assert [case.group for case in cases_of(suite(more=more), tmp_path)] == [
        *("Swept, checkpoint 0, x=8", "Swept, checkpoint 0, y=1"),
        *("Swept, other, x=8", "Swept, other, y=1"),
    ]


@pytest.mark.parametrize(
    ("options", "generator", "expected"),
    [
        ("{flg: true}", "Swept", "SweptOptions has no option 'flg' (did you mean 'flag'?)"),
        ("{flag: 1}", "Swept", "flag must be true or false, not integer 1"),
        ("{number: [1, true]}", "Swept", "number must be an integer or null, not boolean True"),
        ("{word: 3}", "Swept", "word must be text, not integer 3"),
        ("{word: []}", "Swept", "empty list"),
        ("", "Swpt", "has no class 'Swpt' (did you mean 'Swept'?)"),
        ("", "Path", "has no BenchmarksGenerator 'Path'"),
        ("", "no.such", "cannot import"),
    ],
)
def test_options_are_checked_against_their_class(
    options: str, generator: str, expected: str, tmp_path: Path
):
    with pytest.raises(bench.ConfigError, match=re.escape(expected)):
        cases_of(suite(options, generator=generator), tmp_path)


def test_what_the_document_shows_works():
    text = (BENCHMARKS / "README.md").read_text()
    (yaml_block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (python_block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert bench.parse_suite(yaml_block).benchmarks
    names: dict[str, object] = {"__name__": __name__}
    exec(python_block, names)
    assert names["MyBenchmark"].options_class is names["MyOptions"]  # pyright: ignore
    from ckpt_core.bench import generators
    from ckpt_core.bench.generators import SaveLoadOptions
    from ckpt_core.bench.libraries import LIBRARIES

    for name in [*vars(SaveLoadOptions()), *LIBRARIES]:
        assert f"`{name}`" in text, name
    for name, value in vars(generators).items():
        if isinstance(value, type) and issubclass(value, bench.BenchmarksGenerator):
            assert f"`{name}`" in text, name
