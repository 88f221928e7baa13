"""Both sides are killed at random, files are damaged and lost, trainers go back: what followers hold is always one published version."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

import ckpt_core as ckpt
from tests.support import forked
from tests.support.children import with_devices
from tests.support.stores import keys_at, url_of_kind

LIMIT_SECS = 120.0
STATE = """
import json, os, sys, time
import jax, jax.numpy as jnp, numpy as np
import ckpt_core as ckpt
place, life, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
options = ckpt.Options(durable=False)
at = np.arange(30_000)

def trained(version, life):
    values = np.sin(at + life) + (version // 100 + (at % 100 < version % 100)) / 8
    return {"w": jnp.asarray(values.reshape(100, 300), jnp.float32), "at": np.array([version, life])}

def published(version, life):
    tree = trained(version, life)
    return {"w": np.asarray(tree["w"].astype(jnp.bfloat16)), "at": tree["at"]}
"""
# begins where the last one ended, or up to three versions before that
TRAINER = """
found = ckpt.Follower(place, options=options)
newest = found.update()
first = 0 if newest is None else max(0, newest + 1 - int(sys.argv[4]))
with ckpt.Publisher(place, anchor_every=20, max_to_keep=3, options=options) as publisher:
    for version in range(first, last + 1):
        publisher.publish(version, trained(version, life), cast=jnp.bfloat16); time.sleep(0.02)
"""
# says what it stands at; ends at the last version
SAMPLER = """
follower, seen = ckpt.Follower(place, options=options), 0
live = {"w": jnp.zeros((100, 300)), "at": np.zeros(2, np.int64)}
while live["at"][0] != last:
    version = follower.update(live, timeout_secs=1)
    if version is not None:
        at_version, at_life = map(int, live["at"])
        right = published(at_version, at_life)["w"]
        same = (np.asarray(live["w"]) == right.astype(np.float32)).all()
        same &= follower.load()["w"].tobytes() == right.tobytes()
        assert at_version == version and same, (version, live["at"], life)
        seen += 1
        print("SEEN", version, flush=True)
print("DONE", flush=True)
"""


def damage(place: str, chance: random.Random) -> None:
    """Flips a bit of one file, or removes it."""
    keys = keys_at(place) if "://" in place else None
    if keys:
        names = [name for name in keys.list() if name.startswith(".ckpt-")]
    else:
        names = [f"{folder}/{name}" for folder, _, names in os.walk(place) for name in names]
    if not names:
        return
    name = chance.choice(names)
    lost = ".ckpt-published" not in name and chance.random() < 0.3
    with contextlib.suppress(FileNotFoundError):  # by retention
        data = keys.get(name) if keys else Path(name).read_bytes()
        if not data:
            return
        bit = chance.randrange(len(data))
        data = data[:bit] + bytes([data[bit] ^ 4]) + data[bit + 1 :]
        if keys:
            keys.delete([name]) if lost else keys.put(name, data)
        elif lost:
            Path(name).unlink()
        else:
            Path(f"{name}.damaged").write_bytes(data)
            os.replace(f"{name}.damaged", name)


def world(place: str, last: int, kills: int, seed: int, logs: Path) -> list[int]:
    """Runs both sides until a sampler has come to the last version; returns which versions samplers saw."""
    chance, environment = random.Random(seed), with_devices(1)
    running: dict[str, forked.Forked] = {}
    files: list[Path] = []
    deadline = time.monotonic() + LIMIT_SECS + 4 * kills + last

    def start(side: str, code: str, *more: str) -> None:
        files.append(logs / f"{len(files)}.{side}")
        arguments = [place, str(len(files)), str(last), *more]
        running[side] = forked.start(
            STATE + code, *arguments, output=files[-1], environment=environment
        )

    def said() -> str:
        return "".join(one.read_text() for one in files if one.suffix == ".sampler")

    start("trainer", TRAINER, "0")
    start("sampler", SAMPLER)
    killed = 0
    while "DONE" not in said():
        assert time.monotonic() < deadline, [one.read_text()[-3000:] for one in files[-2:]]
        time.sleep(chance.uniform(0.0, 0.1))
        if killed < kills and max(seen_in(said()), default=-1) >= killed * last // (kills + 1):
            killed += 1
            damage(place, chance)
            running[chance.choice(["trainer", "sampler"])].send_signal(signal.SIGKILL)
        for side, code in (("trainer", TRAINER), ("sampler", SAMPLER)):
            try:
                status = running[side].wait(0.0)
            except TimeoutError:
                continue
            assert status in (0, -signal.SIGKILL), files[-1].read_text()[-3000:]
            if side == "trainer" or status:
                start(side, code, *([str(chance.randrange(4))] if side == "trainer" else []))
    for one in running.values():
        one.end()
    assert killed >= kills // 2  # a sampler may leave out many versions at once
    return seen_in(said())


def seen_in(text: str) -> list[int]:
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("SEEN")]


@pytest.mark.parametrize(
    ("kind", "last", "kills"),
    [
        ("local", 60, 4),
        pytest.param("s3", 40, 3, marks=pytest.mark.faults),
        pytest.param("local", 1000, 40, marks=pytest.mark.soak),
        pytest.param("s3", 1000, 40, marks=pytest.mark.soak),
    ],
)
def test_what_followers_hold_is_a_published_version(kind, last, kills, request, tmp_path):
    place = str(tmp_path / "run") if kind == "local" else url_of_kind(request, kind)
    seen = world(place, last, kills, seed=last, logs=tmp_path)
    assert seen[-1] == last
    # and one who joins at the end
    assert ckpt.Follower(place).update() == last
