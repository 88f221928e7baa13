"""Several processes publish, others follow: each wrote its parts, and all samplers stand at one version."""

import pytest

from tests.support.launch import launch, reports

STATE = """
import jax.numpy as jnp
run = directory + "/published"
at = np.arange(64 * 40).reshape(64, 40)

def state(version, spec=P("data"), mesh=mesh):
    values = np.sin(at) + (version // 50 + (at % 50 < version % 50)) / 8
    return {"w": put(values.astype(np.float32), spec, mesh), "all": put(np.full(8, float(version)), P()), "n": version}

def right(live, version, dtype=jnp.bfloat16):
    want = state(version, live["w"].sharding.spec, live["w"].sharding.mesh)["w"].astype(dtype)
    return bool(same(live["w"], want.astype(live["w"].dtype)) and live["n"] == version)
"""
TRAINER = """
square = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
with ckpt.Publisher(run, anchor_every=3, options=options) as publisher:
    for version in range(5):
        publisher.publish(version, state(version, P("x", "y"), square), cast=jnp.bfloat16)
follower, live = ckpt.Follower(run, options=options), state(0, P(None, "data"))
found = follower.update(live)
report(found=found, right=right(live, 4), parts=sorted(name for name in os.listdir(run) if name[0] == "."))
"""


@pytest.mark.parametrize(("writers", "readers"), [(2, 2), (4, 1), (1, 4)])
def test_any_number_to_any_other(writers, readers, tmp_path):
    first = launch(STATE + TRAINER, tmp_path / "run", processes=writers, devices=8 // writers)
    told = reports(first)
    assert [(one["found"], one["right"]) for one in told] == [(4, True)] * writers
    # 3 is an anchor, and a delta of which each process has written a part
    assert sum(".ckpt-delta-3-" in name for name in told[0]["parts"]) == writers
    code = """
follower, live = ckpt.Follower(run, options=options), state(9)
found = [follower.update(live), follower.update(live)]
tree = follower.load(state(0, P(None, "data")))
report(found=found, right=right(live, 4) and right(tree, 4))
"""
    told = reports(launch(STATE + code, tmp_path / "run", processes=readers, devices=8 // readers))
    assert told == [{"found": [4, None], "right": True}] * readers


def test_what_each_process_holds_is_published_as_deltas(tmp_path):
    code = """
with ckpt.Publisher(run, options=options) as publisher:
    for version in range(3):
        publisher.publish(version, {"all": put(np.full(99, float(version)), P()), "n": np.arange(99) == version})
follower = ckpt.Follower(run, options=options)
report(got=follower.load()["n"].tolist().index(True), names=sorted(os.listdir(run)))
"""
    for one in reports(launch(STATE + code, tmp_path / "run")):
        assert one["got"] == 2
        assert [name[:13] for name in one["names"] if name != ".ckpt-published"] == [
            *([".ckpt-delta-1"] * 2),
            *([".ckpt-delta-2"] * 2),
            "0",
        ]


def test_processes_that_publish_different_things_all_raise(tmp_path):
    code = """
publisher = ckpt.Publisher(run, options=options)
publisher.publish(0, state(0))
found = []
for version, tree in ((1 + index, state(1)), (3, dict(state(3), n=index)), (4, state(4) if index else object())):
    publisher.publish(version, tree)
    found.append(raised(lambda: publisher.publish(99, state(99)))["type"])
publisher.publish(5, state(5))
publisher.close()
report(found=found, version=ckpt.Follower(run, options=options).load(state(0))["n"])
"""
    told = reports(launch(STATE + code, tmp_path / "run"))
    assert told == [{"found": ["NotTogether", "NotTogether", "UnsupportedLeaf"], "version": 5}] * 2


def test_a_process_fails_alone_or_dies(tmp_path):
    code = """
with ckpt.Publisher(run, options=options) as publisher:
    for version in range(3):
        publisher.publish(version, state(version))
follower, live = ckpt.Follower(run, options=options), state(9)
meet("published")
if index == 0:
    os.rename(run + "/0", run + "-0")
meet("moved")
nothing = follower.update(live)
kept = right(live, 9, np.float32)
meet("looked")
if index == 0:
    os.rename(run + "-0", run + "/0")
meet("back")
found = ckpt.Follower(run, options=options).update(live)
meet("followed")
shorten(3)
leaving.remove(1)
if index == 1:
    kill()
publisher = raised(lambda: ckpt.Follower(run, options=options).update(live))
report(nothing=nothing, kept=kept, found=found, type=publisher["type"], absent=publisher["absent"])
"""
    ended = launch(STATE + code, tmp_path / "run")
    told = {"nothing": None, "kept": True, "found": 2, "type": "BarrierTimeout", "absent": [1]}
    assert ended[0].told == told, ended[0].text
