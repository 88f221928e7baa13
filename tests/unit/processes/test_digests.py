"""Process 0 compares what the others say they wrote with what it sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckpt_core as ckpt
from ckpt_core._directory import PosixBackend
from ckpt_core._save.digests import digest_all


def test_what_process_0_does_not_see_is_no_checkpoint(tmp_path: Path) -> None:
    attempt = PosixBackend().begin(str(tmp_path / "one"), overwrite=False, durable=False, token="t")
    attempt.write("state/a", b"1234")
    attempt.write("state/b", b"12")
    told = json.dumps([["state/a", 4, 7, 0]])
    found = digest_all(attempt, [], [told], {}, True, None)
    assert (found["state/a"].crc32, found["state/b"].size_bytes) == (7, 2)
    for size, name, text in ((5, "state/a", "sees 4 bytes"), (4, "state/c", "does not see it")):
        wrong = json.dumps([[name, size, 7, 0]])
        with pytest.raises(ckpt.CheckpointError, match=text):
            digest_all(attempt, [], [told, wrong], {}, True, None)
    attempt.abort()
