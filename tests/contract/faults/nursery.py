"""A process that has imported jax and ckpt_core, and forks a child for every request on its input.

Importing takes more than a second, a fork a few milliseconds, and a sweep over all operations needs
hundreds of children. Nothing here may start a thread or use a jax backend or TensorStore: a fork
would not survive it. That a child makes the operations of a new interpreter is tested (`test_shim`).
"""

import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from typing import Any

from tests.support import forked

HERE = os.path.dirname(os.path.abspath(__file__))


def call(request: dict[str, Any]) -> int:
    """Becomes the child of `request` and runs its function; returns the exit code."""
    import child

    child.begin(request)
    try:
        module = importlib.import_module(request["module"])
        getattr(module, request["function"])(*request["args"])
    except BaseException as error:
        child.report(raised=child.describe(error))
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


def fork(request: dict[str, Any]) -> dict[str, Any]:
    """Runs `request` in a forked child for at most its time, and says how that ended."""
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = call(request)
        finally:
            os._exit(code)
    timed_out = False
    watch = os.pidfd_open(pid)
    try:
        if not select.select([watch], [], [], request["timeout_secs"])[0]:
            timed_out = True
            os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
    finally:
        os.close(watch)
    return {
        "exit_code": os.waitstatus_to_exitcode(status),
        "timed_out": timed_out,
        "max_rss_bytes": usage.ru_maxrss * 1024,
        "secs": time.monotonic() - started,
    }


def main() -> None:
    sys.path.insert(0, HERE)
    if sys.argv[1:2] == ["--once"]:
        with open(sys.argv[2]) as file:
            sys.exit(call(json.load(file)))
    forked.import_all()
    threads = len(os.listdir("/proc/self/task"))
    print(json.dumps({"ready": True, "threads": threads}), flush=True)
    for line in sys.stdin:
        print(json.dumps(fork(json.loads(line))), flush=True)
    os._exit(0)  # tearing down what was imported takes longer than most children live


if __name__ == "__main__":
    main()
