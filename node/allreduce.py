"""A short all-reduce over all tasks of an srun: prints `bus<TAB>GB/s<TAB>backend`, GB/s as in nccl-tests."""

import os
import time

BYTES = {"nccl": 256 << 20, "gloo": 8 << 20}
ROUNDS = 5


def main() -> None:
    """Measure; task 0 prints the result."""
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", int(os.environ["SLURM_LOCALID"])) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=size)
    data = torch.ones(BYTES[backend] // 4, device=device)
    seconds = min(_once(data, backend) for _ in range(ROUNDS))
    if rank == 0:
        # A ring all-reduce of n ranks sends 2 (n-1)/n of the data over each link: nccl-tests, doc/PERFORMANCE.md.
        print(f"bus\t{BYTES[backend] / seconds * 2 * (size - 1) / size / 1e9:.6g}\t{backend}", flush=True)
    dist.destroy_process_group()


def _once(data, backend: str) -> float:
    import torch
    import torch.distributed as dist

    dist.barrier()
    began = time.monotonic()
    dist.all_reduce(data)
    if backend == "nccl":
        torch.cuda.synchronize()
    return time.monotonic() - began


if __name__ == "__main__":
    main()
