"""Two real processes save into one object store together, and load from it together."""

import pytest

import ckpt_core as ckpt
from tests.contract.processes.test_two_processes import _PRELUDE
from tests.support.launch import launch, reports
from tests.support.stores import keys_at

SERVERS = pytest.mark.parametrize("store", ["gs", "s3"], indirect=True)


@SERVERS
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_two_processes_save_and_load_together(store, compression, tmp_path):
    pytest.importorskip("grain")
    code = f"""
import grain
url = {store!r}
options = ckpt.Options(timeout_secs=60, compression={compression!r})

def pipeline():
    return iter(grain.MapDataset.range(40)[index::2].to_iter_dataset())

batches = pipeline()
with ckpt.Checkpointer(url, max_to_keep=2, options=options) as checkpointer:
    for step in range(4):
        next(batches)
        checkpointer.save(step, state=state(step), data=batches, metrics={{"loss": step}})
    checkpointer.wait_until_finished()
    ckpt.save(f"{{url}}-over", state(1), options=options)
    ckpt.save(f"{{url}}-over", state(2), options=options, overwrite=True)
    again = pipeline()
    restored = checkpointer.restore_latest(state=state(9), data=again)
meet("closed")
report(
    step=restored.step,
    restored=same(restored["state"], 3),
    batch=int(next(again)) == int(next(batches)),
    steps=checkpointer.all_steps(),
    over=same(ckpt.load(f"{{url}}-over", state(9)), 2),
    verified=ckpt.verify(f"{{url}}/3").ok and ckpt.verify(f"{{url}}-over").ok,
)
"""
    told = reports(launch(_PRELUDE + code, tmp_path / "run"))
    expected = {"step": 3, "restored": True, "batch": True, "steps": [2, 3], "over": True}
    assert told == [expected | {"verified": True}] * 2
    # and in one process, which has eight devices; what passed between the processes is gone
    for url in (f"{store}/2", f"{store}/3", f"{store}-over"):
        assert ckpt.verify(url).ok
        names = keys_at(url).list()
        assert not any(".passing!" in name or name.endswith(".owner") for name in names)
        assert {"commit_success.txt", "state/manifest.ocdbt"} <= {*names}
        # Orbax takes every folder for an item
        assert not any(name.startswith(".") and "/" in name for name in names)


def test_a_store_that_the_processes_do_not_share_is_refused(tmp_path):
    code = """
try:
    ckpt.save("memory://mine/a", state(), options=options)
except ckpt.CheckpointError as error:
    report(said="all processes share" in str(error))
"""
    assert reports(launch(_PRELUDE + code, tmp_path / "run")) == [{"said": True}] * 2
