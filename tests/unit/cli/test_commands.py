"""The command line as a user meets it: what it prints, what a script reads, how it exits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.cli._anatomy import anatomy, purpose_of
from ckpt_core.cli._spawn import _without_processes
from ckpt_core.cli._text import size
from tests.support.children import with_devices
from tests.support.command_line import LOADED, make_call, start  # noqa: F401 (fixture)
from tests.support.damage import turn_a_bit
from tests.support.refusals import refuse

pytest.importorskip("typer")


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """What the rest of a busy machine has to write is none of these tests' business."""
    monkeypatch.setattr(os, "sync", lambda: None)


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("cli") / "run"
    with ckpt.Checkpointer(directory, asynchronous=False) as checkpointer:
        for step in (1, 2, 10):
            checkpointer.save(
                step,
                model={"w": jax.numpy.ones((64, 64)), "name": "a"},
                opt=[jax.numpy.zeros(3, "bfloat16") for _ in range(9)],
                metrics={"loss": 1 / step},
                metadata={"note": "[bold]x"},
            )
    return directory


def test_ls(call, steps: Path):
    code, out, _ = call("ls", steps)
    assert code == 0
    rows = [line for line in out.splitlines() if "model, opt" in line]
    assert len(rows) == 3 and "loss 0.5" in rows[1] and "16.1 KiB" in rows[1]
    code, out, _ = call("ls", steps, "--json")
    reported = json.loads(out)
    assert code == 0 and [row["step"] for row in reported["steps"]] == [1, 2, 10]
    assert reported["steps"][0]["items"]["opt"] == {"form": "tree", "leaves": 9, "array_bytes": 54}


def test_ls_of_what_has_no_steps(call, tmp_path: Path):
    code, _, err = call("ls", tmp_path / "nothing")
    assert code == 2 and "no such directory" in err
    assert call("ls", tmp_path)[:2] == (0, f"{tmp_path}: no steps\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", [("ls",), ("ls", "--local"), ("report",)])
def test_a_directory_that_cannot_be_looked_at(
    call, steps: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
):
    refuse(monkeypatch, steps, calls=("stat", "lstat"), below=False)
    code, _, err = call(*command, steps)
    assert code == 2 and "Permission denied" in err and "no such directory" not in err


def test_show(call, steps: Path):
    code, out, _ = call("show", steps / "10")
    assert code == 0
    assert "model: 2 leaves, 16.0 KiB" in out and "opt: 9 leaves, 54 B" in out
    assert "and 4 more: --leaf shows all" in out and "[bold]x" in out and "loss 0.1" in out
    for name in (
        "manifest.ocdbt",
        "ocdbt.process_0/d/",
        "_METADATA",
        "_sharding",
        "array_metadatas",
        "commit_success.txt",
        "ckpt.json",
        "checksums",
    ):
        assert name in out
    assert "unknown to ckpt" not in out
    code, out, _ = call("show", steps / "10", "--leaf")
    assert code == 0 and "more:" not in out and out.count("bfloat16") == 9
    code, out, _ = call("show", steps / "10", "--json")
    reported = json.loads(out)
    assert (
        code == 0
        and len(reported["leaves"]["opt"]) == 9
        and reported["metadata"] == {"note": "[bold]x"}
    )
    found = {name for _, _, names in os.walk(steps / "10") for name in names}
    assert sum(part["files"] for part in reported["files"]) >= len(found)
    assert call("show", steps / "11")[0] == 2


def test_show_of_what_orbax_wrote(call, tmp_path: Path):
    ocp = pytest.importorskip("orbax.checkpoint").v1
    ocp.save(str(tmp_path / "one"), {"w": jax.numpy.ones(3)})
    code, out, _ = call("show", tmp_path / "one")
    assert code == 0 and "written by Orbax, without checksums" in out
    assert [part.name for part in anatomy(str(tmp_path / "one")) if "unknown" in part.purpose] == []
    code, out, _ = call("verify", tmp_path / "one")
    assert code == 1 and "nothing can be verified" in out


def test_what_is_not_ckpts_in_the_directory_is_called_so():
    assert purpose_of("model/left.over") == "unknown to ckpt"


def test_verify(call, steps: Path, tmp_path: Path):
    code, out, _ = call("verify", steps / "1")
    assert code == 0 and out.startswith("ok: ")
    path = tmp_path / "one"
    ckpt.save(path, {"w": np.arange(1000.0)})
    data = turn_a_bit(path)
    code, out, _ = call("verify", path)
    assert code == 1 and "not ok" in out and data.name in out
    code, out, _ = call("verify", path, "--json")
    reported = json.loads(out)
    assert code == 1 and reported["ok"] is False and reported["problems"][0]["leaf"] == "w"
    code, _, err = call("verify", tmp_path / "nothing")
    assert code == 2 and err.startswith("ckpt: no checkpoint at")


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("ls",), ("ls", "a", "--jsn"), ("bench", "run", "x.yaml")]
)
def test_a_wrong_call_is_reported_and_exits_with_2(call, arguments):
    code, _, err = call(*arguments)
    assert code == 2 and err and "Traceback" not in err


def test_sizes_for_people():
    words = [size(count) for count in (0, 1023, 1024, 10 * 1024**2, 1000 * 1024**2, 5.5 * 1024**3)]
    assert words == ["0 B", "1023 B", "1.0 KiB", "10.0 MiB", "1000 MiB", "5.5 GiB"]


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("bench", "run", "--help")])
def test_help_imports_nothing_heavy(run_python, arguments):
    code, loaded = run_python(LOADED, *arguments)
    assert code == 0
    assert set(loaded) & {"jax", "numpy", "tensorstore", "orbax", "torch", "yaml"} == set()


def test_without_typer_one_line_says_what_to_install(run_python):
    code = (
        "import json, sys\nsys.modules['typer'] = None\nfrom ckpt_core.cli import main\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    print(json.dumps(str(ended.code)))"
    )
    assert run_python(code) == ("ckpt: the command line needs typer: pip install 'ckpt-core[cli]'")


# ---------------------------------------------------------------------------------- ckpt bench run

SUITE = """
suite_name: tiny
num_repeats: 2
checkpoint_config: {spec: {w: {dtype: float32, shape: [64, 64]}}}
benchmarks:
- generator: SaveLoad
  options: {library: [ckpt, LIBRARY], async_enabled: false}
"""


@pytest.fixture
def suite(tmp_path: Path):
    def write(text: str = SUITE.replace("LIBRARY", "floor")) -> Path:
        path = tmp_path / "suite.yaml"
        path.write_text(text)
        return path

    return write


def test_bench_run_writes_everything(call, suite, tmp_path: Path):
    out = tmp_path / "out"
    code, text, err = call(
        "bench", "run", suite(), "-o", out, "--baseline-capture", tmp_path / "base"
    )
    assert code == 0, err
    assert "floor" in text and "save" in text and "counted 1: done" in err
    (baseline,) = (tmp_path / "base").iterdir()
    assert (out / "report.html").is_file() and (out / "results.jsonl").is_file()
    assert list((out / "tensorboard").rglob("events.out.tfevents.*"))
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [r["record"] for r in records] == ["environment", *["run"] * 6, *["case"] * 2, "end"]

    again = ("bench", "run", suite(), "-o", tmp_path / "again", "--json")
    code, text, err = call(*again, "--baseline", baseline, "--threshold", "1000")
    assert code == 0 and json.loads(text.splitlines()[-1])["record"] == "end" and err == ""

    content = json.loads(baseline.read_text())
    for entry in content["benchmarks"].values():
        for summary in entry["metrics"].values():
            summary["median"] /= 1000
            summary["values"] = [value / 1000 for value in summary["values"]]
    baseline.write_text(json.dumps(content))
    code, text, _ = call(*again[:-1], "--baseline", baseline)
    assert code == 3 and "WORSE" in text


def test_a_failed_benchmark_exits_with_1_and_keeps_the_rest(call, suite, tmp_path, monkeypatch):
    from ckpt_core.bench.libraries._files import Floor

    monkeypatch.setattr(Floor, "load", lambda *_: 1 / 0)
    code, text, _ = call("bench", "run", suite(), "-o", tmp_path / "out")
    assert code == 1 and "ZeroDivisionError" in text
    statistics = [
        entry["statistics"]
        for line in (tmp_path / "out/results.jsonl").read_text().splitlines()
        if (entry := json.loads(line))["record"] == "case"
    ]
    assert set(statistics[0]) == {"save", "load", "checkpoint"} and statistics[1] == {}


def test_nothing_that_could_run_is_a_failure(call, suite, tmp_path: Path):
    text = SUITE.replace("[ckpt, LIBRARY]", "floor").replace("false", "true")
    code, out, _ = call("bench", "run", suite(text), "-o", tmp_path / "out")
    assert code == 1 and "floor saves in the foreground only" in out


def test_ctrl_c_writes_what_there_is_and_exits_with_130(call, suite, tmp_path, monkeypatch):
    from ckpt_core.bench.libraries._files import Floor

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Floor, "load", interrupt)
    text = SUITE.replace("LIBRARY", "floor") + "order: sequential\n"
    code, out, _ = call("bench", "run", suite(text), "-o", tmp_path / "out")
    assert code == 130 and "interrupted" in out
    assert "interrupted" in (tmp_path / "out/report.html").read_text()
    records = (tmp_path / "out/results.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["interrupted"] is True
    assert sum(json.loads(line)["record"] == "run" for line in records) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("suite_name: s\nbenchmarks: [{generator: SaveLod}]", "suite.yaml:2: "),
        ("suite_nam: s", "did you mean 'suite_name'?"),
        (SUITE + "baseline_path: /nowhere/at/all.json\n", "no such baseline"),
    ],
)
def test_a_wrong_suite_is_one_message_and_exits_with_2(call, suite, tmp_path, text, expected):
    code, out, err = call("bench", "run", suite(text), "-o", tmp_path / "out")
    assert code == 2 and out == "" and expected in err


def test_processes_are_passed_in_the_environment_and_not_again():
    arguments = ["bench", "run", "--processes", "2", "s.yaml", "--processes=3", "-o", "x"]
    assert _without_processes(arguments) == ["bench", "run", "s.yaml", "-o", "x"]


@pytest.mark.slow
def test_steady_memory_starts_the_process_anew_and_hlo_is_dumped(suite, tmp_path: Path):
    text = f"steady_memory: true\n{SUITE.replace('[ckpt, LIBRARY]', 'ckpt')}".replace(
        "SaveLoad", "CheckpointerLoop"
    )
    done = start("bench", "run", suite(text), "-o", tmp_path / "out", "--enable-hlo-dump")
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


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_same_suite_in_several_processes(suite, tmp_path: Path, count: int):
    done = start(
        "bench", "run", suite(SHARDED), "-o", tmp_path / "out", "--processes", count, "--json",
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
        written = "6_tensorstore/kvstore_file_bytes_written_diff"
        each = [host["save"][written][0] for host in run["hosts"]]
        assert all(each) and run["values"]["save"][written] == [sum(each)]
    hosts = {path.parent.name for path in (tmp_path / "out/tensorboard").rglob("events.*")}
    assert {f"host_{index}" for index in range(count)} <= hosts


@pytest.mark.slow
def test_a_failure_in_one_process_is_one_of_the_run(suite, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import jax\nfrom ckpt_core import bench\n"
        "class Mine(bench.BenchmarksGenerator):\n"
        "    def test_fn(self, context):\n"
        "        if jax.process_index() == 1: raise ValueError('planted')\n"
        "        return bench.TestResult(metrics=bench.Metrics())\n"
    )
    path = suite("suite_name: s\nwarmup_repeats: 0\nbenchmarks: [{generator: mine.Mine}]")
    done = start(
        "bench", "run", path, "-o", tmp_path / "out", "--processes", 2,
        XLA_FLAGS="--xla_force_host_platform_device_count=1",
        PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
    )  # fmt: skip
    assert done.returncode == 1 and "process 1: ValueError: planted" in done.stdout, done.stderr


def test_variables_of_a_run_go_together():
    from ckpt_core import _processes

    assert _processes.join_from_environment({}) is False
    with pytest.raises(ValueError, match="missing: JAX_NUM_PROCESSES"):
        _processes.join_from_environment(
            {"JAX_COORDINATOR_ADDRESS": "localhost", "JAX_PROCESS_ID": "0"}
        )


@pytest.mark.slow
def test_a_real_ctrl_c_in_two_processes(suite, tmp_path: Path):
    """The terminal signals parent and children; what ran is complete on the disk."""
    text = SHARDED.replace("num_repeats: 2", "num_repeats: 500")
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "ckpt_core.cli", "bench", "run", str(suite(text))),
            *("-o", str(tmp_path / "out"), "--processes", "2"),
        ],
        env=with_devices(1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        seen = 0
        for line in process.stderr:
            seen += "done" in line
            if seen == 3:
                break
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=240)  # of a busy machine
    assert process.returncode == 130
    records = [
        json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()
    ]
    assert sum(record["record"] == "run" for record in records) >= 3
    # one that was caught waiting for the other in the middle of a save writes no more than that
    if records[-1]["record"] == "end":
        assert records[-1]["interrupted"] is True
        assert '"title": "save"' in (tmp_path / "out/report.html").read_text()
