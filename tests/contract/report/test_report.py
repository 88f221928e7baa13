"""`ckpt report`: its data, what it refuses to let into HTML, and the page in a real browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.report import Request, as_json, page, read_report
from tests.contract.faults.crafted.signed import read_record, write_record
from tests.support.command_line import make_call  # noqa: F401 (fixture)
from tests.support.damage import turn_a_bit

pytest.importorskip("typer")


def in_browser(file: Path, folder: Path, width: int, script: str = "") -> tuple[str, str]:
    """The page as Chromium has drawn it, and what it wrote to its log."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine")
    copy = folder / f"copy{width}.html"
    copy.write_text(file.read_text().replace("</body>", f"<script>{script}</script></body>"))
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *("--disable-sync", "--enable-logging=stderr", "--v=0", f"--window-size={width},900"),
            *(f"--user-data-dir={folder}/profile{width}", "--virtual-time-budget=3000"),
            *("--dump-dom", copy.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.stdout, done.stderr


NASTY = "</script><script>document.title='stolen'</script>\u2028\"'&"


def save_run(directory: Path, tree: Any, steps: tuple[int, ...] = (1, 2)) -> None:
    with ckpt.Checkpointer(directory, asynchronous=False) as checkpointer:
        for step in steps:
            checkpointer.save(step, tree, metrics={"loss": 1.0 / step, "odd": float("nan")})


def test_the_data_of_a_run(tmp_path: Path):
    save_run(tmp_path / "run", {"a": np.ones((2, 3)), "e": np.ones((0, 3)), "t": "text"})
    (tmp_path / "run/9").mkdir()
    data = as_json(read_report(tmp_path / "run"))
    assert [step["step"] for step in data["steps"]] == [1, 2]
    assert data["structures"] == [((0, 3),)]  # both steps have it
    assert data["steps"][0]["array_bytes"] == 48 and data["steps"][0]["written_bytes"] > 48
    assert data["without_checkpoint"] == [9] and not data["steps"][0]["problem"]


def test_numbers_of_the_newest_steps(tmp_path: Path):
    tree = {"a": {"w": np.array([3.0, 4.0]), "b/c": np.array([np.nan, 1.0])}, "text": "x"}
    save_run(tmp_path / "run", tree | {"big": np.ones(2500)}, (1, 2, 3))
    data = as_json(read_report(tmp_path / "run", Request(stats=2)))
    assert [columns["step"] for columns in data["statistics"]] == [2, 3]
    columns = data["statistics"][1]
    paths = [read_report(tmp_path / "run").table.leaves[n].path for n in columns["leaf"]]
    norms = dict(zip(paths, columns["norm"], strict=True))
    assert norms == {"a/w": 5.0, "a/b~1c": 1.0, "big": 50.0}
    octaves = dict(zip(paths, columns["octaves"], strict=True))
    assert octaves == {"a/w": [1, 1, 0, 1, 0, 1], "a/b~1c": [0, 1, 0, 1], "big": [0, 1, 0, 2500]}
    assert dict(zip(paths, columns["nan"], strict=True)) == {"a/w": 0, "a/b~1c": 1, "big": 0}
    turn_a_bit(tmp_path / "run/3")
    reported = read_report(tmp_path / "run", Request(stats=1))
    assert as_json(read_report(tmp_path / "run"))["statistics"] == []
    assert as_json(reported)["statistics"] == [] and "cannot be read" in reported.notes[0]


def test_a_damaged_step_is_reported_and_is_the_exit_code(call, tmp_path: Path):
    save_run(tmp_path / "run", {"a": np.ones(3)})
    (tmp_path / "run/1/ckpt.json").write_text("{}")
    code, _, _ = call("report", tmp_path / "run", "-o", tmp_path / "r.html")
    assert code == 1 and "checksum does not match" in (tmp_path / "r.html").read_text()


def test_a_page_takes_the_place_of_pages_only(call: Any, tmp_path: Path):
    """Not of a part of the checkpoint, when arguments are mixed up."""
    ckpt.save(tmp_path / "one", {"a": np.ones(2)})
    (record,) = tmp_path.glob("one/ckpt.json")
    for output, reported in ((record, "is no page"), (tmp_path / "one", "is a directory")):
        code, _, err = call("report", tmp_path / "one", "-o", output)
        assert (code, reported in err) == (2, True)
    assert ckpt.load(tmp_path / "one")["a"].tolist() == [1, 1]
    for _ in range(2):
        assert call("report", tmp_path / "one", "-o", tmp_path / "a.html")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "one"]


def test_a_checkpoint_an_empty_directory_and_nothing(call, tmp_path: Path):
    ckpt.save(tmp_path / "one", {"a": np.ones(3)})
    (tmp_path / "empty").mkdir()
    assert not read_report(tmp_path / "one").is_run
    assert read_report(tmp_path / "empty").steps == ()
    assert call("report", tmp_path / "none", "-o", tmp_path / "r.html")[0] == 2


def test_the_page_in_a_browser(tmp_path: Path):
    tree = {f"layer{i}": {"w": np.ones((4, 4)), "b": np.ones(4)} for i in range(2500)}
    save_run(tmp_path / "run", tree | {NASTY: np.ones(2)})
    file = tmp_path / "r.html"
    file.write_text(page(as_json(read_report(tmp_path / "run", Request(stats=2)))))
    assert file.stat().st_size < 1.5 * 2**20
    script = (
        "const s=document.getElementById('search');s.value='layer77/ 4x4';"
        "s.dispatchEvent(new Event('input'));setTimeout(()=>{document.body.dataset.wide="
        "document.documentElement.scrollWidth>innerWidth},500)"
    )
    for width in (500, 1280):
        dom, log = in_browser(file, tmp_path, width, script)
        assert 'data-drawn="yes"' in dom, log
        assert "CONSOLE" not in log and "stolen</title>" not in dom
        assert 'id="found">1 leaf' in dom and 'data-wide="false"' in dom
        assert "<svg" in dom.partition('id="treemap"')[2][:2000]


@pytest.mark.parametrize(("verify", "state"), [(False, "not verified"), (True, "verified")])
def test_a_step_of_a_newer_format_is_reported_and_is_not_damaged(call, tmp_path, verify, state):
    save_run(tmp_path / "run", {"a": np.ones(3)})
    write_record(tmp_path / "run/1", read_record(tmp_path / "run/1") | {"format_version": 99})
    found = read_report(tmp_path / "run", Request(verify=verify))
    first, second = found.steps
    assert "upgrade ckpt" in str(first.problem) and second.problem is None
    assert not found.is_damaged and found.unread == 1
    states = [(step["unread"], step["state"]) for step in as_json(found)["steps"]]
    assert states == [(True, "not readable"), (False, state)]
    code, out, _ = call("report", tmp_path / "run", "-o", tmp_path / "r.html")
    assert code == 1 and "1 cannot be read" in out and "damaged" not in out
