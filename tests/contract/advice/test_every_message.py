"""Every message of the tree that names an action has a case here, or a reason why it has none."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.contract.advice.messages import Message, all_texts, with_an_action
from tests.contract.advice.said import fragment_of

_KEY = re.compile(r"[\w/]+\.py: .+", re.DOTALL)
_PROCESSES = "needs several processes of jax.distributed: tests/contract/processes"
_MACHINE = "about the machine, whose fault a test does not make: tests/unit/cli/test_doctor.py"
_VERSION = "needs another version of a package"
_DEVICE = "needs an accelerator"
_RACE = "a moment between two calls, which no program of a user brings about"
_TEXT = "tells, and names no action"
EXCEPTIONS: dict[str, str] = {
    "_devices/collectives.py: bytes over their devices": _PROCESSES,
    "_directory/syscalls.py: on Windows, checkpoints in directories": "needs Windows: tests/unit/directory/test_windows.py",
    "_doctor/findings.py: the kind of the file system is not known here": _MACHINE,
    "_directory/gather.py: changed while it was being saved": _RACE,
    "_directory/object_store.py: : this store ignores conditional puts": "a server's fault: tests/contract/directory",
    "_directory/writing.py: : it was renamed, but its directory": "a disk that fails after the rename: tests/unit/save/test_commit.py",
    "_doctor/findings.py: : pip install -U": _VERSION,
    "_doctor/findings.py: : install both at one version": _VERSION,
    "_doctor/findings.py: : call ckpt_torchax.shim.install() before it": _VERSION,
    "_doctor/findings.py: MB/s: saves of large states will last": _MACHINE,
    "_doctor/findings.py: no atomic exchange of directories": _MACHINE,
    "_doctor/findings.py: a second lock of one file is granted": _MACHINE,
    "_doctor/findings.py: this machine's clock says": _MACHINE,
    "_doctor/findings.py: it ignores conditional puts": _MACHINE,
    "_format/untrusted.py: bytes, more than the": "a file of 1 GiB",
    "_format/record.py: ckpt would not read this back": "a record of several GiB",
    "_format/record.py: : upgrade ckpt to load it": _VERSION,
    "_load/loading.py: restore with atomic_restore": _TEXT,
    "_load/non_tree.py: Start as many processes as saved it": _PROCESSES,
    "_read/broadcast.py: with Options(broadcast=True) all": _PROCESSES,
    "_load/targets.py: several processes run and the saved sharding": _PROCESSES,
    "_processes/__init__.py: they are late, stuck or dead": _PROCESSES,
    "_processes/jobs.py: : upgrade ckpt-core, or use an older jax": _VERSION,
    "_run/decision.py: ask whether to save a step": _TEXT,
    "_run/disk.py: : restore_latest goes on from the newest step": _TEXT,
    "_run/in_flight.py: did not end within the grace period": "takes seconds of a grace period: tests/unit/run/test_stopping.py",
    "_run/tiers/__init__.py: does its writer keep at least the latest two": _RACE,
    "_run/preemption.py: Set jax_enable_preemption_service before": _PROCESSES,
    "_run/retention.py: must be moved away first, but it is being read": _RACE,
    "_run/tiers/folders.py: : restore the step, which takes": _PROCESSES,
    "_run/tiers/joining.py: : not all parts were here within": _PROCESSES,
    "_run/tiers/local.py: is not whole in the local directories, there is no other": _PROCESSES,
    "_run/tiers/local.py: is not damaged, but the local directories": _PROCESSES,
    "_run/tiers/peers.py: So the secret that protects local steps": _PROCESSES,
    "_run/tiers/peers.py: must name a file with the same bytes on each host": _PROCESSES,
    "_run/tiers/save.py: save into": _TEXT,
    "_save/pieces.py: processes run, and a writer is for one alone": _PROCESSES,
    "_save/pieces.py: so nothing is: start again": "a disk that fails: tests/unit/save/test_writer.py",
    "_save/plan_digest.py: save with the same Options(": _PROCESSES,
    "_storage/bounds.py: load it on a machine with more": _MACHINE,
    "_storage/failures.py: : there is no such bucket": "a server's answer: tests/unit/directory/test_store_refusals.py",
    "_storage/failures.py: , and all retries were used up": "a server's answer: tests/unit/directory/test_store_refusals.py",
    "_tree/leaves.py: cannot be stored: convert or leave it out": _VERSION,
    "cli/_advice.py: overwrite=True": "what is replaced on the command line",
    "cli/_anatomy.py: the tree: path, type and kind of every leaf": _TEXT,
    "cli/_app.py: Look at checkpoints, check them": _TEXT,
    "cli/_bench.py: --xla_dump_to=": _TEXT,
    "cli/_doctor.py: one file written at": _TEXT,
    "cli/_numbers.py: containers more: --limit shows more": "as of leaves, which are followed",
    "convert/_checkpoints.py: it needs the program that wrote it": "tests/contract/convert/test_checkpoints.py",
    "convert/_distributed.py: save it without extensions": _VERSION,
    "testing/_resume.py: began at step": _TEXT,
    "testing/_resume.py: train went on at step": _TEXT,
    "testing/_runs.py: train went on after report raised": _TEXT,
    "testing/_runs.py: train was not done after": _TEXT,
    "testing/_runs.py: train failed in a process of its own": _TEXT,
    "testing/_tools.py: : give the fixture `misfits`": "skips a test of whoever writes an adapter",
    "grain/ckpt_grain/_pipeline.py: Each process has a position of its own": _PROCESSES,
    "keras/ckpt_keras/_backend.py: importing Keras failed": "the import itself: tests/contract/frameworks/test_keras_directory.py",
    "keras/ckpt_keras/_data.py: Leave data= away: the batches": "takes a torch data loader: tests/contract/frameworks",
    "keras/ckpt_keras/_data.py: batches more than it has trained": _DEVICE,
    "keras/ckpt_keras/_data.py: data= is an iterator, and on this device": _DEVICE,
    "keras/ckpt_keras/_kept.py: shuffle an array of indices": "fits of several epochs: tests/unit/frameworks/test_keras_pydataset.py",
    "orbax/ckpt_orbax/_handler_files.py: have it name the file by": _PROCESSES,
    "orbax/ckpt_orbax/_handler_files.py: save what is large as a pytree": _PROCESSES,
    "orbax/ckpt_orbax/_leaves.py: Unsupported abstract leaf type": "refused earlier, with the same words",
    "orbax/ckpt_orbax/_refused.py: ckpt_core.load(path, like": "as of transforms, which are followed",
    "orbax/ckpt_orbax/multihost.py: call it in all of them": _PROCESSES,
    "orbax/ckpt_orbax/v1/saving.py: what is there is replaced": _TEXT,
    "torchax/ckpt_torchax/_bits.py: TorchTPU tensors": _DEVICE,
    "torchax/ckpt_torchax/_bits.py: it lies on": _DEVICE,
    "torchax/ckpt_torchax/_environment.py: Upgrade torchax when": _VERSION,
    "torchax/ckpt_torchax/_tensors.py: list[Any]": "a type",
    "torchax/ckpt_torchax/_torchax.py: call ckpt_torchax.shim.install() before": _VERSION,
    "torchax/ckpt_torchax/_torchax.py: , and is not imported: write": "needs a process without torchax: tests/contract/frameworks",
}
"""Messages without a case, each with the reason."""


def _keys(file: Path) -> list[str]:
    """The keys of messages that a file of tests is about: ``module.py: part of the text``."""
    texts = (
        node.value
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant)
    )
    return [text for text in texts if isinstance(text, str) and _KEY.fullmatch(text)]


def _about(key: str, message: Message) -> bool:
    return message.holds(key.partition(": ")[0], fragment_of(key))


# Found by the tests: every process that runs some of the suite imports this file.
@functools.cache
def cases() -> list[str]:
    """The keys of all cases of this folder."""
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    return [key for file in files if file != Path(__file__) for key in _keys(file)]


@functools.cache
def messages() -> list[Message]:
    return with_an_action()


def test_every_message_with_an_action_is_followed():
    left = [
        one for one in messages() if not any(_about(key, one) for key in (*cases(), *EXCEPTIONS))
    ]
    shown = "\n".join(f"{one.module}:{one.line}: {'{}'.join(one.parts)}" for one in left)
    assert not left, f"messages whose advice no test of this folder follows:\n{shown}"


def test_every_key_is_that_of_a_message():
    """So that a message that changes takes its case along."""
    everything = all_texts()
    lost = [key for key in cases() if not any(_about(key, one) for one in everything)]
    assert not lost, "no text of the module holds this"


def test_no_exception_outlives_its_reason():
    lost = [key for key in EXCEPTIONS if not any(_about(key, one) for one in messages())]
    followed = [
        key
        for key in EXCEPTIONS
        for one in messages()
        if _about(key, one) and any(_about(c, one) for c in cases())
    ]
    assert not lost, "no message with an action holds this"
    assert not followed, "a case follows it by now"
