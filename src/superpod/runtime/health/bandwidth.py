"""Measure the bandwidth between nodes, if possible with the transport that training uses. srun runs it on all nodes.

    bandwidth.py all                            all-reduce over all tasks, as in training (torch)
    bandwidth.py obstacle TRANSPORT             why a transport is not available on this node
    bandwidth.py TRANSPORT MIB NAMES NODE...    all pairs of nodes: nccl or gloo (torch), ib (ib_write_bw) or tcp

The pairs are measured in the rounds of a round-robin tournament: in each round, every node has one partner, so no two
transfers share a link, and after all rounds every pair has been measured once. Prints `bus<TAB>GB/s<TAB>transport`,
`obstacle<TAB>node<TAB>reason` and `pair<TAB>a<TAB>b<TAB>GB/s<TAB>transport`. Standard library only, except for nccl and
gloo, which need torch.
"""

import fcntl
import glob
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta

BYTES = {"nccl": 256 << 20, "gloo": 8 << 20}
"""Bytes of the all-reduce, by backend."""
ROUNDS = 5
WAIT_S = 60
"""Maximum seconds to wait for a partner that is still in the previous round."""
PORT = 29400
CHUNK = 1 << 20


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the rounds of a round-robin tournament of `size` nodes (circle method) as lists of pairs (i, j), i < j."""
    ring = [*range(size), -1] if size % 2 else [*range(size)]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = [sorted(pair) for pair in zip(ring[:half], reversed(ring[half:]))]
        yield [(a, b) for a, b in pairs if a >= 0]  # with an odd number of nodes, the partner of -1 is idle
        ring = [ring[0], ring[-1], *ring[1:-1]]  # the first stays, the others rotate by one


def connect(host: str, port: int) -> socket.socket:
    """Connect to a partner, which may not be listening yet. Raises OSError if it is not after WAIT_S seconds."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=WAIT_S)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def send(to: socket.socket, size: int) -> None:
    """Send `size` bytes, then wait until the partner has received all of them."""
    data = memoryview(bytes(CHUNK))
    sent_bytes = 0
    while sent_bytes < size:
        to.sendall(data[: min(CHUNK, size - sent_bytes)])
        sent_bytes += min(CHUNK, size - sent_bytes)
    to.recv(1)


def receive(where: socket.socket, size: int) -> None:
    """Receive `size` bytes, then acknowledge them. Raises ConnectionError if the partner closes the connection."""
    received = 0
    while received < size:
        data = where.recv(CHUNK)
        if not data:
            raise ConnectionError("the partner closed the connection")
        received += len(data)
    where.sendall(b"x")


def ipv4_address(interface: str) -> str:
    """Return the IPv4 address of a network interface of this node; "" if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # SIOCGIFADDR of netdevice(7): the address follows the name and the family.
            response = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(response[20:24])


def run_tcp_client(partner: str, port: int, size: int, interface: str) -> tuple[float, str]:
    """Send and receive `size` bytes; return the seconds and a description of the transport.

    The connection uses the partner's address on the interface, if it has one.
    """
    with connect(partner, port) as first:
        # The host name may resolve to a management network, but training uses the profile's interface.
        reply = first.recv(64).decode().strip()
    with connect(reply or partner, port) as to:
        to.settimeout(300)
        began = time.monotonic()
        send(to, size)
        receive(to, size)
        return time.monotonic() - began, f"TCP over {interface}" if reply else "TCP by host name"


def run_tcp_server(port: int, size: int, interface: str) -> None:
    """Receive and send `size` bytes as the server of `run_tcp_client`."""
    with socket.create_server(("", port)) as server:
        first, _ = server.accept()
        with first:
            first.sendall((ipv4_address(interface) if interface else "").encode() + b"\n")
        where, _ = server.accept()
        with where:
            receive(where, size)
            send(where, size)


def active_hcas() -> list[str]:
    """Return the names of the HCAs (InfiniBand or RoCE) whose first port is active."""
    states = {path.split("/")[4]: path for path in sorted(glob.glob("/sys/class/infiniband/*/ports/1/state"))}
    return [name for name, path in states.items() if "ACTIVE" in open(path).read()]


def ib_write(hca: str, port: int, mib: int, partner: str = "") -> float:
    """Run ib_write_bw with `mib` MiB on one HCA; return GB/s, 0 on failure. Without a partner, it is the server."""
    command = ["ib_write_bw", "-d", hca, "-p", str(port), "-s", str(1 << 20), "-n", str(mib), "--report_gbits", "-F"]
    if partner:
        command.append(partner)
    end = time.monotonic() + WAIT_S
    while True:
        process = subprocess.run(command, capture_output=True, text=True, timeout=300)
        # Columns: bytes, iterations, peak, average in Gbit/s, message rate.
        match = re.search(rf"^\s*{1 << 20}\s+\d+\s+[\d.]+\s+([\d.]+)", process.stdout, re.MULTILINE)
        if match or not partner or time.monotonic() > end:
            return float(match[1]) / 8 if match else 0.0
        time.sleep(0.2)  # the server is not listening yet


def used_network(folder: str) -> str:
    """Return the network in the NCCL log in `folder`, such as ` over IB` or ` over Socket`; "" if there is no log."""
    for name in glob.glob(folder + "/nccl.*"):
        with open(name, errors="replace") as log:
            match = re.search(r"Using network (\S+)", log.read())
        if match:
            return " over " + match[1]
    return ""


def all_reduce(backend: str, rank: int, size: int, data_bytes: int, store=None) -> tuple[float, str]:
    """Run an all-reduce of `data_bytes` in a new process group; return the bus bandwidth in GB/s and the transport."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["SLURM_LOCALID"])) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=folder + "/nccl.%p")
        dist.init_process_group(backend, rank=rank, world_size=size, store=store, timeout=timedelta(seconds=300))
        data = torch.ones(data_bytes // 4, device=device)
        seconds = min(_time_all_reduce(data, backend) for _ in range(ROUNDS))
        how = backend + used_network(folder)
        dist.destroy_process_group()
    # A ring all-reduce of n ranks sends 2 (n-1)/n of the data over each link (nccl-tests, doc/PERFORMANCE.md).
    return data_bytes / seconds * 2 * (size - 1) / size / 1e9, how


def _time_all_reduce(data, backend: str) -> float:
    """Return the seconds that an all-reduce of the tensor `data` takes."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    began = time.monotonic()
    dist.all_reduce(data)
    if backend == "nccl":
        torch.cuda.synchronize()
    return time.monotonic() - began


def measure_all() -> None:
    """Measure the all-reduce over all tasks; the first task prints the result."""
    import torch

    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    gb_s, how = all_reduce(backend, rank, size, BYTES[backend])
    if rank == 0:
        print(f"bus\t{gb_s:.6g}\t{how}", flush=True)


def find_obstacle(transport: str) -> str:
    """Return the reason why a transport (ib or nccl) is not available on this node; "" if it is available."""
    if transport == "ib":
        if not shutil.which("ib_write_bw"):
            return "no ib_write_bw"
        return "" if active_hcas() else "no active InfiniBand port"
    try:
        import torch
    except ImportError:
        return "no torch"
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        return ""
    return "no GPU usable by torch"


def measure_torch_pair(backend: str, leads: bool, master: str, port: int, size: int) -> tuple[float, str]:
    """Return the bus bandwidth in GB/s of an all-reduce over all ranks of two nodes, and the transport.

    `leads` = this is the node of rank 0. Other ranks return 0 and "".
    """
    import torch.distributed as dist

    per_node = int(os.environ["SLURM_NTASKS"]) // int(os.environ["SLURM_NNODES"])
    local, world = int(os.environ["SLURM_LOCALID"]), 2 * per_node
    rank = local if leads else per_node + local
    store = dist.TCPStore(master, port, world, rank == 0, timedelta(seconds=300))  # pyright: ignore[reportPrivateImportUsage]
    measurement = all_reduce(backend, rank, world, size, store)
    return measurement if rank == 0 else (0.0, "")


def measure_ib_pair(leads: bool, partner: str, port: int, mib: int, names: str) -> tuple[float, str]:
    """Measure all HCAs of a pair of nodes; return the GB/s and the name of the slowest, for which training waits."""
    hcas = [name for name in names.split(",") if name] or active_hcas()
    speeds = {}
    for index, hca in enumerate(hcas):
        speeds[hca] = ib_write(hca, port + 200 * (index + 1), mib, partner if leads else "")
    slowest = min(speeds, key=lambda hca: speeds[hca])
    return speeds[slowest], "ib_write_bw, slowest " + slowest


def measure_tcp_pair(leads: bool, partner: str, port: int, mib: int, interface: str) -> tuple[float, str]:
    """Measure TCP in both directions, one after the other; return GB/s and the transport, 0 and "" on the server."""
    size = mib << 20
    if not leads:
        run_tcp_server(port, size, interface)
        return 0.0, ""
    seconds, how = run_tcp_client(partner, port, size, interface)
    return 2 * size / seconds / 1e9, how


def measure_pairs(transport: str, mib: int, names: str, nodes: list[str]) -> None:
    """Measure all pairs that contain this node; the first task on the first node of each pair prints the result."""
    me = int(os.environ["SLURM_NODEID"])
    for number, pairs in enumerate(rounds(len(nodes))):
        own_pairs = [pair for pair in pairs if me in pair]
        if not own_pairs:
            continue
        leader, other = own_pairs[0]
        leads, partner, port = me == leader, nodes[other], PORT + number
        if transport in ("nccl", "gloo"):
            gb_s, how = measure_torch_pair(transport, leads, nodes[leader], port, mib << 20)
        elif transport == "ib":
            gb_s, how = measure_ib_pair(leads, partner, port, mib, names)
        else:
            gb_s, how = measure_tcp_pair(leads, partner, port, mib, names)
        if leads and how:
            print(f"pair\t{nodes[leader]}\t{nodes[other]}\t{gb_s:.6g}\t{how}", flush=True)


def main(arguments: list[str]) -> None:
    """Run a measurement; the arguments are described at the top of this file."""
    if arguments[0] == "all":
        measure_all()
    elif arguments[0] == "obstacle":
        print(f"obstacle\t{os.environ.get('SLURMD_NODENAME', '')}\t{find_obstacle(arguments[1])}", flush=True)
    else:
        measure_pairs(arguments[0], int(arguments[1]), arguments[2], arguments[3:])


if __name__ == "__main__":
    main(sys.argv[1:])
