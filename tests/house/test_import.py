"""``import ckpt_core`` costs little beside jax: it imports eight modules of its own, and nothing that jax does not."""

import os

import pytest

from tests.support.children import environment

LOADED = """
import json, sys
import jax
before = set(sys.modules)
import ckpt_core
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_the_modules_that_the_import_adds(run_python):
    """Counted, not timed: it is 2 to 4 ms on a quiet machine."""
    added = run_python(LOADED)
    ours = [name for name in added if name.startswith("ckpt_core")]
    assert len(ours) <= 9, ours
    assert {name.partition(".")[0] for name in added} <= {"ckpt_core", "queue", "_queue"}, added


PASSES = """
import gc, json
import jax
import ckpt_core as ckpt

gc.set_threshold(1)
gc.collect()
before = [of["collections"] for of in gc.get_stats()]
ckpt.load
print(json.dumps([of["collections"] - at for of, at in zip(gc.get_stats(), before)]))
"""


def test_the_modules_of_a_load_come_without_a_pass_over_all_objects(run_python):
    """Else there are 16,000 with this threshold."""
    assert sum(run_python(PASSES)) < 10


SERVED = """
import multiprocessing, os
{first}

def load(path):
    return ckpt.load(path)["n"]

def main(method, path):
    multiprocessing.set_forkserver_preload([__name__])  # as from 3.12.8 on it does by itself with the program
    with multiprocessing.get_context(method).Pool(1) as pool:
        pool.apply(os.getpid)
        ckpt.save(path, {{"n": 7}})
        return pool.apply(load, (path,))
"""
FIRST = "import jax, ckpt_core as ckpt\nckpt.load, ckpt.Checkpointer"


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_child_of_a_process_that_has_only_imported_it_can_load(run_python, tmp_path, method):
    """A fork server imports the program; all its children were refused, and sent to a fork server."""
    (tmp_path / "program_of_test.py").write_text(SERVED.format(first=FIRST))
    code = (
        "import json, sys, program_of_test; print(json.dumps(program_of_test.main(*sys.argv[1:])))"
    )
    found_in = os.pathsep.join(
        [str(tmp_path), *environment().get("PYTHONPATH", "").split(os.pathsep)]
    )
    assert run_python(code, method, str(tmp_path / "a"), PYTHONPATH=found_in) == 7


USES = {
    "jax": "jax.devices()",
    "tensorstore": "ts.open({'driver': 'zarr3', 'kvstore': 'memory://'}, dtype='int32', shape=[4], create=True).result().write(1).result()",
}


@pytest.mark.parametrize("use", USES)
def test_a_child_of_a_process_that_has_used_another_library_is_refused(run_python, tmp_path, use):
    code = """
import json, os, sys, warnings
warnings.simplefilter("ignore")  # jax warns of every fork
import jax, tensorstore as ts, ckpt_core as ckpt
exec(sys.argv[2])
child = os.fork()
if child == 0:
    try:
        ckpt.save(sys.argv[1], {"n": 1})
    except ckpt.ForkedProcess:
        os._exit(7)
    os._exit(3)
print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""
    assert run_python(code, str(tmp_path / "a"), USES[use]) == 7
