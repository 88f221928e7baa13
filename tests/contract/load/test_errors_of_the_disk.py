"""An error of the system while a data file is read or written says which file; what a signal handler raises stays as it is."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.damage import failing_reads


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ckpt.save(tmp_path / "one", {"w": np.arange(20 << 20, dtype=np.float32)})
    return tmp_path / "one"


@pytest.mark.linux("/proc/self/fd")
@pytest.mark.parametrize("of", ["preadv", "pread"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
def test_a_read_names_the_file(saved, monkeypatch, number, of):
    failing_reads(monkeypatch, saved, of, number)
    with pytest.raises(OSError, match=str(saved)) as caught:
        ckpt.load(saved)
    assert caught.value.errno == number and not isinstance(caught.value, ckpt.CheckpointError)
    named = re.search(r"'(/[^']*/d/\w+)'", str(caught.value))
    assert named and os.path.isfile(named[1]), str(caught.value)


@pytest.mark.linux("O_DIRECT")
def test_a_read_past_the_page_cache_names_it_too(saved, monkeypatch):
    failing_reads(monkeypatch, saved)
    with pytest.raises(OSError, match=rf"error: '{saved}/.*/d/"):
        ckpt.load(saved, options=ckpt.Options(page_cache=False))


@pytest.mark.linux("/proc/self/fd")
@pytest.mark.parametrize("name", ["ckpt.json", "state/_strings.json", "state/checksums/process_0"])
def test_small_files_are_named_too(tmp_path, monkeypatch, name):
    path = tmp_path / "texts"
    ckpt.save(path, {"text": "some", "w": np.arange(9)})
    assert (path / name).is_file()
    names: dict[str, Any] = {"os": os, "end": f"/{name}", "real": os.read}
    code = """
def function(descriptor, size):
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith(end):
        raise OSError(5, os.strerror(5))
    return real(descriptor, size)
"""  # as from no file: what a file of these tests raises counts as raised by a signal handler
    exec(compile(code, "<injected>", "exec"), names)
    monkeypatch.setattr(os, "read", names["function"])
    with pytest.raises(OSError, match=f"'{path / name}'") as caught:
        ckpt.load(path)
    assert caught.value.errno == errno.EIO
