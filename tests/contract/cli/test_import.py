"""``ckpt import`` and ``ckpt export``, their formats, and looking at safetensors."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import ckpt_core as ckpt

pytest.importorskip("typer")


def test_there_and_back(call, tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.savez(tmp_path / "a.npz", **{"enc.w": values, "enc.b": np.zeros(2)})
    code, out, err = call(
        *("import", tmp_path / "a.npz", tmp_path / "a", "--split", ".", "--item", "model"),
        *("--rename", "enc=encoder", "--only", "*.w"),
    )
    assert (code, err) == (0, "")
    assert "1 leaf, 24 B" in out
    assert ckpt.load(tmp_path / "a")["model"]["encoder"]["w"].tolist() == values.tolist()
    code, out, _ = call("import", tmp_path / "a.npz", tmp_path / "a", "--json")
    assert code == 2
    code, out, _ = call("import", tmp_path / "a.npz", tmp_path / "a", "--json", "--overwrite")
    assert json.loads(out) == {"path": str(tmp_path / "a"), "leaves": 2, "bytes": 40}
    for file, more in (("b.npz", []), ("b.pt", []), ("b", ["--to", "npz"])):
        code, out, err = call("export", tmp_path / "a", tmp_path / file, "--json", *more)
        (reported,) = json.loads(out)["files"]
        assert reported == {"path": str(tmp_path / file), "bytes": (tmp_path / file).stat().st_size}
    with np.load(tmp_path / "b") as found:
        assert found["enc.w"].tolist() == values.tolist()
    code, _, err = call("export", tmp_path / "a", tmp_path / "b.npz")
    assert (code, "exists already" in err) == (2, True)


def test_rules_from_a_file(call, tmp_path):
    np.savez(tmp_path / "a.npz", w=np.arange(6.0).reshape(2, 3))
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([{"saved": "w", "wanted": "a/w", "transpose": [1, 0]}]))
    assert call("import", tmp_path / "a.npz", tmp_path / "a", "--rules", rules)[0] == 0
    assert ckpt.load(tmp_path / "a")["a"]["w"].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    "rules",
    [
        *('[{"saved":"a"}]', '{"saved":"a","wanted":"b"}', "[1]", "no json", "null"),
        *('[{"saved":"a{n}","wanted":"b"}]', "[" * 100_000),
    ],
)
@pytest.mark.parametrize("command", ["import", "export"])
def test_rules_that_are_none_are_reported_in_a_line(call, tmp_path, rules, command):
    np.savez(tmp_path / "a.npz", a=np.ones(2))
    ckpt.save(tmp_path / "one", {"a": np.ones(2)})
    (tmp_path / "rules.json").write_text(rules)
    source = tmp_path / ("a.npz" if command == "import" else "one")
    code, _, err = call(command, source, tmp_path / "out", "--rules", tmp_path / "rules.json")
    assert (code, "rules are a list in JSON" in err) == (2, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["import", "a.npz", "out", "--split", ""], "split= must be a text"),
        (["import", "a.npz", "out", "--item", "a/b"], "cannot be the name of an item"),
        (["import", "", "out"], "must not be empty"),
        (["import", "a.npz", ""], "must not be empty"),
        (["import", "https://host/a.npz", "out"], "local paths are supported"),
        (["show", ""], "must not be empty"),
        (["stats", "https://host/a"], "local paths are supported"),
        (["import", "pipe", "out"], "neither a file nor a folder"),
        (["import", "nothing.npz", "out"], "there is no such file"),
        (["import", "text", "out"], "begins with b'a text'"),
        (["import", "text", "out", "--from", "gguf"], "must be one of safetensors, npz"),
        (["import", "text", "out", "--from", "npz"], "damaged or cut short"),
        (["import", "text", "out", "--rename", "a"], "OLD=NEW"),
        (["import", "one", "out"], "ckpt cp"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_are_reported_in_a_line(
    call, tmp_path, monkeypatch, arguments, reported
):
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", a=np.ones(2))
    os.mkfifo("pipe")
    Path("text").write_text("a text")
    ckpt.save("one", {"a": 1})
    code, _, err = call(*arguments)
    assert (code, reported in err) == (2, True)
    assert sorted(os.listdir()) == ["a.npz", "one", "pipe", "text"]


def test_export(call, tmp_path):
    state = {"params": {"w": np.ones((2, 3), np.float32)}, "name": "text"}
    ckpt.save(tmp_path / "one", state)
    code, _, err = call("export", tmp_path / "one", tmp_path / "out")
    assert code == 2
    assert "no place for name (str)" in err
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([{"saved": "w.weight", "wanted": "params/w", "transpose": [1, 0]}]))
    arguments = ["--only", "params/**", "--rules", rules, "--to", "safetensors"]
    code, out, err = call("export", tmp_path / "one", tmp_path / "out", *arguments)
    assert (code, err) == (0, "")
    assert "model.safetensors" in out
    (found,) = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors").items()
    assert (found[0], found[1].shape) == ("w.weight", (3, 2))
    code, _, err = call("export", tmp_path / "one", tmp_path / "x", "--to", "gguf")
    assert (code, "only safetensors, torch" in err) == (2, True)


def test_show_and_verify_say_what_it_is(call, tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"a.w": np.ones((2, 3), np.float32)}, path, {"format": "np"})
    code, out, _ = call("show", path)
    assert code == 0
    assert "safetensors, without checksums" in out
    assert 'metadata: {"format": "np"}' in out
    assert "a.w" in out
    code, out, _ = call("show", path, "--json")
    reported = json.loads(out)
    assert reported["written_by"] == "safetensors"
    assert reported["leaves"]["state"][0]["shape"] == [2, 3]
    code, out, _ = call("verify", path)
    assert code == 1
    assert "a format without checksums" in out
