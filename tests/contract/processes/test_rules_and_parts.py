"""rules= and select= where several processes load: each reads what its shards need, and all must pass the same."""

import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.processes.test_broadcast import COUNTING
from tests.support.launch import launch, reports

CHECK = (
    COUNTING
    + """
from ckpt_core import Rule
square = Mesh(devices.reshape(2, 2), ("a", "b"))
table = np.arange(64 * 8 * 4096, dtype=np.float32).reshape(64, 8, 4096)
layers = table.reshape(4, 16 * 8, 4096)
rows = P(("a", "b"))

def like(*shape, spec=rows):
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(square, spec))

found = {}
def check(name, target, expected, **how):
    counted.clear()
    loaded = ckpt.load(f"{directory}/{name}", target, options=how.pop("options", options), **how)
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape and not one.is_fully_addressable
        assert all((np.asarray(s.data) == other[s.index]).all() for s in one.addressable_shards)
    return sum(counted)
"""
)

LOADS = """
parts = [Rule("w", "w/{n}", stack="n", stack_axis=1)]
taken = {"w": [table[:, n] for n in range(8)]}
stacked = [Rule("l/{n}", "w", stack="n")]
found = {
    "select": check("table", {"w": like(32, 8, 4096)}, {"w": table[32:]}, select={"w": np.s_[32:]}),
    "middle": check("table", {"w": like(64, 4096)}, {"w": table[:, 3]}, select={"w": np.s_[:, 3]}),
    "as saved": check("table", None, {"w": table[:, 2:4]}, select={"w": np.s_[:, 2:4]}),
    "unstack": check("table", {"w": [like(64, 4096) for _ in range(8)]}, taken, rules=parts),
    "stack": check("list", {"w": like(4, 128, 4096)}, {"w": layers}, rules=stacked),
    "broadcast": check(
        "table", {"w": [like(64, 4096, spec=P("b")) for _ in range(8)]}, taken, rules=parts,
        options=sharing,
    ),
}
report(**found)
"""

SAVE = """
ckpt.save(f"{directory}/table", {"w": put(table, rows, square)}, options=options)
state = {"l": [put(one, P(None, "a"), square) for one in layers]}
ckpt.save(f"{directory}/list", state, options=options)
report()
"""


@pytest.mark.linux("/proc/self/fd")
def test_a_process_reads_what_its_shards_need(tmp_path):
    reports(launch(CHECK + SAVE, tmp_path / "run", limit_secs=150))
    all_bytes = 64 * 8 * 4096 * 4
    for told in reports(launch(CHECK + LOADS, tmp_path / "run", limit_secs=150)):
        assert told["select"] == all_bytes // 4
        # 16 rows of an array are a block, and each block has some of every layer
        assert told["middle"] == told["as saved"] == told["unstack"] == all_bytes // 2
        assert told["stack"] == all_bytes // 2
        assert told["broadcast"] <= all_bytes


DIFFER = """
rules = [[Rule("a", "x"), Rule("b", "y")], [Rule("b", "x"), Rule("a", "y")]]
parts = [{"a": np.s_[:32]}, {"a": np.s_[32:]}]
both = {name: like(64, 8) for name in "xy"}
told = {
    "rules": raised(lambda: ckpt.load(f"{directory}/one", both, rules=rules[index], options=options)),
    "select": raised(
        lambda: ckpt.load(
            f"{directory}/one", {"a": like(32, 8)}, select=parts[index], only="a", options=options
        )
    ),
}
report(**told)
"""


def test_what_is_not_the_same_is_refused(tmp_path):
    """A global array would be made of shards of different arrays."""
    values = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    ckpt.save(tmp_path / "run/one", {"a": values, "b": -values})
    for told in reports(launch(CHECK + DIFFER, tmp_path / "run")):
        for name in ("rules", "select"):
            assert told[name] is not None, name
            assert "all processes must load the same" in told[name]["text"]
