"""Every key of a cluster profile, with its allowed values. Imports pydantic: reach it through `profiles.load`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from superpod.common import collection
from superpod.common.files import JsonObject
from superpod.errors import did_you_mean
from superpod.planner import hardware
from superpod.slurm.preflight import reserved_variables, sbatch_options
from superpod.slurm.profiles.profile_values import (
    CHECKS,
    CpuBind,
    Event,
    GpuForm,
    Mail,
    Mpi,
    Network,
    Topology,
    one_line,
    seconds,
)


def _time(value: str) -> str:
    try:
        seconds(value)
    except ValueError:
        raise ValueError('takes a time of Slurm, such as "4:00:00" or "1-12:00:00"') from None
    return value


def _memory(value: str) -> str:
    if not re.fullmatch(r"\d+[KMGT]?", value):
        raise ValueError('takes a size of Slurm, such as "0" (all of the node) or "900G"')
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("takes an absolute path")
    return one_line(value)


def _path_or_none(value: str) -> str:
    return _absolute(value) if value else value


def _mount(value: str) -> str:
    outside, inside, flags, *more = [*value.split(":"), "", ""]
    paths = outside.startswith("/") and inside.startswith("/")
    if "," in value or not paths or any(more) or flags.startswith("/"):
        raise ValueError('takes mounts as "/outside:/inside" or "/outside:/inside:ro": no path has a comma or a colon')
    return one_line(value)


def _gpu(value: str) -> str:
    known = list(hardware.builtin().nodes)
    if value not in known:
        raise ValueError(f"is one of {', '.join(known)}; {did_you_mean(value, known)}".rstrip("; "))
    return value


def _fabric(value: str) -> str:
    known = list(hardware.builtin().fabrics)
    if value and value not in known:
        raise ValueError(f"is one of {', '.join(known)}; {did_you_mean(value, known)}".rstrip("; "))
    return value


def _check(value: str) -> str:
    known = [*CHECKS, *collection.checks(CHECKS)]
    if value not in known:
        *names, last = map(repr, known)
        raise ValueError(f"is one of {', '.join(names)} or {last}")
    return value


def _environment(values: dict[str, str]) -> dict[str, str]:
    from superpod.common.redaction import is_secret_name, redact_text

    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"has the name {name!r}, which no shell can export; allowed: letters, digits and _")
        if "\0" in value:
            raise ValueError(f"has a zero byte in {name}")
        if problem := reserved_variables.problem(name):
            raise ValueError(problem)
        if is_secret_name(name) or redact_text(value) != value:
            raise ValueError(f"would write the secret {name} into job files; export it where you call `recipes submit`")
    return values


def _option(value: str) -> str:
    if not re.match(r"--[a-z][a-z-]*(=|$)", value):
        raise ValueError('takes options of sbatch, such as "--reservation=mine"')
    if problem := sbatch_options.problem(value):
        raise ValueError(problem)
    return one_line(value)


def _variable(value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("takes the name of a variable, such as SUPERPOD_WEBHOOK, and not the address, a secret")
    return value


def _secret_file(value: str) -> str:
    if "://" in value:
        raise ValueError("takes the path of a file of mode 0600 that holds the address, and not the address, a secret")
    return _path_or_none(value)


def _umask(value: str) -> str:
    if value and not re.fullmatch(r"0?0[2367][2367]", value):
        raise ValueError('takes a umask that lets the owner do all and nobody else write, such as "0027"')
    return value


Line = Annotated[str, AfterValidator(one_line)]
Path_ = Annotated[str, AfterValidator(_absolute)]
OptionalPath = Annotated[str, AfterValidator(_path_or_none)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Slurm(_Table):
    """The resources that a job requests."""

    account: Line = ""
    partition: Line = ""
    qos: Line = ""
    constraint: Line = ""
    gpus: GpuForm = "gpus-per-node"
    """the option that requests GPUs: gpus-per-node, gres, or none where Slurm gives whole nodes"""
    gpu_type: Line = ""
    """type in the site's gres, as in gpu:h100:8; mostly empty"""
    exclusive: bool = True
    mem: Annotated[str, AfterValidator(_memory)] = "0"
    """of a node; "0" = all of it, "" is not allowed"""
    cpus_per_task: int = Field(default=0, ge=0, le=1024)
    """0 = what Slurm gives; with whole nodes every task may use them all"""
    cpu_bind: CpuBind = "gpu"
    """gpu: ranks run on the CPUs beside their GPU; slurm: where srun puts them (TaskPluginParam)"""
    topology: Topology = ""
    """block where Slurm runs topology/block by NVLink domain: --segment where a layout needs whole ones"""
    time: Annotated[str, AfterValidator(_time)] = "4:00:00"
    mpi: Mpi = "none"
    """srun --mpi: PyTorch starts its own ranks, so none; pmix where the site's srun insists"""
    options: list[Annotated[str, AfterValidator(_option)]] = []
    """more options of sbatch, such as "--reservation=mine" or "--switches=1" """


class Container(_Table):
    """pyxis and enroot; no image = no container."""

    image: Line = ""
    mounts: list[Annotated[str, AfterValidator(_mount)]] = []
    writable: bool = False
    mount_home: bool = False

    @property
    def mounted(self) -> list[str]:
        """The path outside of each mount, in their order."""
        return [mount.split(":")[0] for mount in self.mounts]


class Software(_Table):
    """What runs the ranks: the container's Python, or a virtual environment on a shared disk."""

    python: Line = ""
    """of the ranks: an absolute path for a virtual environment; "" = the container's, or the one that submits"""
    host_python: Line = "python3"
    """of the batch script on the first node, 3.9 or later, standard library only"""
    modules: list[Line] = []
    """`module load` of these first"""


class NetworkTable(_Table):
    """The network, for NCCL and gloo."""

    kind: Network = "infiniband"
    interface: Line = ""
    """of the bootstrap and of gloo (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"""
    hcas: Line = ""
    """compute HCAs (NCCL_IB_HCA); "" = NCCL finds them"""


class Folders(_Table):
    """Shared by all nodes, seen from the login node."""

    runs: Path_
    """where run folders are made"""
    data: OptionalPath = ""
    cache: OptionalPath = ""
    """HF_HOME: tokenizers and weights fetched beforehand"""
    umask: Annotated[str, AfterValidator(_umask)] = ""
    """of all that a run writes: "0027" lets the group read it; "" = that of who submits"""
    group: Line = ""
    """owns run folders; "" = yours, or that of a folder for runs with the setgid bit"""


class LoginTable(_Table):
    """The machine with Slurm's commands: this one when `host` is empty, else one behind SSH."""

    host: Line = ""
    user: Line = ""
    port: int = Field(default=22, ge=1, le=65535)
    key: OptionalPath = ""


class Chain(_Table):
    """How a run goes on until it is done."""

    attempts: int = Field(default=3, ge=1, le=50)
    """jobs queued at once, each waiting for the one before it"""
    save_s: int = Field(default=300, ge=10, le=7200)
    """seconds before the time limit at which the ranks save and end"""
    idle_attempts: int = Field(default=2, ge=1, le=50)
    """attempts in a row without a new checkpoint after which the run stops and says so"""
    failures: int = Field(default=20, ge=1, le=1000)
    """failed attempts that a run may have; one more stops it"""
    stalled_s: int = Field(default=600, ge=10, le=86400)
    """seconds without a step after which a run counts as stalled, and the rank that stopped first is named"""
    verify_checkpoint: bool = False
    """read every byte of the checkpoint that an attempt resumes from, on all nodes; else sizes and a sample"""
    self_submit: bool = False
    """the job itself submits the next attempt; compute nodes must be able to run sbatch"""


class Notify(_Table):
    """Who hears how a run goes on. Slurm's mail is of one job, the webhook's message of the run."""

    mail: Line = ""
    """Slurm's --mail-user; "" = no mail"""
    mail_on: list[Mail] = ["END", "FAIL", "INVALID_DEPEND"]
    """Slurm's --mail-type"""
    webhook_env: Annotated[str, AfterValidator(_variable)] = ""
    """name of the variable that holds the address where you call `recipes submit`; never the address itself"""
    webhook_file: Annotated[str, AfterValidator(_secret_file)] = ""
    """file of mode 0600 that holds the address, seen by the first node of a job"""
    webhook_on: list[Event] = ["end", "stop", "stall"]
    """end: the last step is done; stop: no attempt follows by itself; stall: a rank was silent, and the run goes on"""

    def for_node(self) -> JsonObject:
        """As `attempt.py --notify` takes it; empty without a webhook."""
        if not (self.webhook_env or self.webhook_file):
            return {}
        return {"env": self.webhook_env, "file": self.webhook_file, "on": list(self.webhook_on)}


class Health(_Table):
    """The checks of every node: before a job trains, and by `recipes cluster health`."""

    checks: list[Annotated[str, AfterValidator(_check)]] = []
    first_step: bool = False
    """run the checks at the start of every job"""
    min_bus_gb_s: float = Field(default=0.0, ge=0.0, le=10000.0)
    """all-reduce bus bandwidth below which a node is bad; 0 = only measured"""
    free_gib: int = Field(default=10, ge=0)
    max_skew_s: float = Field(default=2.0, gt=0.0)


class Cluster(_Table):
    """One site."""

    name: Line
    title: Line = ""
    gpu: Annotated[str, AfterValidator(_gpu)]
    fabric: Annotated[str, AfterValidator(_fabric)] = ""
    """of the planner's fabrics; "" = the one of this GPU's SuperPOD"""
    gpus_per_node: int = Field(default=8, ge=1, le=64)
    declared_only: bool = False
    """the GPUs are declared and not there (a testbed): ranks rehearse on CPUs"""
    slurm: Slurm
    container: Container = Container()
    software: Software = Software()
    network: NetworkTable = NetworkTable()
    folders: Folders
    login: LoginTable = LoginTable()
    chain: Chain = Chain()
    notify: Notify = Notify()
    health: Health = Health()
    env: Annotated[dict[str, str], AfterValidator(_environment)] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gpus_of_the_node(cls, values: Any) -> Any:
        """GPUs a node where the profile gives none: those of its GPU's node."""
        node = hardware.builtin().nodes.get(str(values.get("gpu"))) if isinstance(values, dict) else None
        return {"gpus_per_node": node.gpus, **values} if node else values

    @model_validator(mode="after")
    def _together(self) -> Cluster:
        if 2 * self.chain.save_s > seconds(self.slurm.time):
            raise ValueError(
                f"slurm.time {self.slurm.time} leaves too little to train before chain.save_s {self.chain.save_s}"
            )
        if self.slurm.gpus == "gres" and any(option.startswith("--gres=") for option in self.slurm.options):
            raise ValueError('slurm.options: --gres replaces the GPUs of slurm.gpus = "gres"; use "gpus-per-node"')
        for name, key, value in self._variables_of_keys():
            if value and self.env.get(name, value) != value:
                raise ValueError(f"env.{name} contradicts {key} {value!r}: leave one of the two out")
        return self

    def _variables_of_keys(self) -> tuple[tuple[str, str, str], ...]:
        """Variables that keys of the profile become (slurm/script/environment.py), with the key and its value."""
        network = self.network
        return (
            ("NCCL_SOCKET_IFNAME", "network.interface", network.interface),
            ("GLOO_SOCKET_IFNAME", "network.interface", network.interface),
            ("NCCL_IB_HCA", "network.hcas", network.hcas),
            ("HF_HOME", "folders.cache", self.folders.cache),
        )
