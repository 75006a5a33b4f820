"""Mistakes of people who have read the documentation and not the code: in a profile, or in a submission."""

from __future__ import annotations

from typing import NamedTuple

SECRET = "hf_abcdefghijklmnop"


class Mistake(NamedTuple):
    """What is done wrong: `old` of a good profile becomes `new`, or the words of a submission are others."""

    name: str
    old: str = ""
    new: str = ""
    words: tuple[str, ...] = ()
    """of `recipes submit`, before its own; the last of two options counts"""
    recipe: str = "tiny_llama3"
    caught: bool = True
    """what was seen; the one that is not caught stays in the list"""


def _key(name: str, line: str, table: str = "slurm") -> Mistake:
    """A line more in a table."""
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
    _key("QOS that is not mine", 'qos = "urgent"'),
    Mistake("partition with a shorter time limit", 'partition = "batch"', 'partition = "brief"'),
    Mistake("time over the QOS's limit", TIME, 'qos = "short"\ntime = "4:00:00"'),
    Mistake("time in words", TIME, 'time = "four hours"'),
    Mistake("time as 4h", TIME, 'time = "4h"'),
    Mistake("time as a number", TIME, "time = 240"),
    Mistake("time shorter than two saves", TIME, 'time = "0:30"'),
    Mistake("more GPUs than a node has", "gpus_per_node = 8", "gpus_per_node = 16"),
    Mistake("another kind of GPU", 'gpu = "h100"', 'gpu = "h200"'),
    Mistake("a GPU that nobody makes", 'gpu = "h100"', 'gpu = "h1000"'),
    _key("gres type that is not there", 'gpu_type = "a100"'),
    Mistake("GPUs requested by a word that is none", 'gpus = "gpus-per-node"', 'gpus = "gpu"'),
    _key("constraint that no node has", 'constraint = "ib"'),
    Mistake("more memory than a node has", 'mem = "8000"', 'mem = "2T"'),
    Mistake("memory with a space", 'mem = "8000"', 'mem = "64 GB"'),
    _key("more CPUs than a node has", "cpus_per_task = 32"),
    _key("MPI that Slurm has not", 'mpi = "openmpi"'),
    _key("reservation misspelt", 'options = ["--reservation=main"]'),
    _key("option of sbatch misspelt", 'options = ["--switchs=1"]'),
    _key("option without its dashes", 'options = ["reservation=maint"]'),
    _table("image that is not there", '[container]\nimage = "/tmp/no-such-image.sqsh"'),
    _table("image that is no image", '[container]\nimage = "IMAGE"')._replace(caught=False),
    _table("mount of a folder that is not there", '[container]\nimage = "IMAGE"\nmounts = ["/lustre:/lustre"]'),
    _table("mount without a colon", '[container]\nimage = "IMAGE"\nmounts = ["/tmp"]'),
    _table("Python that is not there", '[software]\npython = "/opt/nemo/bin/python"'),
    _table("Python 2 for the batch script", '[software]\nhost_python = "python2"'),
    _table("module that is unknown", '[software]\nmodules = ["cuda/99"]'),
    Mistake("network interface that is not there", 'interface = "eth0"', 'interface = "bond0"'),
    _key("HCA that is not there", 'hcas = "mlx5_0"', "network"),
    Mistake("relative folder for runs", RUNS, 'runs = "runs"'),
    Mistake("folder for runs that cannot be written", RUNS, 'runs = "/proc/runs"'),
    Mistake("folder for runs that nodes do not share", RUNS, 'runs = "/dev/shm/runs"'),
    _key("cache that is not there", 'cache = "/lustre/huggingface"', "folders"),
    Mistake("key misspelt", ACCOUNT, 'acount = "acct"'),
    Mistake("table misspelt", "[chain]", "[chian]"),
    Mistake("quotes in quotes", ACCOUNT, 'account = "my "lab""'),
    _table("token in [env]", f'[env]\nHF_TOKEN = "{SECRET}"'),
    _key("token in an option", f'options = ["--comment=HF_TOKEN={SECRET}"]'),
    _table("variable with a dash in its name", '[env]\nMY-VAR = "1"'),
    _table("variable of NCCL misspelt", '[env]\nNCCL_IB_HCS = "mlx5_0"')._replace(caught=False),
    _table("login node misspelt", '[login]\nhost = "no-such-host.invalid"'),
    Mistake("minus one attempts", "attempts = 3", "attempts = -1"),
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
    Mistake("data that are not there", words=("--data", "/lustre/no-such-corpus")),
    Mistake("relative --runs", words=("--runs", "runs")),
    Mistake("override misspelt", words=("trainer.max_stepz=10",)),
    Mistake("override without =", words=("trainer.max_steps", "10")),
    Mistake("token in an override", words=(f"log.wandb.token={SECRET}",)),
    Mistake("profile misspelt", words=("--cluster", "dgx_h10")),
)
