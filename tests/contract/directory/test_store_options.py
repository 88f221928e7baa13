"""``Options(storage_options=)`` says how to reach a bucket, over what the environment says."""

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
