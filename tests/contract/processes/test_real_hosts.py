"""Jobs on eight hosts with links of their own, which are cut, slowed and lossy, and hosts that die, stop, are lost or damaged.

A campaign is one run: job after job goes on from what the one before left. What any process was told is saved must be
there at the next start, with the same value on all, as long as somebody has each part; and no process waits for ever.
"""

import json
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import hosts
from tests.support.damage import flip
from tests.support.hosts import Hosts, Job
from tests.support.launch import PRELUDE
from tests.support.local_tiers import ON_ALL
from tests.support.ports import free_port

pytestmark = pytest.mark.linux("network namespaces")
HOSTS = 8
WAIT_SECS = 15
"""Options.timeout_secs of the jobs."""
PERSISTS_EVERY = 4
JOB = (
    hosts.ENTER
    + "import faulthandler; faulthandler.dump_traceback_later(165)"  # who hangs shows where
    + PRELUDE.replace("127.0.0.1:", f"{Hosts.address(0)}:").replace(
        "process_id=index)",
        "process_id=index, heartbeat_timeout_seconds=40, initialization_timeout=60)",
    )
    + ON_ALL
    + """
own = Path(f"{directory}/fast/{sys.argv[7]}")  # of the host; its processes share it
settings = json.loads(open(f"{directory}/job.json").read())
wait_secs, first, saves = settings["wait_secs"], settings["value"], settings["saves"]

def say(*what):
    print("SAID" + json.dumps(what), flush=True)

def state(value):
    rows = np.arange(48 << 8, dtype=np.float32).reshape(48, -1) + value
    return {"rows": put(rows, P("data")), "n": value}

def check(tree):
    wanted = np.arange(48 << 8, dtype=np.float32).reshape(48, -1) + tree["n"]
    for shard in tree["rows"].addressable_shards:
        assert np.array_equal(np.asarray(shard.data), wanted[shard.index]), tree["n"]

options = ckpt.Options(
    timeout_secs=wait_secs, partners="host", local_max_to_keep=4, durable=False,
    persist_policy=ckpt.when.every_steps(settings["every"]))
began = time.monotonic()
try:
    with ckpt.Checkpointer(persistent, local_directory=own, options=options) as c:
        found = c.restore_latest(state=state(0))
        step = -1
        if found is not None:
            check(found["state"])
            step = found.step
        say("restored", step, None if found is None else found["state"]["n"])
        for step in range(step + 1, step + 1 + saves):
            value = first + step
            say("tries", step, value)
            began = time.monotonic()
            c.save(step, state(value), metadata=value)
            c.wait_until_finished()
            say("saved", step, value)
            time.sleep(settings["pause_secs"])
    # of the last step a partner has a copy, unless its link was cut
    (mine,) = own.glob(f"run-*/process_{index}-of-{count}/{step}/ckpt.json")
    copies = Path(f"{directory}/fast").glob(f"*/run-*/process_*/partner-of_{index}-of-*/{step}/ckpt.json")
    if any(copy.read_bytes() == mine.read_bytes() for copy in copies):
        say("settled", step)
    say("done")
except (ckpt.CheckpointError, OSError) as error:
    say("failed", type(error).__name__, str(error)[:300], time.monotonic() - began)
    os._exit(3)
meet("end")
os._exit(0)
"""
)


@dataclass
class Campaign:
    """One run, and what it must hold. ``places``: pair of processes -> its host. ``tried``: step -> values that a process began to
    save since the last one that was acknowledged. ``newest``, ``persisted``, ``settled``: the last step that was acknowledged, is
    persistent, has copies at partners. ``harmed``: how many hosts were lost or damaged since a job has restored.
    """

    root: Path
    hosts: Hosts
    chance: random.Random
    places: list[int] = field(default_factory=lambda: list(range(HOSTS)))
    tried: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    newest: int | None = None
    persisted: int | None = None
    settled: int | None = None
    harmed: int = 0
    number: int = 0
    told: list[str] = field(default_factory=list[str])

    def job(self) -> list[dict[str, Any]]:
        """Runs one job, with what goes wrong meanwhile; gives what each process said, by the first word."""
        self.number += 1
        settings = {
            "wait_secs": WAIT_SECS,
            "value": 10_000 * self.number,
            "saves": self.chance.randint(2, 6),
            "pause_secs": self.chance.choice([0.0, 0.3]),
            "every": PERSISTS_EVERY,
        }
        directory, logs = self.root / "run", self.root / "logs"
        directory.mkdir(exist_ok=True)
        logs.mkdir(exist_ok=True)
        (directory / "job.json").write_text(json.dumps(settings))
        job = Job(self.hosts, self.places, JOB, directory, logs, free_port())
        try:
            self._trouble(job)
            codes = job.ended(12 * WAIT_SECS)
        finally:
            for host in range(HOSTS):
                self.hosts.mend(host)
            for child in job.children:
                child.end()
        said: list[dict[str, Any]] = []
        for index in range(len(job.children)):
            lines = job.lines(index)
            parts = [json.loads(line[4:]) for line in lines if line.startswith("SAID")]
            said.append({"code": codes[index], "lines": lines, "parts": parts})
        assert 124 not in codes, self._story(said, "a process waited for ever")
        return said

    def _trouble(self, job: Job) -> None:
        """Does something to the job while it runs."""
        kind = self.chance.choice(
            ["nothing", "cut", "cut", "slow", "lossy", "all lossy", "die", "stand still"]
        )
        place = self.chance.randrange(HOSTS)
        host, after_secs = self.places[place], self.chance.uniform(0.5, 6)
        for_secs = self.chance.choice([1, 4, 10, 2 * WAIT_SECS])
        self.told.append(
            f"job {self.number} on {self.places}: {kind}, place {place}, after {after_secs:.1f} s, for {for_secs} s"
        )
        if kind == "all lossy":
            for one in range(HOSTS):
                self.hosts.lose(one)
            return
        if kind in ("slow", "lossy"):
            (self.hosts.slow if kind == "slow" else self.hosts.lose)(host)
            return
        time.sleep(after_secs)
        if kind == "cut":
            self.hosts.cut(host)
            time.sleep(for_secs)
            self.hosts.mend(host)
        elif kind == "die":
            job.signal(place, signal.SIGKILL)
        elif kind == "stand still":
            job.signal(place, signal.SIGSTOP)
            time.sleep(for_secs)
            job.signal(place, signal.SIGCONT)

    def check(self, said: list[dict[str, Any]]) -> None:
        """What the job restored is what was acknowledged; notes what each process was told is saved."""
        wanted = self.newest
        if self.harmed:  # by one: its partner has what is settled; it had the copies of another one
            sure = (self.persisted, self.settled if self.harmed == 1 else None)
            wanted = max((one for one in sure if one is not None), default=None)
        restored = {
            tuple(part[1:]) for one in said for part in one["parts"] if part[0] == "restored"
        }
        assert len(restored) <= 1, self._story(said, f"they restored {restored}")
        for step, value in restored:
            if wanted is not None:
                assert step >= wanted, self._story(said, f"{step} was restored, and not {wanted}")
            assert step == -1 or value in self.tried[step], self._story(
                said, f"step {step} has {value}, and not one of {self.tried[step]}"
            )
            if self.harmed:
                self.harmed, self.settled = 0, None
            # what was begun beyond it is of another history from now on
            self.tried = {one: values for one, values in self.tried.items() if one <= step}
            self.newest = step if step >= 0 else None
            for name in ("persisted", "settled"):
                one = getattr(self, name)
                if one is not None and one > step:
                    setattr(self, name, None)
        for one in said:
            for part in one["parts"]:
                if part[0] == "tries":
                    self.tried.setdefault(part[1], set()).add(part[2])
        for one in said:
            for kind, *more in one["parts"]:
                if kind == "saved":
                    step, value = more
                    self.tried[step] = {value}
                    self.newest = max(step, -1 if self.newest is None else self.newest)
                    if step % PERSISTS_EVERY == 0:
                        self.persisted = max(step, -1 if self.persisted is None else self.persisted)
        settled = [part[1] for one in said for part in one["parts"] if part[0] == "settled"]
        if len(settled) == len(said) and len({*settled}) == 1:
            self.settled = settled[0]
        failures = [part for one in said for part in one["parts"] if part[0] == "failed"]
        for _, kind, text, secs in failures:
            assert secs < 8 * WAIT_SECS, self._story(said, f"{kind} after {secs:.0f} s: {text}")
            assert kind != "CheckpointCorrupt", self._story(said, text)

    def harm(self) -> None:
        """Between jobs: a host is lost, a byte flips on one, hosts change places."""
        kind = self.chance.choice(["nothing", "lost", "flipped", "swapped", "swapped and lost"])
        host = self.chance.randrange(HOSTS)
        fast = self.root / "run" / "fast" / f"{host}"
        self.told.append(f"then: {kind}, host {host}")
        if kind.startswith("swapped"):
            self.chance.shuffle(self.places)
            # the coordinator's address is that of the first host
            at = self.places.index(0)
            self.places[0], self.places[at] = self.places[at], self.places[0]
        if kind.endswith("lost"):
            shutil.rmtree(fast, ignore_errors=True)
        if kind == "flipped":
            files = [one for one in fast.rglob("d/*") if one.is_file() and one.stat().st_size > 100]
            for file in self.chance.sample(sorted(files), min(3, len(files))):
                flip(file)
        self.harmed += kind.endswith("lost") or kind == "flipped"

    def _story(self, said: list[dict[str, Any]], what: str) -> str:
        tails = [
            f"--- {n}: {one['code']}\n" + "\n".join(one["lines"][-12:])
            for n, one in enumerate(said)
        ]
        return "\n".join([what, *self.told[-8:], *tails])


def run_campaign(root: Path, seed: int, secs: float) -> Campaign:
    """Job after job for so many seconds, at least three."""
    made = Hosts(HOSTS, root)
    campaign = Campaign(root, made, random.Random(seed))
    until = time.monotonic() + secs
    try:
        while time.monotonic() < until or campaign.number < 3:
            campaign.check(campaign.job())
            campaign.harm()
    finally:
        made.close()
    return campaign


@pytest.mark.parametrize(
    ("seed", "secs"), [(0, 0.0), (1, 0.0), pytest.param(None, 3600.0, marks=pytest.mark.soak)]
)
def test_jobs(tmp_path, seed, secs):
    if why := hosts.missing():
        pytest.skip(why)
    campaign = run_campaign(tmp_path, random.randrange(2**32) if seed is None else seed, secs)
    print(f"{campaign.number} jobs, newest step {campaign.newest}")
