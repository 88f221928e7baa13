"""Suite files: Orbax's load unchanged, errors name file, line and key, lists become sweeps."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from ckpt_core import bench
from ckpt_core.bench._config import ArraySpec
from ckpt_core.bench._expand import expand
from tests.support.paths import BENCHMARKS

TOUR = """
suite_name: "ocdbt vs non-ocdbt"
num_repeats: 3
checkpoint_config:              # synthetic data - no real model needed
  spec:
    params: {dtype: bfloat16, shape: [8192, 8192], sharding: [fsdp]}
mesh_config:
  mesh_axes: ["fsdp"]
  ici_parallelism: {"fsdp": 8}
benchmarks:
  - generator: "GENERATOR"
    options:
      use_ocdbt: [true, false]  # a list is swept
"""


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


def suite(options: str = "", more: str = "", generator: str = "Swept") -> bench.SuiteConfig:
    text = f"suite_name: s\nbenchmarks:\n- generator: {__name__}.{generator}\n"
    return bench.parse_suite(text + (f"  options: {options}\n" if options else "") + more, "s.yaml")


def test_the_guides_first_suite():
    found = bench.parse_suite(TOUR)
    assert found.suite_name == "ocdbt vs non-ocdbt" and found.num_repeats == 3
    assert found.checkpoints[0].spec == {
        "params": ArraySpec("bfloat16", (8192, 8192), ("fsdp",), None)
    }
    assert found.meshes[0] is not None and found.meshes[0].ici_parallelism == {"fsdp": 8}
    assert found.benchmarks[0].options["use_ocdbt"] == [True, False]


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
        "single_replica_benchmark.yaml": "none of the mesh_axes",
    }
    assert len(files) > 40
    for name, text in refused.items():
        assert expected[name] in text, text


@pytest.mark.parametrize("name", sorted(path.name for path in BENCHMARKS.glob("*.yaml")))
def test_our_own_suites_expand(name: str):
    cases = expand(bench.load_suite(BENCHMARKS / name))
    assert any(case.skipped is None for case in cases)
    labels = [(case.group, case.label) for case in cases]
    assert len(set(labels)) == len(labels), "a table could not distinguish them"


GOOD = "suite_name: s\nbenchmarks:\n- generator: a.B\n"


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("", 0, "is empty"),
        ("a: [", 1, "not YAML"),
        ("- a", 1, "the suite must be a mapping, not a list"),
        ("suite_name: s", 1, "lacks the key 'benchmarks'"),
        (GOOD + "num_repeat: 3", 4, "no key 'num_repeat' (did you mean 'num_repeats'?)"),
        (GOOD + "num_repeats: many", 4, "num_repeats must be an integer of at least 1, not text"),
        (GOOD + "num_repeats: 0", 4, "at least 1, not integer 0"),
        (GOOD + "num_repeats: true", 4, "not boolean True"),
        (GOOD + "num_repeats: 2\nnum_repeats: 3", 5, "twice, first on line 4"),
        (GOOD + "order: random", 4, "'interleaved' or 'sequential'"),
        (GOOD + "1: 2", 4, "key 1 must be text"),
        (GOOD + "simdevice: {device_type: v5p}", 4, "Pathways is not supported"),
        (GOOD + "checkpoint_config: {path: p, spec: {a: int}}", 4, "give exactly one"),
        (GOOD + "checkpoint_config: {sharding_config_path: p}", 4, "needs path"),
        (GOOD + "checkpoint_config: {}\ncheckpoint_configs: [{}]", 5, "not both"),
        (GOOD + "checkpoint_configs: []", 4, "at least one, not an empty list"),
        (
            GOOD + "checkpoint_config:\n  load_with_colocated_python: true",
            5,
            "Pathways is not supported",
        ),
        (
            GOOD + "checkpoint_config:\n  spec:\n    w: {dtype: float33, shape: [2]}",
            6,
            "dtype must be the name of a dtype",
        ),
        (GOOD + "checkpoint_config:\n  spec:\n    w: {dtyp: int8, shape: [2]}", 6, "mean 'dtype'?"),
        (
            GOOD + "checkpoint_config:\n  spec:\n    w: {dtype: int8, shape: 2}",
            6,
            "list of integers",
        ),
        (GOOD + "checkpoint_config:\n  spec:\n    w: float", 6, "'int' and 'str' are"),
        (GOOD + "checkpoint_config:\n  spec: [a]", 5, "spec must be a mapping of names to arrays"),
        (GOOD + "checkpoint_configs:\n- {}\n- 3", 6, "must be a mapping, not integer 3"),
        (GOOD + "mesh_config: {ici_parallelism: {a: 1}}", 4, "lacks the key 'mesh_axes'"),
        (GOOD + "mesh_config:\n  ici_parallelism: {}", 4, "lacks the key 'mesh_axes'"),
        (
            GOOD + "mesh_config:\n  mesh_axes: [data]\n  ici_parallelism:\n    dat: 2",
            7,
            "'dat' is none of the mesh_axes (did you mean 'data'?)",
        ),
        (
            GOOD + "mesh_config: {mesh_axes: [a], dcn_parallelism: {a: x}}",
            4,
            "integers of at least",
        ),
        ("suite_name: s\nbenchmarks:\n- options: {}\n", 3, "lacks the key 'generator'"),
        ("suite_name: s\nbenchmarks:\n- generator: a.B\n  options: 3\n", 4, "must be a mapping"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, line: int, expected: str):
    with pytest.raises(bench.ConfigError) as caught:
        bench.parse_suite(text, "suite.yaml")
    error = caught.value
    assert [number for number, _ in error.problems] == [line]
    assert expected in error.problems[0][1]
    assert str(error).startswith(f"suite.yaml:{line}: " if line else "suite.yaml: ")


def test_every_problem_is_reported_at_once():
    with pytest.raises(bench.ConfigError) as caught:
        bench.parse_suite("suite_nam: s\nnum_repeats: x\nbenchmarks: []\n", "s.yaml")
    assert [line for line, _ in caught.value.problems] == [1, 2, 3]


def test_lists_are_swept_and_invalid_combinations_dropped():
    cases = expand(suite("{flag: [true, false], number: [1, 2], word: [x, y]}"))
    assert len(cases) == 8
    chosen = {(c.options.flag, c.options.number, c.options.word) for c in cases if not c.skipped}  # pyright: ignore
    assert len(chosen) == 6 and (True, 2, "x") not in chosen
    assert {c.skipped for c in cases if c.skipped} == {"SweptOptions.is_valid() says no"}
    assert cases[0].label == "flag=true, number=1, word=x"
    assert len({case.name for case in cases}) == 8


def test_checkpoints_and_meshes_are_swept():
    more = (
        "checkpoint_configs:\n- {spec: {a: int}}\n- {name: other, spec: {a: str}}\n"
        "mesh_configs:\n- {mesh_axes: [x], ici_parallelism: {x: 8}}\n- {mesh_axes: [y]}\n"
    )
    groups = [case.group for case in expand(suite(more=more))]
    assert groups == [
        "Swept, checkpoint 0, x=8",
        "Swept, checkpoint 0, y=1",
        "Swept, other, x=8",
        "Swept, other, y=1",
    ]


def test_the_name_of_a_case_is_stable_and_says_what_it_is():
    one, again = expand(suite("{word: [x, y]}")), expand(suite("{word: [y, x]}"))
    assert {case.name for case in one} == {case.name for case in again}
    assert {case.name for case in one} & {case.name for case in expand(suite("{word: z}"))} == set()


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
def test_options_are_checked_against_their_class(options: str, generator: str, expected: str):
    with pytest.raises(bench.ConfigError, match=r"s\.yaml:[34]: ") as caught:
        expand(suite(options, generator=generator))
    assert expected in str(caught.value)


def test_a_generator_may_be_named_without_its_module():
    (case,) = expand(bench.parse_suite("suite_name: s\nbenchmarks: [{generator: SaveLoad}]"))
    assert case.generator.__module__.startswith("ckpt_core.bench.generators")
    with pytest.raises(bench.ConfigError, match="did you mean 'SaveLoad'"):
        expand(bench.parse_suite("suite_name: s\nbenchmarks: [{generator: SaveLod}]"))


def test_a_case_that_is_asked_for_twice_runs_once():
    text = "suite_name: s\nbenchmarks:\n" + f"- generator: {__name__}.Swept\n" * 2
    assert len(expand(bench.parse_suite(text))) == 1


def test_what_is_measured_may_be_set_before_jax_is_imported():
    """The command restarts itself, or sets flags that jax reads first."""
    code = "import sys, ckpt_core.bench, ckpt_core.cli._bench; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_anchors_and_merges():
    text = (
        "suite_name: s\nbenchmarks: [{generator: a.B}]\ncheckpoint_config:\n  spec:\n"
        "    a: &array {dtype: int8, shape: [2]}\n    b: {<<: *array, count: 3}\n"
        "    c: {<<: *array, dtype: bool}\n"
    )
    spec = bench.parse_suite(text).checkpoints[0].spec
    assert spec == {
        "a": ArraySpec("int8", (2,)),
        "b": ArraySpec("int8", (2,), count=3),
        "c": ArraySpec("bool", (2,)),
    }


def test_the_launch_files_are_well_formed_and_start_what_there_is():
    slurm = BENCHMARKS / "cluster/slurm.sbatch"
    subprocess.run(["bash", "-n", str(slurm)], check=True)
    text = slurm.read_text()
    for name in ("ADDRESS", "PORT"):
        assert f"JAX_COORDINATOR_{name}=" in text
    jobset = yaml.safe_load((BENCHMARKS / "cluster/jobset.yaml").read_text())
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert job["parallelism"] == job["completions"] == int(variables["JAX_NUM_PROCESSES"])
    names = {"JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "JAX_PROCESS_ID"}
    assert names < set(variables) and all(name in text for name in names)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    command = shlex.join([*container["command"], *container["args"]])
    assert "-m ckpt_core.cli bench run" in command and "-m ckpt_core.cli bench run" in text


def test_the_slurm_file_hands_the_variables_on(tmp_path: Path):
    """With stand-ins for Slurm's commands and for Python: what would really run."""
    tools = {
        "scontrol": "#!/bin/sh\nprintf 'node7\\nnode8\\n'\n",
        "srun": '#!/bin/sh\nshift\nSLURM_PROCID=3 exec "$@"\n',
        "python": '#!/bin/sh\nenv | grep ^JAX_ | sort; echo "$@"\n',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(BENCHMARKS / "cluster/slurm.sbatch"), "a suite.yaml", "/o", "--json"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "CKPT_PYTHON": str(tmp_path / "python"),
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_JOB_ID": "40123",
            "SLURM_NTASKS": "4",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "JAX_COORDINATOR_ADDRESS=node7",
        "JAX_COORDINATOR_PORT=20123",
        "JAX_NUM_PROCESSES=4",
        "JAX_PROCESS_ID=3",
        "-m ckpt_core.cli bench run a suite.yaml -o /o/40123 --json",
    ]


def test_what_the_document_shows_works():
    text = (BENCHMARKS.parent / "docs/benchmarks.md").read_text()
    (yaml_block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (python_block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    cases = expand(bench.parse_suite(yaml_block))
    assert [case.label for case in cases] == ["ckpt", "orbax_v1"] * 2
    names: dict[str, object] = {"__name__": __name__}
    exec(python_block, names)
    assert names["MyBenchmark"].options_class is names["MyOptions"]  # pyright: ignore
    from ckpt_core.bench import generators
    from ckpt_core.bench.generators import SaveLoadOptions
    from ckpt_core.bench.libraries import NAMES

    for name in [*vars(SaveLoadOptions()), *NAMES]:
        assert f"`{name}`" in text, name
    for name, value in vars(generators).items():
        if isinstance(value, type) and issubclass(value, bench.BenchmarksGenerator):
            assert f"`{name}`" in text, name
