"""Process 0 compares what the others say they wrote with what it sees."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core._format.packed import pack
from ckpt_core._save.write import Write, digest_of


@pytest.mark.parametrize("wrong", ["", "passed", "size", "file"])
def test_what_process_0_does_not_see_is_no_checkpoint(tmp_path, wrong):
    attempt = PosixBackend().begin(str(tmp_path / "one"), overwrite=False, durable=False, token="t")
    attempt.write("state/a", b"1234")
    name, size = "state/c" if wrong == "file" else "state/a", 5 if wrong == "size" else 4
    passed = pack({"": json.dumps([[name, size, 7, 0]]).encode()})
    attempt.write("ckpt.passed_1", passed)
    parts = ["", digest_of(passed)]
    write: Any = SimpleNamespace(files={}, passed=parts, _rows={}, items=[], attempt=attempt)
    write.passed[1] += "1" * (wrong == "passed")
    if wrong:
        with pytest.raises(ckpt.CheckpointError, match="do all processes see the same files"):
            Write._join(write)
    else:
        Write._join(write)
        assert write.files["state/a"].crc32 == 7 and not (tmp_path / "ckpt.passed_1").exists()
    attempt.abort()
