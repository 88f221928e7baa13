"""`ckpt ls`, `show`, `verify` and the others that look; and how names stand in their lines."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.faults.crafted.signed import read_record, write_record
from tests.support.command_line import LOADED, leave_unfinished, make_call, start  # noqa: F401 (fixture)
from tests.support.damage import turn_a_bit
from tests.support.refusals import refuse

pytest.importorskip("typer")


def save_run(directory: Path, steps: tuple[int, ...] = (1, 2), **arguments: Any) -> None:
    with ckpt.Checkpointer(directory, asynchronous=False) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"w": np.arange(1000.0) + step}, **arguments)


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_has_no_numbers_that_json_lacks(call, tmp_path):
    metrics = {"loss": float("nan"), "best": float("inf"), "least": -float("inf"), "n": 1.5}
    save_run(tmp_path / "run", (1,), metrics=metrics, metadata={"rate": [float("nan")]})
    expected = {"loss": "NaN", "best": "Infinity", "least": "-Infinity", "n": 1.5}
    _, out, _ = call("ls", tmp_path / "run", "--json")
    assert strict(out)["steps"][0]["metrics"] == expected
    _, out, _ = call("show", tmp_path / "run/1", "--json")
    assert strict(out)["metrics"] == expected and strict(out)["metadata"] == {"rate": ["NaN"]}
    assert float(expected["least"]) == -float("inf")  # Python, for one, reads them back


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_file_and_a_foreign_folder_are_called_so(call, tmp_path, command):
    np.savez(tmp_path / "weights.npz", w=np.ones(3))
    (tmp_path / "notes").mkdir()
    for name in "abcdefg":
        (tmp_path / "notes" / f"{name}.txt").write_text("hello")
    (tmp_path / "plain").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name, said in (
        (
            "weights.npz",
            "a file of numpy, and a checkpoint is a directory: make a checkpoint of it with `ckpt import",
        ),
        ("plain", "it is a file, and a checkpoint is a directory"),
        ("notes", "a.txt, b.txt, c.txt, d.txt, e.txt and 2 more, and nothing that ckpt or Orbax"),
        ("empty", "it is empty, or its save never finished"),
    ):
        code, _, err = call(command, tmp_path / name)
        assert code == 2 and said in err, (name, err)
        assert ("empty" in err) == (name == "empty")
    code, _, err = call("ls", tmp_path / "plain")
    assert code == 2 and "a file, not a directory" in err


def test_text_that_the_terminal_lacks_is_spelled(tmp_path):
    save_run(tmp_path / "läufe", (1,), metadata={"note": "größer 模型"})
    for arguments in (("show", tmp_path / "läufe/1"), ("show", tmp_path / "läufe/7")):
        done = start(*arguments, text=False, PYTHONIOENCODING="ascii")
        assert b"Traceback" not in done.stderr, done.stderr
        assert done.returncode == (2 if arguments[1].name == "7" else 0)
        assert rb"l\xe4ufe" in done.stdout + done.stderr


def test_verify_of_a_run_checks_every_step(call, tmp_path):
    save_run(tmp_path / "run", (1, 2, 3))
    code, out, _ = call("verify", tmp_path / "run")
    assert code == 0 and out.count("ok: ") == 4 and "ok: 3 of 3 steps ok, " in out
    turn_a_bit(tmp_path / "run/2")
    code, out, _ = call("verify", tmp_path / "run")
    assert (
        code == 1
        and "not ok: 2 of 3 steps ok, 1 damaged, " in out
        and f"not ok: {tmp_path}/run/2\n" in out
    )
    code, out, _ = call("verify", tmp_path / "run", "--json")
    reported = strict(out)
    assert code == 1 and reported["ok"] is False
    found = [(row["step"], row["ok"]) for row in reported["steps"]]
    assert found == [(1, True), (2, False), (3, True)]


def test_show_of_a_run_describes_it(call, tmp_path):
    with ckpt.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        checkpointer.write_run_metadata({"width": 8})
        checkpointer.save(4, {"w": np.ones(3)}, metrics={"loss": 0.5})
    code, out, _ = call("show", tmp_path / "run")
    assert code == 0 and "loss 0.5" in out and "'width': 8" in out
    code, out, _ = call("show", tmp_path / "run", "--json")
    reported = strict(out)
    assert reported["run_metadata"] == {"width": 8} and [
        row["step"] for row in reported["steps"]
    ] == [4]


def test_damage_has_a_line_of_its_own(call, tmp_path):
    save_run(tmp_path / "run", (1, 2))
    record = tmp_path / "run/2/ckpt.json"
    record.write_bytes(record.read_bytes().replace(b"w", b"v"))
    code, out, _ = call("ls", tmp_path / "run")
    (row,) = (line for line in out.splitlines() if "see below" in line)
    assert code == 1 and row.index("damaged") > row.index("iB")  # not in the column of dates
    assert f"damaged: step 2: {tmp_path}/run/2" in out
    code, out, _ = call("ls", tmp_path / "run", "--json")
    problems = [row["problem"] for row in strict(out)["steps"]]
    assert code == 1 and problems[0] is None and problems[1]


def test_ls_names_where_the_steps_are(call, tmp_path):
    save_run(tmp_path / "exp/seed0/checkpoints", (1,))
    code, out, _ = call("ls", tmp_path / "exp/seed0")
    assert code == 0 and f"ckpt ls {tmp_path}/exp/seed0/checkpoints\n" in out
    code, out, _ = call("ls", tmp_path / "exp")
    assert code == 0 and f"there are some in {tmp_path}/exp/seed0/checkpoints" in out


def test_ls_reports_bytes_on_disk_and_counts_shared_files_once(call, tmp_path):
    frozen = jnp.arange(2**20, dtype=jnp.float32)
    with ckpt.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, frozen=frozen, step={"n": step})
    reported = strict(call("ls", tmp_path / "run", "--json")[1])
    each = [row["disk_bytes"] for row in reported["steps"]]
    assert all(2**22 < count < 2**22 + 2**17 for count in each)
    assert 2**22 < reported["disk_bytes"] < 2**22 + 2**18  # both steps have the same file
    assert "4.0 MiB on disk together" in call("ls", tmp_path / "run")[1]


def test_ls_ends_with_what_is_unfinished_and_who_writes(call, tmp_path):
    run = tmp_path / "run"
    checkpointer = ckpt.Checkpointer(run, asynchronous=False)
    checkpointer.save(1, {"w": np.ones(3)})
    killed = leave_unfinished(run / "best_7")
    elsewhere = run / ".ckpt-tmp.9.00000000-17-1.19581e27de7ced000a1b2c3d"
    for path in (elsewhere, run / "damaged/5", run / "retired/9", run / "4.orbax-checkpoint-tmp"):
        path.mkdir(parents=True)
    for odd in (".ckpt-tmp.", ".ckpt-tmp.x", ".ckpt-old.y", ".ckpt-kept.1.2.3", ".ckpt-tmp...."):
        (run / odd).mkdir()
    before = sorted(os.listdir(run))
    _, out, _ = call("ls", run)
    last = out.splitlines()[-1]
    assert "unfinished: " in last and f"best_7 (process {killed}, which has ended, since" in last
    assert "9 (process 17 of another machine, since" in last and "4 (Orbax, since" in last
    assert "damaged and set aside: damaged/5" in last
    assert "left behind by a restore of an older step: retired/9" in last
    assert f"being written to by: process {os.getpid()} on " in last
    assert last.partition("being written to by")[2].count("since") == 1
    kinds = [entry["kind"] for entry in strict(call("ls", run, "--json")[1])["beside"]]
    assert [kinds.count(kind) for kind in ("set aside", "retired", "writer")] == [1, 1, 1]
    assert sorted(os.listdir(run)) == before  # looking has taken nothing from anybody
    checkpointer.close()
    assert "being written" not in call("ls", run)[1]


def test_a_checkpoint_is_no_run(call, tmp_path):
    ckpt.save(tmp_path / "one", items={"7": {"w": np.ones(3)}})
    code, out, _ = call("ls", tmp_path / "one")
    assert code == 0 and f"it is a checkpoint itself: ckpt show {tmp_path}/one" in out
    assert "7: 1 leaf" in call("show", tmp_path / "one")[1]


def test_what_orbax_wrote_is_not_verified_and_not_damaged(call, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    code, out, _ = call("verify", tmp_path / "run")
    assert code == 1 and out.startswith(f"not verified: {tmp_path}/run/3\n")
    assert "not verified: 0 of 1 step ok, 1 without checksums, " in out and "damaged" not in out
    report = ckpt.verify(tmp_path / "run/3")
    assert not report.ok and not report.has_checksums
    ckpt.save(tmp_path / "run/4", {"w": jnp.ones(3)})
    turn_a_bit(tmp_path / "run/4")
    code, out, _ = call("verify", tmp_path / "run")
    assert code == 1 and "\nnot ok: 0 of 2 steps ok, 1 damaged, 1 without checksums, " in out


def test_a_time_of_orbax_may_be_any_number(call, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    metadata = tmp_path / "run/3/_CHECKPOINT_METADATA"
    described = json.loads(metadata.read_text())
    for impossible in (10**400, 2**70, -1, True, "1"):
        described["commit_timestamp_nsecs"] = described["init_timestamp_nsecs"] = impossible
        metadata.write_text(json.dumps(described))
        code, _, err = call("ls", tmp_path / "run")
        assert code == 0, err


def test_folders_named_as_steps_that_hold_nothing(tmp_path, call):
    save_run(tmp_path / "run", (1, 2, 10))
    (tmp_path / "run/9").mkdir()
    code, out, _ = call("ls", tmp_path / "run")
    assert code == 0 and "no checkpoint in 9" in out
    assert json.loads(call("ls", tmp_path / "run", "--json")[1])["without_checkpoint"] == [9]
    code, _, err = call("show", tmp_path / "run/99")
    assert code != 0 and "beside it are 1, 2, 10" in err
    with pytest.raises(ckpt.CheckpointNotFound, match="beside it are 1, 2, 10"):
        ckpt.load(tmp_path / "run/9999")
    (tmp_path / "run/9").rmdir()
    assert "no checkpoint" not in call("ls", tmp_path / "run")[1]


def test_stats_of_a_run_say_which_step_it_is(call, tmp_path):
    for step in (3, 12):
        ckpt.save(tmp_path / "run" / str(step), {"w": np.ones(3)})
    assert call("stats", tmp_path / "run")[1].startswith(f"{tmp_path}/run/12, the newest step\n")
    assert "newest" not in call("stats", tmp_path / "run" / "3")[1]


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


def test_ls(call, steps):
    code, out, _ = call("ls", steps)
    assert code == 0
    rows = [line for line in out.splitlines() if "model, opt" in line]
    assert len(rows) == 3 and "loss 0.5" in rows[1] and "16.1 KiB" in rows[1]
    code, out, _ = call("ls", steps, "--json")
    reported = json.loads(out)
    assert code == 0 and [row["step"] for row in reported["steps"]] == [1, 2, 10]
    assert reported["steps"][0]["items"]["opt"] == {"form": "tree", "leaves": 9, "array_bytes": 54}


def test_ls_of_what_has_no_steps(call, tmp_path):
    code, _, err = call("ls", tmp_path / "nothing")
    assert code == 2 and "no such directory" in err
    assert call("ls", tmp_path)[:2] == (0, f"{tmp_path}: no steps\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", [("ls",), ("ls", "--local"), ("report",)])
def test_a_directory_that_cannot_be_looked_at(call, steps, monkeypatch, command):
    refuse(monkeypatch, steps, calls=("stat", "lstat"), below=False)
    code, _, err = call(*command, steps)
    assert code == 2 and "Permission denied" in err and "no such directory" not in err


def test_show(call, steps):
    code, out, _ = call("show", steps / "10")
    assert code == 0
    _, first, *items = out.splitlines()
    assert first.startswith("step 10, saved 20") and ", 16.1 KiB of arrays, " in first
    assert items[:2] == ["model: 2 leaves, 16.0 KiB", "opt: 9 leaves, 54 B"]
    assert "and 4 more: --leaf shows all" in out and "[bold]x" in out and "loss 0.1" in out
    files = "manifest.ocdbt ocdbt.process_0/d/ _METADATA _sharding array_metadatas"
    assert all(name in out for name in [*files.split(), "commit_success.txt", "ckpt.json"])
    assert "unknown to ckpt" not in out
    (steps / "10/left.over").write_text("")
    assert "unknown to ckpt" in call("show", steps / "10")[1]
    (steps / "10/left.over").unlink()
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


def test_show_of_what_orbax_wrote(call, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint").v1
    ocp.save(str(tmp_path / "one"), {"w": jax.numpy.ones(3)})
    code, out, _ = call("show", tmp_path / "one")
    assert code == 0 and "written by Orbax, without checksums" in out
    assert "unknown to ckpt" not in out
    code, out, _ = call("verify", tmp_path / "one")
    assert code == 1 and "nothing can be verified" in out


def test_verify(call, steps, tmp_path):
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


def test_verify_a_run_of_which_a_step_cannot_be_read(call, steps, monkeypatch):
    refuse(monkeypatch, steps / "2", calls=("open",))
    code, out, _ = call("verify", steps)
    assert code == 1 and "not read: step 2: " in out and "2 of 3 steps ok, 1 not read" in out
    code, out, _ = call("verify", steps, "--json")
    reported = json.loads(out)
    assert code == 1 and not reported["ok"] and [*reported["unread"]] == ["2"]
    assert [row["ok"] for row in reported["steps"]] == [True, True]


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("ls",), ("ls", "a", "--jsn"), ("bench", "run", "x.yaml")]
)
def test_a_wrong_call_is_reported_and_exits_with_2(call, arguments):
    code, _, err = call(*arguments)
    assert code == 2 and err and "Traceback" not in err


def test_help_imports_nothing_heavy(run_python):
    code, loaded = run_python(LOADED, "--help", "+", "--version", "+", "bench", "run", "--help")
    assert code == 0
    assert set(loaded) & {"jax", "numpy", "tensorstore", "orbax", "torch", "yaml"} == set()


def test_without_typer_one_line_says_what_to_install(run_python):
    code = (
        "import json, sys\nsys.modules['typer'] = None\nfrom ckpt_core.cli import main\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    print(json.dumps(str(ended.code)))"
    )
    assert run_python(code) == ("ckpt: the command line needs typer: pip install 'ckpt-core[cli]'")


FORGED = "ok: /other: 7 GiB checked in 1 s"
NAMES = [f"x{end}{FORGED}" for end in ("\n", "\r", "\r\n", "\u2028", "\x85", "\x0b", "\x0c")]


def _save(path: Path, number: int) -> None:
    state = {name: np.full(100, number, np.float32) for name in NAMES}
    ckpt.save(path, state, metadata={NAMES[0]: NAMES[1]})


def _check(out: str, err: str, expected: bool = True) -> None:
    for text in (out, err):
        for line in text.splitlines():
            assert not line.strip().startswith(("ok: /other", "7 GiB")), text
    assert not expected or "7 GiB checked" in out + err, "the name is not printed at all"


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "A", "--leaf"],
        ["show", "A"],
        ["diff", "A", "B"],
        ["verify", "A"],
        ["stats", "A"],
        ["ls", "RUN"],
        ["export", "A", "OUT", "--to", "safetensors"],
        ["cp", "A", "B"],
    ],
    ids=lambda arguments: arguments[0] + str(len(arguments)),
)
def test_no_name_begins_a_line(call, tmp_path, arguments):
    _save(tmp_path / "A", 1)
    _save(tmp_path / "B", 2)
    data = next(file for file in (tmp_path / "A").rglob("d/*") if file.stat().st_size > 300)
    if arguments[0] == "verify":
        data.write_bytes(data.read_bytes().replace(b"\0\0\x80\x3f", b"\1\0\x80\x3f"))
    with ckpt.Checkpointer(tmp_path / "RUN", asynchronous=False) as checkpointer:
        checkpointer.save(0, {"w": np.ones(3)}, metrics={NAMES[0]: 1.0})
    places = {name: str(tmp_path / name) for name in ("A", "B", "RUN", "OUT")}
    _, out, err = call(*[places.get(word, word) for word in arguments])
    _check(out, err, expected=arguments[0] not in ("export", "cp"))


def test_marks_that_steer_a_terminal_or_turn_text_are_spelled_out(call, tmp_path):
    marks = "\x1b\x07\r\u061c\u200e\u200f\u202e\u2066"
    name = f"w\x1b]0;title\x07\x1b[2J{marks}eman"
    a, b = tmp_path / "a", tmp_path / "b"
    for path, value in ((a, 1), (b, 2)):
        ckpt.save(path, {name: np.full(2, value)}, metadata={name: name})
    only = ["stats", a, "--only", name + "x"]
    for command in (["show", a, "--leaf"], ["stats", a], ["diff", a, b], only):
        _, out, err = call(*command)
        assert "title" in out + err and "\\u200e" in out + err
        assert not set(marks) & set(out + err)


def test_a_newer_step_is_listed_as_newer(call, tmp_path):
    with ckpt.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        for step in range(2):
            checkpointer.save(step, {"w": np.ones(3)})
    record: Any = read_record(tmp_path / "1")
    record["format_version"] = 99
    write_record(tmp_path / "1", record)
    _, out, _ = call("ls", tmp_path)
    assert "newer: step 1" in out and "upgrade ckpt" in out and "damaged" not in out
    _, out, _ = call("rm", tmp_path / "1")
    assert "cannot be read" in out and "upgrade ckpt" in out and "damaged" not in out
