"""Hosts on one machine: network namespaces with addresses, boot ids and links of their own, on one bridge.

A link can be cut, slowed, and lose packets. Needs root, ``ip`` and ``tc``; what a kernel lacks is said by ``missing``.
"""

import functools
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.support import forked
from tests.support.children import with_devices

# Classic BPF with direct action: a random number below a tenth of 2**32 drops the packet.
_LOSES_A_TENTH = "4,32 0 0 4294963256,53 1 0 429496730,6 0 0 2,6 0 0 0"
_SLOW = ("rate", "4mbit", "burst", "32k", "latency", "400ms")

# The child enters its host before it imports anything that starts a thread.
ENTER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def _done(result):
    if result:
        raise OSError(ctypes.get_errno(), "cannot enter the host")
CLONE_NEWNS, CLONE_NEWNET, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x40000000, 0x1000, 0x4000, 1 << 18
_network = os.open(f"/run/netns/{sys.argv[5]}", os.O_RDONLY)
_done(libc.setns(_network, CLONE_NEWNET))
os.close(_network)
_done(libc.unshare(CLONE_NEWNS))
_done(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
_done(libc.mount(sys.argv[6].encode(), b"/proc/sys/kernel/random/boot_id", None, MS_BIND, None))
"""


@functools.cache
def missing() -> str:
    """What this machine lacks for such hosts; empty if nothing."""
    if os.geteuid() != 0:
        return "needs root"
    if lacks := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"needs {' and '.join(lacks)}"
    try:
        Hosts(1, Path("/tmp")).close()
    except OSError as error:
        return f"this kernel makes no such hosts: {error}"
    return ""


class Hosts:
    """So many hosts, with the addresses 10.77.0.1 and on; their boot ids lie in a directory."""

    def __init__(self, count: int, directory: Path) -> None:
        self._prefix = f"ckpt{os.getpid()}"
        self._bridge = f"{self._prefix}-bridge"
        self.names = [f"{self._prefix}-{n}" for n in range(count)]
        self.boot_ids = [directory / f"boot_id.{n}" for n in range(count)]
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        _run("ip", "netns", "add", self._bridge)
        _run("ip", "-n", self._bridge, "link", "add", "name", "bridge0", "type", "bridge")
        _run("ip", "-n", self._bridge, "link", "set", "bridge0", "up")
        for n, (name, boot_id) in enumerate(zip(self.names, self.boot_ids, strict=True)):
            boot_id.write_text(f"{uuid.UUID(int=n + 1, version=4)}\n")
            _run("ip", "netns", "add", name)
            _run(
                *("ip", "-n", self._bridge, "link", "add", "name", f"v{n}", "type", "veth"),
                *("peer", "name", "eth0", "netns", name),
            )
            _run("ip", "-n", self._bridge, "link", "set", f"v{n}", "master", "bridge0", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(n)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def cut(self, host: int) -> None:
        _run("ip", "-n", self._bridge, "link", "set", f"v{host}", "down")

    def slow(self, host: int) -> None:
        """4 Mbit a second, both ways."""
        _run("tc", "-n", self.names[host], "qdisc", "add", "dev", "eth0", "root", "tbf", *_SLOW)
        _run("tc", "-n", self._bridge, "qdisc", "add", "dev", f"v{host}", "root", "tbf", *_SLOW)

    def lose(self, host: int) -> None:
        """A tenth of the packets, both ways."""
        filters = ("tc", "-n", self.names[host])
        _run(*filters, "qdisc", "add", "dev", "eth0", "clsact")
        for way in ("ingress", "egress"):
            what = ("bpf", "da", "bytecode", _LOSES_A_TENTH)
            _run(*filters, "filter", "add", "dev", "eth0", way, *what)

    def mend(self, host: int) -> None:
        """The link is as in the beginning."""
        _run("ip", "-n", self._bridge, "link", "set", f"v{host}", "up")
        for end in ((self.names[host], "eth0"), (self._bridge, f"v{host}")):
            for what in ("root", "clsact"):  # of which it may have none
                command = ["tc", "-n", end[0], "qdisc", "del", "dev", end[1], what]
                subprocess.run(command, capture_output=True, timeout=20)

    def close(self) -> None:
        """Removes them; their processes must have ended."""
        for name in (*self.names, self._bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


class Job:
    """Processes of one ``jax.distributed``, two on each host of ``places``; the coordinator, at ``port``, is on the first. Each
    runs ``code``, after the prelude of ``launch`` as ``code_of`` gives it, on the run ``directory``, and prints into ``logs``.
    """

    EACH = 2

    def __init__(
        self, hosts: Hosts, places: Sequence[int], code: str, directory: Path, logs: Path, port: int
    ) -> None:
        self.places = places
        count = self.EACH * len(places)
        self.files = [logs / f"{port}.{index}.log" for index in range(count)]
        self.children: list[forked.Forked] = []
        for index, file in enumerate(self.files):
            host = places[index // self.EACH]
            more = (hosts.names[host], str(hosts.boot_ids[host]), str(host))
            arguments = (str(index), str(count), str(port), str(directory), *more)
            self.children.append(
                forked.start(code, *arguments, output=file, environment=with_devices(1))
            )

    def signal(self, place: int, number: signal.Signals) -> None:
        """Sends a signal to the processes of one host."""
        for child in self.children[place * self.EACH : (place + 1) * self.EACH]:
            child.send_signal(number)

    def ended(self, limit_secs: float) -> list[int]:
        """The exit codes, negative for signals; whoever is not done in time is killed, and has the code 124."""
        deadline, codes = time.monotonic() + limit_secs, list[int]()
        for child in self.children:
            try:
                codes.append(child.wait(max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                codes.append(124)
        for child in self.children:
            child.end()
        return codes

    def lines(self, index: int) -> list[str]:
        return self.files[index].read_text(errors="replace").splitlines()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
