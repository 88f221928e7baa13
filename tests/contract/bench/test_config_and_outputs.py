"""Suites of `ckpt bench`: their files, the command, the results that it writes, and the programs of `benchmarks/`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import bench
from ckpt_core.bench.libraries import LIBRARIES
from tests.contract.bench.test_run import no_sync  # noqa: F401 (fixture)
from tests.support.command_line import LOADED, Call, make_call, start  # noqa: F401 (fixture)
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
def test_options_are_checked_against_their_class(options, generator, expected, tmp_path):
    with pytest.raises(bench.ConfigError, match=re.escape(expected)):
        cases_of(suite(options, generator=generator), tmp_path)


def test_what_the_document_shows_works():
    text = (BENCHMARKS / "README.md").read_text()
    (yaml_block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (python_block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert bench.parse_suite(yaml_block).benchmarks
    names: dict[str, object] = {"__name__": __name__}
    exec(python_block, names)
    assert names["MyBenchmark"].options_class is names["MyOptions"]
    from ckpt_core.bench import generators
    from ckpt_core.bench.generators import SaveLoadOptions
    from ckpt_core.bench.libraries import LIBRARIES

    for name in [*vars(SaveLoadOptions()), *LIBRARIES]:
        assert f"`{name}`" in text, name
    for name, value in vars(generators).items():
        if isinstance(value, type) and issubclass(value, bench.BenchmarksGenerator):
            assert f"`{name}`" in text, name


pytest.importorskip("typer")
SCALE = {"save": 1.0}


@dataclass(frozen=True)
class NapOptions(bench.BenchmarkOptions):
    size: int | list[int] = 1


@bench.benchmark_options(NapOptions)
class Nap(bench.BenchmarksGenerator):
    """Reports figures that were not measured: nothing here depends on how busy the machine is."""

    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        secs = SCALE["save"] * context.options.size * (1 + 0.01 * (context.repeat_index or 0))
        metrics = bench.Metrics()
        metrics.values["save"] = {"0_basics/time_s": [secs], "4_throughput/gb_per_s": [1 / secs]}
        metrics.values["load"] = {"0_basics/time_s": [1.0]}
        return bench.TestResult(metrics=metrics, notes={"durable": "yes"})


class Fails(bench.BenchmarksGenerator):
    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        raise ValueError("<planted> & [bold]")


TEXT = f"""
suite_name: "naps <1>"
num_repeats: 4
benchmarks:
- generator: {__name__}.Nap
  options: {{size: [1, 2, 4]}}
"""


def run(call: Call, place: Path, *more: object, text: str = TEXT) -> tuple[int, str]:
    place.mkdir(exist_ok=True)
    (place / "suite.yaml").write_text(text)
    code, out, err = call("bench", "run", place / "suite.yaml", "-o", place / "out", *more)
    return code, out + err


def records(place: Path) -> list[dict[str, Any]]:
    lines = (place / "out" / "results.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=lambda word: pytest.fail(word)) for line in lines]


def counted(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["record"] == "run" and line["kind"] == "counted"]


def captured(call: Call, tmp_path: Path, *more: object) -> Path:
    assert run(call, tmp_path / "before", "--baseline-capture", tmp_path / "base", *more)[0] == 0
    (path,) = (tmp_path / "base").iterdir()
    return path


def test_tables_and_records(call: Call, tmp_path: Path) -> None:
    code, text = run(call, tmp_path, text=TEXT + f"- generator: {__name__}.Fails\n")
    assert code == 1 and "naps <1>" in text
    rows = [line for line in text.splitlines() if "size=" in line and "yes" in line]
    assert len(rows) == 3 and " 2.00x " in rows[1] and "GB/s" in text
    assert "ValueError: <planted> & [bold]" in text  # not taken for markup
    found = records(tmp_path)
    assert found[0]["backend"] == "cpu" and found[0]["versions"]["jax"]
    cases = [entry for entry in found if entry["record"] == "case"]
    assert len(cases) == 4 and len(cases[3]["errors"]) == 5
    statistics = cases[1]["statistics"]["save"]["0_basics/time_s"]
    assert statistics["n"] == 4 and statistics["min"] == 2.0
    assert statistics["median"] == pytest.approx(2.03)
    assert statistics["ci95"] == pytest.approx(3.182446 * 0.0258199 / 2, rel=1e-4)
    assert found[-1] == {"record": "end", "interrupted": False, "failed": 1}


def test_tensorboard_reads_what_is_written(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    run(call, tmp_path)
    root = tmp_path / "out" / "tensorboard"
    case = [entry["case"] for entry in records(tmp_path) if entry["record"] == "case"][2]
    host = EventAccumulator(str(root / case / "host_0"))
    host.Reload()
    events = host.Scalars("save_0_basics/time_s")
    assert [event.step for event in events] == [0, 1, 2, 3]
    assert [event.value for event in events] == pytest.approx([4.0, 4.04, 4.08, 4.12])
    summary = EventAccumulator(str(root / case / "__summary__"))
    summary.Reload()
    tags = summary.Tags()
    assert "save_0_basics/time_s_median" in tags["scalars"]
    assert {"at_a_glance/save", "at_a_glance/load", "configuration"} <= set(tags["tensors"])
    card = summary.Tensors("at_a_glance/save")[0].tensor_proto.string_val[0].decode()
    assert "| 0_basics/time_s " in card
    content = summary.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert start.hparams["size"].number_value == 4
    suite = EventAccumulator(str(root / "__suite__"))
    suite.Reload()
    assert suite.Tags()["tensors"] == ["suite"]


def test_the_same_again_is_not_worse(call: Call, tmp_path: Path) -> None:
    path = captured(call, tmp_path)
    assert path.read_text() == (tmp_path / "before/out/results.jsonl").read_text()
    code, text = run(call, tmp_path / "again", "--baseline", path)
    assert (code, "WORSE" in text) == (0, False)


@pytest.mark.parametrize(
    ("scale", "threshold", "code"), [(3.0, 0.5, 3), (1 / 3, 0.1, 0), (1.4, 0.5, 0), (1.4, 0.1, 3)]
)
def test_a_slowdown_is_caught_and_a_speedup_is_none(
    call, tmp_path, monkeypatch, scale, threshold, code
):
    path = captured(call, tmp_path)
    monkeypatch.setitem(SCALE, "save", scale)
    found, text = run(call, tmp_path / "now", "--baseline", path, "--threshold", threshold)
    assert found == code
    if code:
        assert "WORSE" in text and "metrics are worse" in text
        assert sum("WORSE" in line for line in text.splitlines()) == 6


def test_noise_is_not_worse(call: Call, tmp_path: Path) -> None:
    """The median moved by more than the threshold, and less than the values differ among themselves."""
    path = captured(call, tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for factor, line in zip((0.1, 0.8, 1.0, 1.7) * 3, counted(lines), strict=True):
        line["values"]["save"]["0_basics/time_s"][0] *= factor
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(call, tmp_path / "now", "--baseline", path, "--threshold", 0.05)[0] == 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such file"),
        ("{", "is no results.jsonl"),
        (
            '{"record": "environment", "suite_name": "s", "backend": "tpu"}\n',
            "measured with backend tpu, this is cpu",
        ),
    ],
)
def test_what_is_no_baseline_is_refused(call, tmp_path, content, expected):
    path = tmp_path / "baseline.jsonl"
    if content is not None:
        path.write_text(content)
    code, text = run(call, tmp_path / "now", "--baseline", path)
    assert code == 2 and expected in text


def test_cases_that_the_baseline_lacks_are_named(call: Call, tmp_path: Path) -> None:
    path = captured(call, tmp_path, "--only", "*size=1")
    code, text = run(call, tmp_path / "now", "--baseline", path)
    assert code == 0 and "Nap: size=2" in text


def test_tables_for_a_document(call: Call, tmp_path: Path) -> None:
    run(call, tmp_path, text=TEXT + f"- generator: {__name__}.Fails\n")
    path = tmp_path / "out" / "results.jsonl"
    code, text, _ = call("bench", "markdown", path)
    assert code == 0
    header, rule, first, second, third = text.split("**Nap: save**\n\n")[1].splitlines()[:5]
    assert "durable" in header and header.count("|") == rule.count("|") == first.count("|")
    assert first.startswith("| size=1 | ") and " 1.00x " in first and " yes " in first
    assert " 4.00x " in third and "size=2" in second
    assert "- failed: Fails, Fails: ValueError" in text
    lines = [line for line in path.read_text().splitlines() if '"record": "run"' in line[:20]]
    head = path.read_text().splitlines()[0]
    path.write_text("\n".join([head, *lines, '{"record": "ru']))  # killed while it wrote
    killed = call("bench", "markdown", path)[1]
    said = "The run was interrupted: these are the runs that had ended.\n\n"
    assert said in killed and killed.replace(said, "") == text
    for content, expected in (("{", "no results"), ("", "no results")):
        path.write_text(content)
        code, _, err = call("bench", "markdown", path)
        assert code == 2 and expected in err


SUITE = """
suite_name: tiny
num_repeats: 2
checkpoint_config: {spec: {w: {dtype: float32, shape: [64, 64]}}}
benchmarks:
- generator: SaveLoad
  options: {library: [ckpt, LIBRARY], async_enabled: false}
"""


@pytest.fixture
def suite_file(tmp_path: Path):
    def write(text: str = SUITE.replace("LIBRARY", "floor")) -> Path:
        path = tmp_path / "suite.yaml"
        path.write_text(text)
        return path

    return write


def test_bench_run_writes_everything(call, suite_file, tmp_path: Path):
    out = tmp_path / "out"
    code, text, err = call(
        "bench", "run", suite_file(), "-o", out, "--baseline-capture", tmp_path / "base"
    )
    assert code == 0, err
    assert "floor" in text and "save" in text and "counted 1: done" in err
    (baseline,) = (tmp_path / "base").iterdir()
    assert list((out / "tensorboard").rglob("events.out.tfevents.*"))
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [r["record"] for r in records] == ["environment", *["run"] * 6, *["case"] * 2, "end"]

    again = ("bench", "run", suite_file(), "-o", tmp_path / "again", "--repeats", 3, "--json")
    code, text, err = call(*again, "--baseline", baseline, "--threshold", "1000")
    assert code == 0 and json.loads(text.splitlines()[-1])["record"] == "end" and err == ""


def test_ctrl_c_writes_what_there_is_and_exits_with_130(call, suite_file, tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LIBRARIES["floor"], "load", interrupt)
    text = SUITE.replace("LIBRARY", "floor") + "order: sequential\n"
    code, out, _ = call("bench", "run", suite_file(text), "-o", tmp_path / "out")
    assert code == 130 and "interrupted" in out
    records = (tmp_path / "out/results.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["interrupted"] is True
    assert sum(json.loads(line)["record"] == "run" for line in records) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("suite_name: s\nbenchmarks: [{generator: SaveLod}]", "SaveLod"),
        ("suite_nam: s", "did you mean 'suite_name'?"),
        (SUITE + "baseline_path: /nowhere/at/all.jsonl\n", "no such file"),
    ],
)
def test_a_wrong_suite_is_one_message_and_exits_with_2(call, suite_file, tmp_path, text, expected):
    code, out, err = call("bench", "run", suite_file(text), "-o", tmp_path / "out")
    assert code == 2 and out == "" and expected in err


def test_steady_memory_starts_the_process_anew_and_hlo_is_dumped(suite_file, tmp_path: Path):
    text = f"steady_memory: true\n{SUITE.replace('[ckpt, LIBRARY]', 'ckpt')}".replace(
        "SaveLoad", "CheckpointerLoop"
    )
    done = start("bench", "run", suite_file(text), "-o", tmp_path / "out", "--enable-hlo-dump")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out/hlo_dump").glob("*.hlo.pb"))


SHARDED = """
suite_name: sharded
warmup_repeats: 0
num_repeats: 2
remove_repeated_dir: true
checkpoint_config:
  spec:
    w: {dtype: float32, shape: [64, 64], sharding: [data]}
    r: {dtype: int32, shape: [5]}
mesh_configs:
- {mesh_axes: [data], ici_parallelism: {data: 2}}
- {mesh_axes: [data], ici_parallelism: {data: 4}}
benchmarks:
- generator: SaveLoad
  options: {library: [ckpt, numpy_savez], async_enabled: null}
"""


def test_the_same_suite_in_several_processes(suite_file, tmp_path: Path):
    count = 2
    done = start(
        "bench", "run", suite_file(SHARDED), "-o", tmp_path / "out", "--processes", count, "--json",
        XLA_FLAGS="--xla_force_host_platform_device_count=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert records[0]["processes"] == records[0]["devices"] == count
    fits = [r for r in records if r["record"] == "case" and f"data={count}" in r["group"]]
    other = [r for r in records if r["record"] == "case" and f"data={6 - count}" in r["group"]]
    assert [case["skipped"] for case in fits] == [None, "numpy_savez runs in one process only"]
    assert all("devices" in case["skipped"] for case in other)
    runs = [r for r in records if r["record"] == "run" and not r["skipped"]]
    assert len(runs) == 2
    for run in runs:
        assert run["error"] is None and len(run["hosts"]) == count
        slowest = max(host["save"]["0_basics/time_s"][0] for host in run["hosts"])
        assert run["values"]["save"]["0_basics/time_s"] == [slowest]
        written = "5_inventory/save_total_gb"
        each = [host["save"][written][0] for host in run["hosts"]]
        assert all(each) and run["values"]["save"][written] == [max(each)]
    hosts = {path.parent.name for path in (tmp_path / "out/tensorboard").rglob("events.*")}
    assert {f"host_{index}" for index in range(count)} <= hosts


SMALL = {
    "every_step.py": "--mib 4 --steps 4 --every 2 --repeats 1 --batch 8 --tries 1",
    "gpu_snapshot.py": "--mib 8 --leaves 4 --rounds 1 --steps 2 --width 64 --step-secs 0.01 --lead-secs 0.02",
    "latencies.py": "--rounds 1 --steps 20 --leaves 50",
    "memory.py": "--gib 0.01 --leaf-mib 1 --only save,load",
    "publishing.py": "--mb 2 --rounds 1 --rates 3e-6",
    "restart.py": "--gib 0.01 --leaf-mib 1 --repeats 1",
    "stores.py": "--rounds 1 --sizes",
}
_MORE = {"stores.py": ["4 x 64 KiB"]}  # may have spaces


def test_every_script_is_run() -> None:
    scripts = {path.name for path in BENCHMARKS.glob("*.py")}
    assert scripts - {"shared.py"} == set(SMALL)


@pytest.mark.parametrize("script", SMALL)
def test_the_script_runs(script: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *SMALL[script].split(), *_MORE.get(script, [])],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip()
