"""Two network namespaces of this machine, joined by a link that carries no more than a stated rate.

Linux, as root: a veth pair whose two ends are each held by `tc`'s token bucket (tbf). No delay is
added. Nothing outside the two namespaces is changed, and both are removed however the program ends,
unless it is killed outright; then `ip netns delete NAME` does.

python bench/link.py take ADDRESS          print the bits a second at which bytes come
python bench/link.py send ADDRESS BYTES    send so many
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType

DEVICE = "link"
"""Name of the link's end, in both namespaces."""
ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Of the first and the second end."""
PORT = 5001
"""That bytes are sent to when the link is measured."""

BURST_SECONDS = 1e-3
"""Of the rate, that may pass unheld: the kernel's clock needs some."""
LEAST_BURST, MOST_BURST = 2**14, 2**18
"""Bytes that may pass unheld whatever the rate: a packet must, and a message must not."""
QUEUE_SECONDS = 0.05
"""That a packet may wait for its turn."""
MEASURED_SECONDS, LEAST_MEASURED = 0.2, 2**17
"""That a measurement of the rate is to take, and the bytes it sends at least."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LinkError(Exception):
    """A link that cannot be had here; says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link that is there."""

    first: str
    """Namespace of one end."""
    second: str
    """Namespace of the other."""

    def inside(self, namespace: str, *command: str) -> list[str]:
        """A command that runs another one in a namespace."""
        return ["ip", "netns", "exec", namespace, *command]

    def limit(self, rate: float) -> None:
        """Let both directions carry so many bits a second."""
        burst = min(max(LEAST_BURST, round(rate / 8 * BURST_SECONDS)), MOST_BURST)
        queue = burst + round(rate / 8 * QUEUE_SECONDS)
        for namespace in (self.first, self.second):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", DEVICE, "root", "tbf",
                 "rate", f"{rate:.0f}bit", "burst", f"{burst}b", "limit", f"{queue}b")  # fmt: skip

    def carried(self, rate: float) -> float:
        """Bits a second that plain bytes pass at, from the first end to the second."""
        here = (sys.executable, __file__)
        count = str(max(LEAST_MEASURED, round(rate / 8 * MEASURED_SECONDS)))
        take = self.inside(self.second, *here, "take", ADDRESSES[1])
        with subprocess.Popen(take, stdout=subprocess.PIPE, text=True) as taking:
            try:
                assert taking.stdout is not None
                taking.stdout.readline()
                _run(*self.inside(self.first, *here, "send", ADDRESSES[1], count))
                return float(taking.stdout.readline())
            finally:
                taking.kill()


@contextmanager
def joined() -> Iterator[Link]:
    """Make a link; it is gone afterwards.

    Raises:
        LinkError: When this system does not let us.
    """
    _check()
    names = tuple(f"kvfold-{os.getpid()}-{end}" for end in ("first", "second"))
    with ExitStack() as made:
        for name in names:
            made.callback(_run, "ip", "netns", "delete", name, check=False)
            _run("ip", "netns", "add", name)
        ends = [["name", DEVICE, "netns", name] for name in names]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                _run("ip", "-n", name, "link", "set", "dev", device, "up")
        yield Link(*names)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have signals that would end the program at once end it by way of its clean-up."""

    def end(number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check() -> None:
    if not sys.platform.startswith("linux"):
        raise LinkError(f"network namespaces are Linux's, and this is {sys.platform}: use Linux")
    if os.geteuid() != 0:
        raise LinkError("network namespaces are made by root alone: run this with sudo")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise LinkError(f"there is no program {program!r} here: install iproute2")


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise LinkError(
            f"`{' '.join(command[:4])}` failed ({said}): use a machine, or a "
            "container with the capabilities NET_ADMIN and SYS_ADMIN, where this is permitted"
        )


def _take(address: str) -> None:
    with socket.create_server((address, PORT)) as server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        taking, _ = server.accept()
    with taking:
        room = bytearray(2**20)
        # What comes first starts the clock, and is not counted: it was not timed.
        taking.recv_into(room)
        count, begin = 0, time.perf_counter()
        while found := taking.recv_into(room):
            count += found
        sys.stdout.write(f"{8 * count / (time.perf_counter() - begin)}\n")


def _send(address: str, count: int) -> None:
    with socket.create_connection((address, PORT)) as sending:
        sending.sendall(bytes(count))


def main(arguments: Sequence[str]) -> None:
    """Do what the command line asks for."""
    role, address, *rest = arguments
    if role == "take":
        _take(address)
    else:
        _send(address, int(rest[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
