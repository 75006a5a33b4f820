"""The keys of a cluster profile and their valid values. Imports pydantic; other modules call `profiles.load`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from superpod.common import collection
from superpod.common.json_files import JsonObject
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


def _validate_time(value: str) -> str:
    try:
        seconds(value)
    except ValueError:
        raise ValueError('must be a time in Slurm\'s format, such as "4:00:00" or "1-12:00:00"') from None
    return value


def _validate_memory(value: str) -> str:
    if not re.fullmatch(r"\d+[KMGT]?", value):
        raise ValueError('must be a size in Slurm\'s format, such as "0" (all memory of the node) or "900G"')
    return value


def _validate_absolute_path(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("must be an absolute path")
    return one_line(value)


def _validate_optional_path(value: str) -> str:
    return _validate_absolute_path(value) if value else value


def _validate_mount(value: str) -> str:
    outside, inside, flags, *more = [*value.split(":"), "", ""]
    paths = outside.startswith("/") and inside.startswith("/")
    if "," in value or not paths or any(more) or flags.startswith("/"):
        raise ValueError(
            'must contain mounts such as "/outside:/inside" or "/outside:/inside:ro", without commas or colons in paths'
        )
    return one_line(value)


def _validate_gpu(value: str) -> str:
    return _require_one_of(value, list(hardware.builtin().nodes))


def _validate_fabric(value: str) -> str:
    return _require_one_of(value, list(hardware.builtin().fabrics)) if value else value


def _validate_check(value: str) -> str:
    return _require_one_of(value, [*CHECKS, *collection.checks(CHECKS)])


def _require_one_of(value: str, choices: list[str]) -> str:
    if value not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}; {did_you_mean(value, choices)}".rstrip("; "))
    return value


def _validate_environment(values: dict[str, str]) -> dict[str, str]:
    from superpod.common.redaction import is_secret_name, redact_text

    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"contains {name!r}, which is not a valid variable name: use letters, digits and _")
        if "\0" in value:
            raise ValueError(f"contains a null byte in {name}")
        problem = reserved_variables.problem(name)
        if problem:
            raise ValueError(problem)
        if is_secret_name(name) or redact_text(value) != value:
            raise ValueError(
                f"must not contain the secret {name}, because job files are readable; export it before `recipes submit`"
            )
    return values


def _validate_option(value: str) -> str:
    if not re.match(r"--[a-z][a-z-]*(=|$)", value):
        raise ValueError('must contain sbatch options, such as "--reservation=mine"')
    problem = sbatch_options.problem(value)
    if problem:
        raise ValueError(problem)
    return one_line(value)


def _validate_variable_name(value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("must be the name of a variable, such as SUPERPOD_WEBHOOK, not the address, which is a secret")
    return value


def _validate_secret_file(value: str) -> str:
    if "://" in value:
        raise ValueError("must be the path of a file with mode 0600 that contains the address, not the address itself")
    return _validate_optional_path(value)


def _validate_umask(value: str) -> str:
    if value and not re.fullmatch(r"0?0[2367][2367]", value):
        raise ValueError('must be a umask that restricts writing to the owner, such as "0027"')
    return value


Line = Annotated[str, AfterValidator(one_line)]
Path_ = Annotated[str, AfterValidator(_validate_absolute_path)]
OptionalPath = Annotated[str, AfterValidator(_validate_optional_path)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Slurm(_Table):
    """[slurm]: the resources of a job."""

    account: Line = ""
    partition: Line = ""
    qos: Line = ""
    constraint: Line = ""
    gpus: GpuForm = "gpus-per-node"
    """the option that requests GPUs: gpus-per-node, gres, or none if Slurm does not manage GPUs"""
    gpu_type: Line = ""
    """GPU type in the site's gres, such as h100 for gpu:h100:8; usually empty"""
    exclusive: bool = True
    mem: Annotated[str, AfterValidator(_validate_memory)] = "0"
    """memory per node; "0" = all memory"""
    cpus_per_task: int = Field(default=0, ge=0, le=1024)
    """CPUs per rank; 0 = Slurm's default: on exclusive nodes, all CPUs are available to every task"""
    cpu_bind: CpuBind = "gpu"
    """gpu: each rank runs on the CPUs local to its GPU; slurm: srun binds the ranks (TaskPluginParam)"""
    topology: Topology = ""
    """block if Slurm uses topology/block with NVLink domains; jobs then use --segment if their layout needs it"""
    time: Annotated[str, AfterValidator(_validate_time)] = "4:00:00"
    """time limit per attempt"""
    mpi: Mpi = "none"
    """value of srun --mpi; PyTorch does not use PMI, but some clusters require pmix"""
    options: list[Annotated[str, AfterValidator(_validate_option)]] = []
    """additional sbatch options, such as "--reservation=mine" or "--switches=1" """


class Container(_Table):
    """[container]: settings of pyxis and enroot. Without an image, ranks do not run in a container."""

    image: Line = ""
    mounts: list[Annotated[str, AfterValidator(_validate_mount)]] = []
    writable: bool = False
    mount_home: bool = False

    @property
    def mounted(self) -> list[str]:
        """The path of each mount on the node, in order."""
        return [mount.split(":")[0] for mount in self.mounts]


class Software(_Table):
    """[software]: Python for the ranks and for the batch script, and modules."""

    python: Line = ""
    """Python for the ranks; "" = that of the container or, without one, of the process that submits the run"""
    host_python: Line = "python3"
    """Python for the batch script on the first node, 3.9 or later; only the standard library is needed"""
    modules: list[Line] = []
    """modules that the batch script loads first"""


class NetworkTable(_Table):
    """[network]: the network of NCCL and gloo."""

    kind: Network = "infiniband"
    interface: Line = ""
    """interface for NCCL's bootstrap and for gloo (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"""
    hcas: Line = ""
    """HCAs of the compute network (NCCL_IB_HCA); "" = NCCL detects them"""


class Folders(_Table):
    """[folders]: folders on a file system that the login node and all compute nodes share."""

    runs: Path_
    """folder in which run folders are created"""
    data: OptionalPath = ""
    cache: OptionalPath = ""
    """HF_HOME: tokenizers and weights downloaded beforehand"""
    umask: Annotated[str, AfterValidator(_validate_umask)] = ""
    """umask for the files of a run: "0027" lets the group read them; "" = umask of the submitting user"""
    group: Line = ""
    """group of run folders; "" = your group, or that of the folder for runs if it has the setgid bit"""


class LoginTable(_Table):
    """[login]: the machine that runs Slurm's commands, over SSH; this machine if `host` is empty."""

    host: Line = ""
    user: Line = ""
    port: int = Field(default=22, ge=1, le=65535)
    key: OptionalPath = ""


class Chain(_Table):
    """[chain]: the attempts of a run."""

    attempts: int = Field(default=3, ge=1, le=50)
    """number of jobs to queue at submission; each waits for the previous one"""
    save_s: int = Field(default=300, ge=10, le=7200)
    """seconds before the time limit at which the ranks save a checkpoint and exit"""
    idle_attempts: int = Field(default=2, ge=1, le=50)
    """number of consecutive attempts without a new checkpoint after which the run stops"""
    failures: int = Field(default=20, ge=1, le=1000)
    """maximum number of failed attempts; one more stops the run"""
    stalled_s: int = Field(default=600, ge=10, le=86400)
    """seconds without a step after which a run is stalled"""
    verify_checkpoint: bool = False
    """read all bytes of the checkpoint that an attempt resumes from, instead of checking sizes and a sample"""
    self_submit: bool = False
    """each job submits the next attempt; compute nodes must be able to run sbatch"""


class Notify(_Table):
    """[notify]: mail from Slurm about jobs, and messages about the run to a webhook."""

    mail: Line = ""
    """value of --mail-user; "" = no mail"""
    mail_on: list[Mail] = ["END", "FAIL", "INVALID_DEPEND"]
    """values of --mail-type"""
    webhook_env: Annotated[str, AfterValidator(_validate_variable_name)] = ""
    """name of the environment variable of `recipes submit` that contains the address; not the address itself"""
    webhook_file: Annotated[str, AfterValidator(_validate_secret_file)] = ""
    """file with mode 0600 that contains the address, readable on the first node of a job"""
    webhook_on: list[Event] = ["end", "stop", "stall"]
    """end: the run is done; stop: no further attempt will start; stall: a rank stopped responding and the run resumes
    """

    def webhook_option(self) -> JsonObject:
        """Return the value of `attempt.py --notify`; {} if there is no webhook."""
        if not (self.webhook_env or self.webhook_file):
            return {}
        return {"env": self.webhook_env, "file": self.webhook_file, "on": list(self.webhook_on)}


class Health(_Table):
    """[health]: node checks, which `recipes cluster health` runs and optionally the first step of every job."""

    checks: list[Annotated[str, AfterValidator(_validate_check)]] = []
    first_step: bool = False
    """run the checks at the start of every job"""
    min_bus_gb_s: float = Field(default=0.0, ge=0.0, le=10000.0)
    """minimum bus bandwidth of an all-reduce in GB/s; 0 = no limit"""
    free_gib: int = Field(default=10, ge=0)
    """minimum free disk space per node in GiB"""
    max_skew_s: float = Field(default=2.0, gt=0.0)
    """maximum difference between the clock of a node and the median, in seconds"""


class Cluster(_Table):
    """The profile of a cluster."""

    name: Line
    title: Line = ""
    gpu: Annotated[str, AfterValidator(_validate_gpu)]
    fabric: Annotated[str, AfterValidator(_validate_fabric)] = ""
    """name of the fabric in the planner; "" = the fabric of a SuperPOD with this GPU"""
    gpus_per_node: int = Field(default=8, ge=1, le=64)
    declared_only: bool = False
    """the GPUs do not exist (a testbed), and the ranks run a rehearsal on CPUs"""
    slurm: Slurm
    container: Container = Container()
    software: Software = Software()
    network: NetworkTable = NetworkTable()
    folders: Folders
    login: LoginTable = LoginTable()
    chain: Chain = Chain()
    notify: Notify = Notify()
    health: Health = Health()
    env: Annotated[dict[str, str], AfterValidator(_validate_environment)] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _default_gpus_per_node(cls, values: Any) -> Any:
        """Set the default of gpus_per_node to the number of GPUs in a node of this GPU type."""
        if not isinstance(values, dict):
            return values
        node = hardware.builtin().nodes.get(str(values.get("gpu")))
        return {"gpus_per_node": node.gpus, **values} if node else values

    @model_validator(mode="after")
    def _check_combinations(self) -> Cluster:
        if 2 * self.chain.save_s > seconds(self.slurm.time):
            raise ValueError(f"slurm.time {self.slurm.time} must be at least 2 x chain.save_s ({self.chain.save_s} s)")
        if self.slurm.gpus == "gres" and any(option.startswith("--gres=") for option in self.slurm.options):
            raise ValueError(
                'slurm.options must not contain --gres with slurm.gpus = "gres", because it would override the '
                'GPU request; set slurm.gpus = "gpus-per-node"'
            )
        for name, key, value in self._derived_variables():
            if value and self.env.get(name, value) != value:
                raise ValueError(f"env.{name} conflicts with {key} {value!r}; remove one of them")
        return self

    def _derived_variables(self) -> tuple[tuple[str, str, str], ...]:
        """Return the name, the profile key and the value of each variable that cluster_variables.py sets from a key."""
        network = self.network
        return (
            ("NCCL_SOCKET_IFNAME", "network.interface", network.interface),
            ("GLOO_SOCKET_IFNAME", "network.interface", network.interface),
            ("NCCL_IB_HCA", "network.hcas", network.hcas),
            ("HF_HOME", "folders.cache", self.folders.cache),
        )
