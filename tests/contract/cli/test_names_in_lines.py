"""What is named in a checkpoint never begins a line of its own: it could say anything of another one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.faults.crafted.signed import read_record, write_record

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
