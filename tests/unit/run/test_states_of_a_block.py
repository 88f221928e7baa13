"""Pipeline states of many processes: each local part has those of eight that hold the same, and they restore what is lost."""

import dataclasses
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._directory import StepNames, make_secret
from ckpt_core._format.record import load_record
from ckpt_core._processes import Processes
from ckpt_core._run.run_file import RunFile
from ckpt_core._run.steps import open_run_directory
from ckpt_core._run.tiers.local import LocalTier
from ckpt_core._run.tiers.save import BLOCK, MOST_STATE_BYTES, StepToSave
from ckpt_core._save import RecordFields, take_snapshot
from tests.support.counted_service import Service, run_all
from tests.support.own import Own

COUNT = 24
LINEAGE = "b" * 16
RUN = RunFile("run", LINEAGE)
STATE_BYTES = 16_000


class Pipeline(Own):
    per_process = True


@pytest.mark.parametrize("lost", [(5,), (0, 1, 2), (3, 6, 9, 12, 15, 18, 21)])
def test_a_lost_process_gets_its_state_from_its_block(tmp_path, monkeypatch, lost):
    assert COUNT == 3 * BLOCK and STATE_BYTES < MOST_STATE_BYTES
    options = ckpt.Options(timeout_secs=120, durable=False)
    directory = open_run_directory(tmp_path / "persistent", StepNames(), options, False)
    (tmp_path / "persistent").mkdir()
    make_secret(directory.path)

    def tier_of(processes: Processes) -> LocalTier:
        run = dataclasses.replace(directory, processes=processes)
        return LocalTier(str(tmp_path / "local" / str(processes.index)), RUN, run)

    def save(processes: Processes) -> list[str]:
        tier = tier_of(processes)
        text = f"{processes.index} " + "x" * STATE_BYTES
        items = {"weights": {"w": np.full(16, 7.0)}, "data": Pipeline(text=text)}
        what = StepToSave(3, items, RecordFields(False), f"{LINEAGE}{1:016x}")
        snapshot, write = tier.prepare(what)
        take_snapshot(items, [snapshot])
        write()
        tier.close(0)
        part = Path(tier.directory, "3")
        own = f"process_{processes.index}-of-{COUNT}.json"
        assert [file.name for file in part.glob("data/process_*")] == [own]
        assert ckpt.verify(part).ok
        record = load_record((part / "ckpt.json").read_bytes())
        kept = [name for name in record.small_files if "/exact/" not in name]
        return sorted([own, *(name.removeprefix("data/") for name in kept)])

    fetched = threading.Barrier(COUNT)

    def restore(processes: Processes) -> str:
        tier = tier_of(processes)
        opened = tier.opening(3)()
        state = json.loads(opened.read_file(f"data/process_{processes.index}-of-{COUNT}.json"))
        fetched.wait(60)  # the others may still fetch from this one
        tier.close(0)
        return state["text"].partition(" ")[0]

    written = run_all(monkeypatch, Service(), COUNT, save)
    for index, names in enumerate(written):
        block = sorted(range(index % 3, COUNT, 3))
        assert names == sorted(f"process_{n}-of-{COUNT}.json" for n in block)
    for index in lost:
        shutil.rmtree(tmp_path / "local" / str(index))
    assert run_all(monkeypatch, Service(), COUNT, restore) == [str(n) for n in range(COUNT)]
