"""A loopback connection that carries no more than so many bits a second."""

from __future__ import annotations

import socket
import threading
import time

from kvfold.errors import TransferError

_CHUNK = 2**14
"""Bytes between two looks at the clock."""
_SPIN = 5e-4
"""Seconds before a chunk is due in which the clock is watched: a sleep may be as much too long."""
_PATIENCE = 30.0
"""Seconds beyond the time a message should take, after which it is given up."""


def send_paced(message: bytes, bits_per_second: float) -> float:
    """Send a message through a TCP connection of this machine at a stated bandwidth.

    Bytes are held back at the sender, so that none comes before a link of that bandwidth would have
    let it through; latency is the loopback's own, which is next to none.

    Args:
        message: What is sent.
        bits_per_second: Bandwidth, payload only.

    Returns:
        Seconds from the first byte's sending to the last one's arrival.

    Raises:
        TransferError: When the connection breaks or stalls.
    """
    arrived: list[float] = []
    patience = _PATIENCE + 8 * len(message) / bits_per_second
    with socket.create_server(("127.0.0.1", 0)) as server:
        taking = threading.Thread(
            target=_take, args=(server, len(message), patience, arrived), daemon=True
        )
        taking.start()
        with socket.create_connection(server.getsockname(), timeout=patience) as sending:
            started = time.perf_counter()
            _send(sending, message, bits_per_second, started)
            taking.join(patience)
    if not arrived:
        raise TransferError(
            f"{len(message)} bytes did not arrive over loopback in {patience:.0f} s: measure on a "
            "machine with less to do"
        )
    return arrived[0] - started


def _send(sending: socket.socket, message: bytes, bits_per_second: float, started: float) -> None:
    view = memoryview(message)
    for start in range(0, len(view), _CHUNK):
        part = view[start : start + _CHUNK]
        # A chunk has gone through the link when its last bit has.
        due = started + 8 * (start + len(part)) / bits_per_second
        while (left := due - time.perf_counter()) > 0:
            if left > _SPIN:
                time.sleep(left - _SPIN)
        sending.sendall(part)


def _take(server: socket.socket, count: int, patience: float, arrived: list[float]) -> None:
    server.settimeout(patience)
    room = bytearray(2**18)
    try:
        taking, _ = server.accept()
        with taking:
            taking.settimeout(patience)
            while count > 0 and (found := taking.recv_into(room)):
                count -= found
    except OSError:
        return
    if count == 0:
        arrived.append(time.perf_counter())
