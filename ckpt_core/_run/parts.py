"""The collaborators of a Checkpointer, and how they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt_core._run.branch import Branch
from ckpt_core._run.decision import SaveDecision
from ckpt_core._run.directory import RunDirectory
from ckpt_core._run.fence import Fence
from ckpt_core._run.in_flight import InFlight
from ckpt_core._run.policies import keep, when
from ckpt_core._run.preemption import Preemption
from ckpt_core._run.retention import Retention
from ckpt_core._run.saving import Saving
from ckpt_core._run.tiers import LocalTier, Tiers, find_run
from ckpt_core._run.unread import UnreadValues


@dataclass(frozen=True)
class Parts:
    """The collaborators of a Checkpointer.

    Attributes:
        run: directory of the run.
        local: the local tier, or None.
        tiers: the steps of the run, local and persistent.
        fence: the claim of the directory.
        retention: deletes steps that no policy keeps.
        branch: claims the directory and moves steps that training does not continue from.
        saving: writes new steps.
        preemption: whether the run was told to stop.
        decision: asks the save policy.
        persist: asks the policy of the persistent directory; None if every step goes there.
        saves: one entry per tier; the local tier is first.
        unread: restored values that the caller has not read yet.
    """

    run: RunDirectory
    local: LocalTier | None
    tiers: Tiers
    fence: Fence
    retention: Retention
    branch: Branch
    saving: Saving
    preemption: Preemption
    decision: SaveDecision
    persist: SaveDecision | None
    saves: list[InFlight]
    unread: UnreadValues


def make_parts(
    run: RunDirectory,
    save_policy: when.Decision,
    keep_policy: keep.KeepPolicy | None,
    *,
    local_root: str | None,
    asynchronous: bool,
) -> Parts:
    """Makes the parts of a Checkpointer; all processes must call it if there is a local tier.

    Args:
        run: directory of the run.
        save_policy: which steps to save.
        keep_policy: which steps to keep; None for all.
        local_root: directory of the local tier; None for no such tier.
        asynchronous: write in a background thread.
    """
    saves: list[InFlight] = []
    fence = Fence(run.path, run.backend)
    retention = Retention(run, keep_policy)
    branch = Branch(run, fence, retention)
    saving = Saving(run, saves, branch, asynchronous)
    persist = run.options.persist_policy
    listening = save_policy if persist is None else when.any_of(save_policy, persist)
    preemption = Preemption(run.processes, listening, run.options)
    local: LocalTier | None = None
    if local_root is not None:
        lineage = find_run(run.backend, run.path, run.processes, run.options, not run.read_only)
        local = LocalTier(
            local_root, lineage, run.steps.names, run.processes, run.options, run.read_only
        )
        branch.set_local(local)
        saving.set_local(local)
    tiers = Tiers(run.steps, local)

    # `newest` is no method of the Checkpointer: a reference cycle would delay its collection.
    def deciding(policy: when.Decision, newest: Callable[[], int | None]) -> SaveDecision:
        return SaveDecision(policy, run.processes, preemption, newest, run.options.timeout_secs)

    return Parts(
        run=run,
        local=local,
        tiers=tiers,
        fence=fence,
        retention=retention,
        branch=branch,
        saving=saving,
        preemption=preemption,
        decision=deciding(save_policy, tiers.latest),
        persist=None if persist is None else deciding(persist, run.steps.latest),
        saves=saves,
        unread=UnreadValues(),
    )
