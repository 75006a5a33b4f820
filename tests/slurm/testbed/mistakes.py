"""Typical mistakes in a profile or a submission."""

from __future__ import annotations

from typing import NamedTuple

SECRET = "hf_abcdefghijklmnop"


class Mistake(NamedTuple):
    """A mistake: `old` in a good profile becomes `new`, or `recipes submit` gets other arguments."""

    name: str
    old: str = ""
    new: str = ""
    words: tuple[str, ...] = ()
    """arguments of `recipes submit`, before the test's own; the last of two equal options counts"""
    recipe: str = "tiny_llama3"
    caught: bool = True
    """the mistake is caught before submission"""


def _key(name: str, line: str, table: str = "slurm") -> Mistake:
    """Add a line to a table."""
    return Mistake(name, f"[{table}]\n", f"[{table}]\n{line}\n")


def _table(name: str, text: str) -> Mistake:
    return Mistake(name, "[chain]\n", f"{text}\n[chain]\n")


ACCOUNT, TIME, RUNS = 'account = "acct"', 'time = "10:00"', 'runs = "RUNS"'
SMALL = 'partition = "small"'

PROFILE = (
    Mistake("partition misspelt", 'partition = "batch"', 'partition = "bach"'),
    Mistake("partition of another account", 'partition = "batch"', 'partition = "closed"'),
    Mistake("partition that is down", 'partition = "batch"', 'partition = "broken"'),
    Mistake("account misspelt", ACCOUNT, 'account = "akt"'),
    _key("QOS without an association", 'qos = "urgent"'),
    Mistake("partition with a shorter time limit", 'partition = "batch"', 'partition = "brief"'),
    Mistake("time over the QOS's limit", TIME, 'qos = "short"\ntime = "4:00:00"'),
    Mistake("time in words", TIME, 'time = "four hours"'),
    Mistake("time as 4h", TIME, 'time = "4h"'),
    Mistake("time as a number", TIME, "time = 240"),
    Mistake("time shorter than two saves", TIME, 'time = "0:30"'),
    Mistake("more GPUs than a node has", "gpus_per_node = 8", "gpus_per_node = 16"),
    Mistake("another kind of GPU", 'gpu = "h100"', 'gpu = "h200"'),
    Mistake("unknown GPU", 'gpu = "h100"', 'gpu = "h1000"'),
    _key("gres type that does not exist", 'gpu_type = "a100"'),
    Mistake("unknown form of the GPU request", 'gpus = "gpus-per-node"', 'gpus = "gpu"'),
    _key("constraint that no node has", 'constraint = "ib"'),
    Mistake("more memory than a node has", 'mem = "8000"', 'mem = "2T"'),
    Mistake("memory with a space", 'mem = "8000"', 'mem = "64 GB"'),
    _key("more CPUs than a node has", "cpus_per_task = 32"),
    _key("MPI plug-in that Slurm lacks", 'mpi = "openmpi"'),
    _key("reservation misspelt", 'options = ["--reservation=main"]'),
    _key("option of sbatch misspelt", 'options = ["--switchs=1"]'),
    _key("option without its dashes", 'options = ["reservation=maint"]'),
    _table("image that does not exist", '[container]\nimage = "/tmp/no-such-image.sqsh"'),
    _table("file that is not an image", '[container]\nimage = "IMAGE"')._replace(caught=False),
    _table("mount of a missing folder", '[container]\nimage = "IMAGE"\nmounts = ["/lustre:/lustre"]'),
    _table("mount without a colon", '[container]\nimage = "IMAGE"\nmounts = ["/tmp"]'),
    _table("Python that does not exist", '[software]\npython = "/opt/nemo/bin/python"'),
    _table("Python 2 for the batch script", '[software]\nhost_python = "python2"'),
    _table("unknown module", '[software]\nmodules = ["cuda/99"]'),
    Mistake("network interface that does not exist", 'interface = "eth0"', 'interface = "bond0"'),
    _key("HCA that does not exist", 'hcas = "mlx5_0"', "network"),
    Mistake("relative folder for runs", RUNS, 'runs = "runs"'),
    Mistake("read-only folder for runs", RUNS, 'runs = "/proc/runs"'),
    Mistake("folder for runs not shared by the nodes", RUNS, 'runs = "/dev/shm/runs"'),
    _key("cache that does not exist", 'cache = "/lustre/huggingface"', "folders"),
    Mistake("key misspelt", ACCOUNT, 'acount = "acct"'),
    Mistake("table misspelt", "[chain]", "[chian]"),
    Mistake("quotes in quotes", ACCOUNT, 'account = "my "lab""'),
    _table("token in [env]", f'[env]\nHF_TOKEN = "{SECRET}"'),
    _key("token in an option", f'options = ["--comment=HF_TOKEN={SECRET}"]'),
    _table("variable with a dash in its name", '[env]\nMY-VAR = "1"'),
    _table("variable of NCCL misspelt", '[env]\nNCCL_IB_HCS = "mlx5_0"')._replace(caught=False),
    _table("login node misspelt", '[login]\nhost = "no-such-host.invalid"'),
    Mistake("-1 attempts", "attempts = 3", "attempts = -1"),
)

SUBMISSION = (
    Mistake("recipe misspelt", recipe="tiny_lama3"),
    Mistake("size at which no layout of the recipe fits", words=("--nodes", "7")),
    Mistake("more nodes than the cluster has", recipe="llama3_8b_pretrain_h100_bf16", words=("--nodes", "16")),
    Mistake("more nodes than the partition allows", 'partition = "batch"', SMALL, words=("--nodes", "2")),
    Mistake(
        "more GPUs than the QOS allows",
        'partition = "batch"',
        'partition = "batch"\nqos = "narrow"',
        words=("--nodes", "2"),
    ),
    Mistake(
        "more jobs than the QOS allows",
        'partition = "batch"',
        'partition = "batch"\nqos = "few"',
        words=("--attempts", "9"),
    ),
    Mistake("--time in words", words=("--time", "tomorrow")),
    Mistake("--time over the limit", 'partition = "batch"', SMALL, words=("--time", "3-0")),
    Mistake("data folder that does not exist", words=("--data", "/lustre/no-such-corpus")),
    Mistake("relative --runs", words=("--runs", "runs")),
    Mistake("override misspelt", words=("trainer.max_stepz=10",)),
    Mistake("override without =", words=("trainer.max_steps", "10")),
    Mistake("token in an override", words=(f"log.wandb.token={SECRET}",)),
    Mistake("profile misspelt", words=("--cluster", "dgx_h10")),
)
