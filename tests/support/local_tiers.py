"""What the processes of tests of local tiers begin with, after the prelude of ``launch``.

Code that follows defines ``state(step, by)``: the tree that a step holds, its distributed arrays cut by ``by``; and,
where it damages them, ``part(step)``: the directory of this process's part of a local step.
"""

ON_ALL = """
import itertools
from pathlib import Path
own = Path(f"{directory}/local/{index}")
persistent = Path(f"{directory}/persistent")
turns = itertools.count()

def is_at(tree, step, by):
    wanted = state(step, by)
    return tree.keys() == wanted.keys() and all(
        same(leaf, tree[name]) if isinstance(leaf, jax.Array) else np.array_equal(leaf, tree[name])
        for name, leaf in wanted.items()
    )

def resume(checkpointer, by=P("data")):
    found = checkpointer.restore_latest(state=state(99, by))
    assert found is None or is_at(found["state"], found.step, by), found
    return found

def on(process, work):
    # one process does something to its own directory, and the others wait
    meet(f"turn{next(turns)}")
    if index == process:
        work()
    meet(f"turn{next(turns)}")

def damage(step):
    from tests.support.damage import turn_a_bit
    turn_a_bit(part(step))
"""
