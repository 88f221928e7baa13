"""``--processes N``: runs the same command in N local processes of one jax.distributed run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

_POLL_SECS = 0.1
_GRACE_SECS = 30.0


def run_processes(count: int) -> int:
    """Runs this command in ``count`` processes; returns the first exit code that is not 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [*sys.argv[1:], "--processes", "1"]  # of an option given twice, the last counts
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "ckpt_core.cli", *arguments],
            env=os.environ
            | {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
                "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
            },
            stdout=None if index == 0 else subprocess.DEVNULL,
        )
        for index in range(count)
    ]
    try:
        return _wait(children)
    except KeyboardInterrupt:
        # The terminal sent Ctrl-C to the children too, and they write their results. A child that
        # waits for another one in the middle of a save does not react to it.
        _wait(children, time.monotonic() + _GRACE_SECS)
        return 130
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def _wait(children: list[subprocess.Popen[bytes]], deadline: float | None = None) -> int:
    while True:
        codes = [child.poll() for child in children]
        bad = next((code for code in codes if code), 0)
        if None not in codes:
            return bad if bad >= 0 else 1
        if bad and deadline is None:
            deadline = time.monotonic() + _GRACE_SECS
        if deadline is not None and time.monotonic() > deadline:
            return bad if bad >= 0 else 1  # the caller kills the rest
        time.sleep(_POLL_SECS)
