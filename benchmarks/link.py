"""The wire between ranks: loopback, or 1 Gbit/s or 100 Mbit/s between two.

The slow link is two network namespaces joined by a veth pair, with a token bucket (`tc ... tbf`) on either end. It
needs root on Linux, and iproute2. What the link really carries is measured before it is used.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

ADDRESSES = ("10.77.0.1", "10.77.0.2")
SHAPING = ("burst", "256kb", "latency", "50ms")
RATE_BYTES = {"1gbit": 64 << 20, "100mbit": 16 << 20}  # sent to measure
MOST_RANKS = 8  # on loopback

RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5201)) as server:
    print("ready", flush=True)
    peer, _ = server.accept()
    peer.recv(1); began = time.perf_counter(); size = 1
    while data := peer.recv(1 << 20): size += len(data)
    print(size * 8 / (time.perf_counter() - began))
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5201)) as peer: peer.sendall(bytes(int(sys.argv[2])))
"""


@dataclass(frozen=True)
class Link:
    """`prefixes[r]` goes before the command of rank r, `variables[r]` into its environment."""

    name: str
    prefixes: tuple[Sequence[str], ...]
    variables: tuple[dict[str, str], ...]
    bits_per_s: float | None = None  # as measured


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextlib.contextmanager
def loopback() -> Iterator[Link]:
    one = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    yield Link("loopback", ((),) * MOST_RANKS, (one,) * MOST_RANKS)


@contextlib.contextmanager
def shaped(rate: str) -> Iterator[Link]:
    """Two namespaces and a link of this rate between them, gone at the end. Raises SystemExit with what is missing."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        lack = f"no {' and no '.join(missing)} (iproute2)" if missing else "not root"
        raise SystemExit(f"--link {rate} makes network namespaces, which needs root and iproute2: {lack}")
    names = [f"fzbench{os.getpid()}-{rank}" for rank in range(2)]
    ends = [f"fzb{rank}" for rank in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _run("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", "rate", rate, *SHAPING)
        prefixes = tuple(("ip", "netns", "exec", name) for name in names)
        variables = tuple({"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": end} for end in ends)
        yield Link(rate, prefixes, variables, _measured(prefixes, RATE_BYTES[rate]))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


LINKS: dict[str, Callable[[], AbstractContextManager[Link]]] = {
    "loopback": loopback,
    **{rate: partial(shaped, rate) for rate in RATE_BYTES},
}


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"a shaped --link: `{' '.join(command)}` is not permitted here: {done.stderr.strip()}")


def _measured(prefixes: Sequence[Sequence[str]], nbytes: int) -> float:
    """Bits a second that one TCP connection carries from rank 1 to rank 0."""
    receive = [*prefixes[0], sys.executable, "-c", RECEIVE, ADDRESSES[0]]
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        time.sleep(0.1)
        subprocess.run([*prefixes[1], sys.executable, "-c", SEND, ADDRESSES[0], str(nbytes)], check=True)
        return float(receiver.stdout.readline())
