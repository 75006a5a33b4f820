"""Bandwidth over the links between nodes, by the transport of training where there is one. srun starts it on all nodes.

    pairs.py all                        an all-reduce over every task, as training has it (torch)
    pairs.py can TRANSPORT              whether this node has a transport
    pairs.py TRANSPORT MIB NAMES NODE...    every pair of nodes: nccl or gloo (torch), ib (ib_write_bw) or tcp

Rounds of a tournament: in each round every node has one partner, so that no cable is shared by two transfers, and after
all rounds every pair has been measured once. It prints
`bus<TAB>GB/s<TAB>how`, `can<TAB>node<TAB>why not` and `pair<TAB>a<TAB>b<TAB>GB/s<TAB>how`.
The standard library only, but for nccl and gloo, which need torch.
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
"""of the all-reduce over every task"""
ROUNDS = 5
WAIT_S = 60
"""for a partner that is still busy with the round before"""
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


def address(interface: str) -> str:
    """This node's IPv4 address on an interface; "" where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as inquiry:
        try:
            # SIOCGIFADDR of netdevice(7): the address stands after the name and the family.
            answer = fcntl.ioctl(inquiry.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def tcp_leads(partner: str, port: int, size: int, interface: str) -> tuple[float, str]:
    """Seconds of sending and receiving `size` bytes, by the partner's address on the interface where it has one."""
    with connect(partner, port) as first:
        # The name may lead over a management network; training takes the profile's interface.
        better = first.recv(64).decode().strip()
    with connect(better or partner, port) as to:
        to.settimeout(300)
        began = time.monotonic()
        send(to, size)
        receive(to, size)
        return time.monotonic() - began, f"TCP over {interface}" if better else "TCP by host name"


def tcp_follows(port: int, size: int, interface: str) -> None:
    """The other side of `tcp_leads`."""
    with socket.create_server(("", port)) as server:
        first, _ = server.accept()
        with first:
            first.sendall((address(interface) if interface else "").encode() + b"\n")
        where, _ = server.accept()
        with where:
            receive(where, size)
            send(where, size)


def ports() -> list[str]:
    """The HCAs whose first port is an active InfiniBand or RoCE port."""
    states = {path.split("/")[4]: path for path in sorted(glob.glob("/sys/class/infiniband/*/ports/1/state"))}
    return [name for name, path in states.items() if "ACTIVE" in open(path).read()]


def ib_write(hca: str, port: int, mib: int, partner: str = "") -> float:
    """GB/s of ib_write_bw through one HCA: the server, or with a partner its client; 0 where it does not end well."""
    words = ["ib_write_bw", "-d", hca, "-p", str(port), "-s", str(1 << 20), "-n", str(mib), "--report_gbits", "-F"]
    end = time.monotonic() + WAIT_S
    while True:
        done = subprocess.run([*words, *([partner] if partner else [])], capture_output=True, text=True, timeout=300)
        # #bytes #iterations peak average rate; the averages are gigabits.
        match = re.search(rf"^\s*{1 << 20}\s+\d+\s+[\d.]+\s+([\d.]+)", done.stdout, re.MULTILINE)
        if match or not partner or time.monotonic() > end:
            return float(match[1]) / 8 if match else 0.0
        time.sleep(0.2)  # its server does not listen yet


def nccl_log(folder: str) -> None:
    """Let NCCL write into `folder` which network it takes."""
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=folder + "/nccl.%p")


def network(folder: str) -> str:
    """` over IB`, ` over Socket`, ...: what NCCL wrote; "" where it wrote nothing, as gloo does."""
    for name in glob.glob(folder + "/nccl.*"):
        with open(name, errors="replace") as log:
            match = re.search(r"Using network (\S+)", log.read())
        if match:
            return " over " + match[1]
    return ""


def all_reduce(backend: str, rank: int, size: int, data_bytes: int, store=None) -> tuple[float, str]:
    """Bus bandwidth in GB/s, as nccl-tests define it, and by which network; a group of its own that ends here."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["SLURM_LOCALID"])) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        nccl_log(folder)
        dist.init_process_group(backend, rank=rank, world_size=size, store=store, timeout=timedelta(seconds=300))
        data = torch.ones(data_bytes // 4, device=device)
        seconds = min(_once(data, backend) for _ in range(ROUNDS))
        how = backend + network(folder)
        dist.destroy_process_group()
    # A ring all-reduce of n ranks sends 2 (n-1)/n of the data over each link: nccl-tests, doc/PERFORMANCE.md.
    return data_bytes / seconds * 2 * (size - 1) / size / 1e9, how


def _once(data, backend: str) -> float:
    import torch
    import torch.distributed as dist

    dist.barrier()
    began = time.monotonic()
    dist.all_reduce(data)
    if backend == "nccl":
        torch.cuda.synchronize()
    return time.monotonic() - began


def of_all() -> None:
    """The all-reduce over every task; the first prints."""
    import torch

    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    gb_s, how = all_reduce(backend, rank, size, BYTES[backend])
    if rank == 0:
        print(f"bus\t{gb_s:.6g}\t{how}", flush=True)


def lacks(transport: str) -> str:
    """What this node lacks for a transport; "" = nothing."""
    if transport == "ib":
        return "no ib_write_bw" if not shutil.which("ib_write_bw") else "" if ports() else "no active InfiniBand port"
    try:
        import torch
    except ImportError:
        return "no torch"
    return "" if torch.cuda.is_available() and torch.distributed.is_nccl_available() else "no GPU that torch can use"


def torch_pair(backend: str, leads: bool, master: str, port: int, size: int) -> tuple[float, str]:
    """An all-reduce over all ranks of both nodes, each pair in a group of its own."""
    import torch.distributed as dist

    per_node = int(os.environ["SLURM_NTASKS"]) // int(os.environ["SLURM_NNODES"])
    local, world = int(os.environ["SLURM_LOCALID"]), 2 * per_node
    rank = local if leads else per_node + local
    store = dist.TCPStore(master, port, world, rank == 0, timedelta(seconds=300))  # pyright: ignore[reportPrivateImportUsage]
    measured = all_reduce(backend, rank, world, size, store)
    return measured if rank == 0 else (0.0, "")


def ib_pair(leads: bool, partner: str, port: int, mib: int, names: str) -> tuple[float, str]:
    """The slowest HCA of the pair: training waits for it."""
    hcas = [name for name in names.split(",") if name] or ports()
    speeds = {}
    for index, hca in enumerate(hcas):
        speeds[hca] = ib_write(hca, port + 200 * (index + 1), mib, partner if leads else "")
    slowest = min(speeds, key=lambda hca: speeds[hca])
    return speeds[slowest], "ib_write_bw, slowest " + slowest


def tcp_pair(leads: bool, partner: str, port: int, mib: int, interface: str) -> tuple[float, str]:
    """Both ways, one after the other."""
    size = mib << 20
    if not leads:
        tcp_follows(port, size, interface)
        return 0.0, ""
    seconds, how = tcp_leads(partner, port, size, interface)
    return 2 * size / seconds / 1e9, how


def of_pairs(transport: str, mib: int, names: str, nodes: list[str]) -> None:
    """Measure the pairs of this node; the first task of a pair's leader prints."""
    me = int(os.environ["SLURM_NODEID"])
    for number, pairs in enumerate(rounds(len(nodes))):
        mine = [pair for pair in pairs if me in pair]
        if not mine:
            continue
        leader, other = mine[0]
        leads, partner, port = me == leader, nodes[other], PORT + number
        if transport in ("nccl", "gloo"):
            gb_s, how = torch_pair(transport, leads, nodes[leader], port, mib << 20)
        elif transport == "ib":
            gb_s, how = ib_pair(leads, partner, port, mib, names)
        else:
            gb_s, how = tcp_pair(leads, partner, port, mib, names)
        if leads and how:
            print(f"pair\t{nodes[leader]}\t{nodes[other]}\t{gb_s:.6g}\t{how}", flush=True)


def main(words: list[str]) -> None:
    """As the file's first lines say."""
    if words[0] == "all":
        of_all()
    elif words[0] == "can":
        print(f"can\t{os.environ.get('SLURMD_NODENAME', '')}\t{lacks(words[1])}", flush=True)
    else:
        of_pairs(words[0], int(words[1]), words[2], words[3:])


if __name__ == "__main__":
    main(sys.argv[1:])
