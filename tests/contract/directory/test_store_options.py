"""How a bucket is reached: ``Options(storage_options=)`` over the environment, and the credentials that AWS' own tools would take."""

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support.stores import BUCKET, tree


def test_every_call_takes_them(s3_url, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody there
    options = ckpt.Options(
        storage_options={"endpoint_url": s3_url, "region": "us-east-1"}, compression="zstd"
    )
    url = f"s3://{BUCKET}/storage-options"
    ckpt.save(f"{url}/a", tree(1), options=options)
    ckpt.save_async(f"{url}/b", tree(2), options=options).result()
    assert ckpt.load(f"{url}/a", options=options)["n"] == 1
    assert ckpt.load_async(f"{url}/b", options=options).result()["n"] == 2
    assert ckpt.restore(f"{url}/b", tree(0), options=options)["state"]["n"] == 2
    assert ckpt.inspect(f"{url}/a", options=options).items["state"].leaves
    assert ckpt.verify(f"{url}/b", options=options).ok
    with ckpt.Checkpointer(f"{url}/run", max_to_keep=1, options=options) as checkpointer:
        for step in range(3):
            checkpointer.save(step, tree(step))
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [2]
        assert checkpointer.restore_latest(tree(9)).state["n"] == 2
        assert np.array_equal(checkpointer.load(2)["w"], tree(2)["w"])


def test_the_project_that_pays_is_named_in_every_request(server):
    options = ckpt.Options(storage_options={"requester_pays": "project-7"})
    ckpt.save(f"{server.root}/a", tree(1), options=options)
    assert ckpt.load(f"{server.root}/a", options=options)["n"] == 1
    assert server.projects == {"project-7"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"endpont_url": "http://x"}, "takes endpoint_url, region"),
        ({"region": 7}, "region=7"),
        ({"anon": "yes"}, "anon='yes'"),
        ({"secret": "x"}, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile"),
        ({"secret": "x"}, "GOOGLE_APPLICATION_CREDENTIALS"),
    ],
)
def test_what_is_not_known_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        ckpt.Options(storage_options=given)


CREDENTIALS = """
[default]
aws_access_key_id = of-default
aws_secret_access_key = secret

[lab]
aws_access_key_id = of-lab
aws_secret_access_key = secret
"""


@pytest.fixture(name="keys_seen")
def make_keys_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The access keys of the requests to a server where there is nothing; the home directory is an empty one."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            found = re.search("Credential=([^/]+)/", self.headers.get("Authorization", ""))
            seen.append(found[1] if found else "")
            self.send_error(404)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "PROFILE", "DEFAULT_PROFILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    yield seen
    server.shutdown()
    thread.join(10)
    server.server_close()


def write_files(tmp_path: Path, credentials: str, config: str = "") -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(credentials)
    (tmp_path / ".aws" / "config").write_text(config)


def asked_with(seen: list[str], options: ckpt.Options | None = None) -> str:
    seen.clear()
    with pytest.raises((ckpt.CheckpointNotFound, OSError)):
        ckpt.load("s3://bucket/x", options=options)
    (found,) = {*seen}
    return found


def test_those_of_a_profile(keys_seen, tmp_path, monkeypatch):
    write_files(tmp_path, CREDENTIALS)
    assert asked_with(keys_seen) == "of-default"
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert asked_with(keys_seen) == "of-lab"
    monkeypatch.delenv("AWS_PROFILE")
    options = ckpt.Options(storage_options={"profile": "lab"})
    assert asked_with(keys_seen, options) == "of-lab"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert asked_with(keys_seen) == "of-environment"
    assert asked_with(keys_seen, options) == "of-lab"


def test_files_in_another_place(keys_seen, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").write_text(CREDENTIALS)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "elsewhere"))
    assert asked_with(keys_seen) == "of-default"


@pytest.mark.parametrize(
    "credentials",
    ["", "[lab]\naws_access_key_id = x\n", "no ini", "[default]\nregion = x\n", "\xff"],
)
def test_a_file_without_default_credentials_is_no_source(keys_seen, tmp_path, credentials):
    """The machine may have a role; asked is without any here."""
    write_files(tmp_path, credentials, "[default]\nregion = eu-west-1\n")
    assert asked_with(keys_seen) == ""


def test_a_profile_that_is_not_there_is_told(keys_seen, tmp_path, monkeypatch):
    write_files(tmp_path, CREDENTIALS)
    monkeypatch.setenv("AWS_PROFILE", "labb")
    with pytest.raises(PermissionError, match=r"s3://bucket/x.*credentials"):
        ckpt.save("s3://bucket/x", {"n": 1})
    assert keys_seen == []
