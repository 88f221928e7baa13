"""What each scenario in which tests kill a process does to the disk, undisturbed; and what it asks of a bucket."""

import itertools
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.contract.faults.harness import Children, Op, build_shim
from tests.contract.faults.history_scenarios import CASES, STEPS
from tests.contract.faults.test_store_kills import SCENARIOS, Mortal
from tests.support import gcs_server
from tests.support.fault_proxy import proxied
from tests.support.recorded import steady

NAMES = "new,files,nested,overwrite,no_exchange,step,async_step,linked,open"
ORDERED = ("rename", "unlink", "rmdir")


def on_disk() -> Iterator[str]:
    """The operations on files, in their order; those of threads side by side sorted by file."""
    jobs: list[tuple[str, list[Any]]] = [("scenarios:save", [name]) for name in NAMES.split(",")]
    for layout, name in itertools.product(STEPS, CASES):
        jobs.append(("history_scenarios:run", [layout, name, False]))
    with tempfile.TemporaryDirectory() as folder:
        children = Children(Path(folder), shim=build_shim(Path(folder)))
        for function, given in jobs:
            title = ", ".join(map(str, given[:2]))
            root = f"{folder}/{title}"
            os.mkdir(root)
            given.insert(len(given) == 1, root)
            outcome = children.run(function, given, path=root)
            assert outcome.exit_code == 0, str(outcome)
            yield f"# {title}"
            # both tiers are written side by side
            both = title.startswith(("both", "persistent")) and re.search("save|overwrite", title)
            local = [op for op in outcome.ops if both and f"{root}/host" in op.path]
            for ops in (local, [op for op in outcome.ops if op not in local]):
                yield from ordered(ops, root)


def ordered(ops: list[Op], root: str) -> Iterator[str]:
    """Lines of operations; what is between two synced folders, removals or renames is by threads, and sorted by file."""
    written = {op.path for op in ops if op.name in ("open", "write")}
    files: dict[str, list[str]] = {}
    for op in ops:
        path, _, target = op.path.partition(" -> ")
        own = target if op.name == "link" and target else path
        if _in_no_order(op.name, path) or (own in written and op.name not in ORDERED):
            size = op.name == "write" and "/d/" in path
            kib = f":{-(-op.written_bytes // 1024)}K" if size else ""
            files.setdefault(own, []).append(op.name + kib)
        else:
            yield from _lines(files, root)
            yield f"  {op.name} {_short(op.path, root)}"
    yield from _lines(files, root)


def _in_no_order(name: str, path: str) -> bool:
    """Whether it is in no order: things are made, and synced or dropped below a folder that nobody reads."""
    return name in ("mkdir", "link") or (
        name in ("unlink", "rmdir", "fsync") and ".ckpt-tmp." in path
    )


def _short(path: str, root: str) -> str:
    return steady(path.replace(f"{root}/", "").replace(root, "."))


def _lines(files: dict[str, list[str]], root: str) -> list[str]:
    shown = [
        f"  {_short(path, root)}: {' '.join(name for name, _ in itertools.groupby(names))}"
        for path, names in files.items()
    ]
    files.clear()
    return sorted(shown)


def at_a_bucket() -> Iterator[str]:
    """The requests of each scenario in which tests kill a process at one of them."""
    with tempfile.TemporaryDirectory() as folder, gcs_server.running() as server:
        os.environ |= {"TENSORSTORE_GCS_HTTP_URL": server.url, "GCE_METADATA_ROOT": "127.0.0.1:1"}
        with proxied(server.url) as proxy:
            environment = {**os.environ, "TENSORSTORE_GCS_HTTP_URL": proxy.url}
            mortal = Mortal(Children(Path(folder)), proxy, environment, Path(folder, "pid"))
            for name, scenario in SCENARIOS.items():
                url = f"{server.root}/{name.replace(' ', '-')}"
                scenario.prepare(mortal, url)
                mortal.run(name, url, lambda request: False, False)
                yield f"# {name}: {len(proxy.requests)} requests"
                asked = [(one.method, steady(f"{one.key}")) for one in proxy.requests]
                for _, some in itertools.groupby(asked, lambda one: one[0]):
                    yield from (f"  {method} {key}" for method, key in sorted(some))
