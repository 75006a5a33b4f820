"""Bandwidth between pairs of nodes over TCP: pairs.py MIB NODE..., one task a node, standard library only.

Rounds of a tournament: in each round every node has one partner, so that no cable is shared by two transfers, and after
all rounds every pair has been measured once, both ways. Task i prints
`pair<TAB>a<TAB>b<TAB>GB/s` for the pairs it leads.
"""

import os
import socket
import sys
import time
from collections.abc import Iterator

PORT = 29400
CHUNK = 1 << 20


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """The circle method: lists of pairs (i, j), i < j, every pair once."""
    ring = [*range(size), -1] if size % 2 else [*range(size)]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = [sorted(pair) for pair in zip(ring[:half], reversed(ring[half:]))]
        yield [(a, b) for a, b in pairs if a >= 0]  # with an odd number, the partner of -1 rests
        ring = [ring[0], ring[-1], *ring[1:-1]]  # one stays, the others move on by one


def connect(host: str, port: int) -> socket.socket:
    """Connect to a partner that may not listen yet."""
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((host, port), timeout=60)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def send(to: socket.socket, size: int) -> None:
    """Send `size` bytes, then wait until the partner has read them all."""
    data = memoryview(bytes(CHUNK))
    sent = 0
    while sent < size:
        to.sendall(data[: min(CHUNK, size - sent)])
        sent += min(CHUNK, size - sent)
    to.recv(1)


def receive(where: socket.socket, size: int) -> None:
    """Read `size` bytes, then acknowledge them."""
    received = 0
    while received < size:
        data = where.recv(CHUNK)
        if not data:
            raise ConnectionError("the partner has gone")
        received += len(data)
    where.sendall(b"x")


def main(mib: int, nodes: list[str]) -> None:
    """Measure the pairs of this task."""
    me, size = int(os.environ["SLURM_PROCID"]), mib * 1024 * 1024
    for number, pairs in enumerate(rounds(len(nodes))):
        mine = [pair for pair in pairs if me in pair]
        if not mine:
            continue
        leader, other = mine[0]
        if me == other:
            with socket.create_server(("", PORT + number)) as server:
                where, _ = server.accept()
            with where:
                receive(where, size)
                send(where, size)
        else:
            with connect(nodes[other], PORT + number) as to:
                to.settimeout(300)
                began = time.monotonic()
                send(to, size)
                receive(to, size)
                seconds = time.monotonic() - began
            # Both ways, one after the other.
            print(f"pair\t{nodes[leader]}\t{nodes[other]}\t{2 * size / seconds / 1e9:.6g}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
