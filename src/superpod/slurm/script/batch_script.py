"""Renders a recipe and a cluster profile as one sbatch script. Reads no files and runs no commands."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.runtime.attempts import job_code
from superpod.runtime.attempts.job_code import PLACE
from superpod.slurm.script import preamble
from superpod.slurm.script.preamble import shell_quote

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.script.cluster_variables import Variable

RECIPE, LINES, RUNTIME = "recipe.py", "recipe.txt", "runtime.tar.gz"
RANK = "-m superpod.rehearsal.rank"
"""Entry point of the ranks of a rehearsal, which requires this project in the Python of the ranks."""


@dataclass(frozen=True)
class BatchJob:
    """The inputs of an sbatch script that runs a recipe on the nodes of a cluster."""

    recipe: str
    cluster: Cluster
    nodes: int
    gpus: int
    """GPUs, and therefore ranks, per node"""
    runs: str
    """folder for runs, on a file system shared by all nodes"""
    variables: tuple[Variable, ...]
    recipe_file: str
    """source of the exported recipe, a Python file"""
    runtime: bytes = field(repr=False)
    """tar.gz of the Python files that run outside the ranks"""
    recipe_lines: tuple[str, ...] = ()
    """lines of recipe.txt, the flattened recipe, if the job creates the run folder"""
    python: str = ""
    """Python for the ranks; "" = from the profile"""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """contents of run.json, if the job creates the run folder"""
    name: str = ""
    """job name; "" = name of the recipe"""
    time: str = ""
    """time limit per attempt; "" = from the profile"""
    model: str = ""
    """Hugging Face folder to fine-tune: one job step imports it, another exports the result; "" = none"""
    segment: int = 0
    """nodes that must share an NVLink domain (slurm/profiles/segments.py); 0 = no constraint"""


def render(job: BatchJob) -> str:
    """Return the sbatch script of a job. The output is deterministic.

    Raises:
        UserError: a value contains a line break or a null byte, or a folder cannot be mounted into the container.
    """
    payload = _payload(job)
    executed = [
        _options(job),
        preamble.shell_setup(job.cluster.software.modules),
        preamble.host_check(job.cluster.software.host_python, job.nodes, job.gpus),
        preamble.UNSET_INHERITED,
        _process_limits(job),
        _environment(job),
        _unpack(payload),
        _start(job),
    ]
    # The number of lines of the head does not depend on the number that it contains.
    lines = "\n".join([_head(job, lines=0), *executed]).count("\n")
    return "\n".join([_head(job, lines), *executed, payload])


def sbatch_line(name: str, value: str) -> str:
    """Return a line `#SBATCH --name=value`, quoted for sbatch, which interprets quotes and backslashes like a shell.

    Raises:
        UserError: the value contains a line break or a control character.
    """
    if any(not c.isprintable() for c in value):
        raise UserError(f"{name} {value!r} cannot be written in an #SBATCH line", "remove its control characters")
    # sbatch reads # as the start of a comment, and a space as the end of the value.
    if re.fullmatch(r"[\w@%+=:,./\[\]{}()^~-]*", value, re.ASCII):
        return f"#SBATCH --{name}={value}"
    escaped_value = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{name}="{escaped_value}"'


def _head(job: BatchJob, lines: int) -> str:
    """Return the comments at the top of the script, in which `lines` is the number of executed lines."""
    ranks = job.nodes * job.gpus
    return f"""\
#!/bin/bash
# {job.recipe}: {ranks} ranks on {job.nodes} nodes of {job.cluster.name}, one task per GPU.
#
#   sbatch job.sbatch                                       start a new run in the folder for runs
#   sbatch --export=ALL,SUPERPOD_RUN_DIR=DIR job.sbatch     start the next attempt of the run in DIR
#
# Lines 1 to {lines} are executed; you may read and edit them. The rest is data: the recipe and a small Python runtime
# (base64), both verified by a checksum. To change the recipe, render the script again.
# Requirements: none on the login node; {job.cluster.software.host_python} 3.9 or later on the first node; NeMo for the
# ranks, in the container or in the Python that srun starts below.
# SBATCH_* variables in your environment override the #SBATCH lines (sbatch(1)); `recipes submit` removes them.
# shellcheck disable=SC1003,SC2016 # single-quoted strings are literal on purpose
"""


def resource_options(cluster: Cluster, nodes: int, gpus: int, time: str = "") -> list[str]:
    """Return the sbatch options for the resources of a job: `nodes` nodes with `gpus` tasks and GPUs each."""
    slurm = cluster.slurm
    job_options = {name: getattr(slurm, name) for name in ("account", "partition", "qos", "constraint")}
    options = [f"--{name}={value}" for name, value in job_options.items() if value]
    options += [f"--nodes={nodes}", f"--ntasks-per-node={gpus}", *_gpu_and_cpu_options(cluster, gpus)]
    if slurm.exclusive:
        options.append("--exclusive")
    return [*options, f"--mem={slurm.mem}", f"--time={time or slurm.time}"]


def _gpu_and_cpu_options(cluster: Cluster, gpus: int) -> list[str]:
    """Return the options of sbatch and srun for the GPUs and CPUs of a node, in the form that the site requires.

    Since 22.05, srun does not inherit the job's CPUs per task from sbatch.
    """
    slurm = cluster.slurm
    gpu_type = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    options = []
    if slurm.gpus == "gres":
        options.append(f"--gres=gpu:{gpu_type}{gpus}")
    elif slurm.gpus == "gpus-per-node":
        options.append(f"--gpus-per-node={gpu_type}{gpus}")
    if slurm.cpus_per_task:
        options.append(f"--cpus-per-task={slurm.cpus_per_task}")
    return options


def _options(job: BatchJob) -> str:
    """Return the #SBATCH lines of the script."""
    slurm, chain = job.cluster.slurm, job.cluster.chain
    options = [f"--job-name={job.name or job.recipe}", *resource_options(job.cluster, job.nodes, job.gpus, job.time)]
    if job.segment:
        options.append(f"--segment={job.segment}")
    lines = [
        *map(_option_line, options),
        f"#SBATCH --signal=USR1@{chain.save_s}    # tells the ranks to save and exit {chain.save_s} s before the limit",
        "#SBATCH --requeue    # restart the job after a node failure or a preemption",
        # A requeued job keeps its id, and with it its output file, which Slurm would truncate.
        "#SBATCH --open-mode=append",
        "#SBATCH --wait-all-nodes=1",
    ]
    notify = job.cluster.notify
    if notify.mail:
        lines += [sbatch_line("mail-user", notify.mail), sbatch_line("mail-type", ",".join(notify.mail_on))]
    lines += map(_option_line, slurm.options)
    return "\n".join(lines) + "\n"


def _option_line(option: str) -> str:
    """Return the #SBATCH line of an option such as `--nodes=4` or `--exclusive`."""
    name, equals, value = option.removeprefix("--").partition("=")
    return sbatch_line(name, value) if equals else f"#SBATCH --{name}"


def render_command(cluster: Cluster, command: list[str]) -> str:
    """Return a batch script that loads the modules of the profile and runs one command."""
    return f"#!/bin/bash\n{preamble.shell_setup(cluster.software.modules)}exec {' '.join(map(shell_quote, command))}\n"


def _environment(job: BatchJob) -> str:
    """Return the shell code that exports the variables of the ranks and, if they run, of the node checks."""
    lines = [f"export {v.name}={shell_quote(v.value)}" for v in job.variables]
    width = min(60, max(map(len, lines), default=0))
    rows = [f"{text:{width}}  # {v.reason}" for text, v in zip(lines, job.variables, strict=True)]
    if startup_checks(job.cluster):
        rows.append("# Inputs of the node checks, the first step of the job.")
        rows += [f"export {name}={shell_quote(value)}" for name, value in check_inputs(job.cluster, job.runs).items()]
    return "# Environment of every rank, with the reason for each variable.\n" + "\n".join(rows) + "\n"


def check_inputs(cluster: Cluster, runs: str) -> dict[str, str]:
    """Return the variables that slurm/checks/node.sh reads: expected GPUs, HCAs, free space and the folder for runs."""
    return {
        "GPUS": "0" if cluster.declared_only else str(cluster.gpus_per_node),
        "HCAS": cluster.network.hcas,
        "FREE_GIB": str(cluster.health.free_gib),
        "RUNS": runs,
    }


def _process_limits(job: BatchJob) -> str:
    """Return the shell code that sets the umask and the core file limit, which the tasks inherit."""
    mask = job.cluster.folders.umask
    cores = "ulimit -c 0 # no core files: thousands of them, each as large as a rank's memory, would fill the disk\n"
    if mask:
        return f"umask {mask} # permissions of the run's files (folders.umask)\n{cores}"
    return f"umask go-w # only the owner may write the run's files: they are executed and unpickled\n{cores}"


def _unpack(payload: str) -> str:
    """Return the shell code that checks the checksum of the payload and unpacks it into a new private folder."""
    digest = hashlib.sha256(payload.encode()).hexdigest()
    return f"""\
# Unpack the recipe and the runtime, which follow the last executed line, into a new private folder on this node.
# attempt.py copies them from there into a new folder of the run.
carried=$(sed -n '/^#>> /,$p' "$0")
[[ $(printf '%s\\n' "$carried" | sha256sum) == {digest}* ]] ||
    die "the checksum of the recipe and the runtime in this script does not match: render the script again"
block() {{ sed -n "/^#>> $1\\$/,/^#<<\\$/{{s/^#| \\{{0,1\\}}//p}}" <<<"$carried"; }}
unpack() {{
    block {RUNTIME} | base64 --decode | tar -xz -C "$code" &&
        block {LINES} >"$code/{LINES}" && block {RECIPE} >"$code/{RECIPE}"
}}
code=$(mktemp -d /tmp/superpod-XXXXXXXXXX || mktemp -d /dev/shm/superpod-XXXXXXXXXX) ||
    die "cannot create a folder in /tmp or /dev/shm on $HOSTNAME"
[[ $(stat -c '%F %u %a' "$code") == "directory $EUID 700" ]] || die "$code on $HOSTNAME is not private to this user"
why=$(unpack 2>&1) || die "cannot write $code on $HOSTNAME: $why"
"""


def _start(job: BatchJob) -> str:
    """Return the shell code that starts attempt.py with the srun commands for the ranks and for the model steps."""
    cluster = job.cluster
    python = shell_quote(job.python or cluster.software.python)

    # A rehearsal needs this project in the ranks' Python; a real run needs only the runtime in the script.
    rank = RANK if cluster.declared_only else f"'{PLACE}/superpod/runtime/rank/rank.py'"
    words = ['exec "$host_python" "$code/superpod/runtime/attempts/attempt.py"', *_attempt_options(job)]
    words += ["--", "srun --kill-on-bad-exit=1 --wait=300", *_step_options(job), *_container_options(job)]
    words.append(f"{python} {rank} '{PLACE}/{RECIPE}'")
    if job.model:
        words += ["--", *_model_step(job), f"{python} -m superpod.launch.model_job"]
    command = " \\\n    ".join(words)

    return f"""\
# attempt.py opens the next attempt of the run, chooses MASTER_ADDR (the first node) and a free port, starts the ranks
# with srun, watches their heartbeats, and records how the attempt ended. exec: it must receive Slurm's signals itself.
# {PLACE} stands for the folder on shared storage that attempt.py copies the code to: RUN/{job_code.PREFIX}XXXXXXXX.
runs={shell_quote(job.runs)}
{command}
exit 1 # exec failed. Nothing below is executed: it is the recipe, and the runtime in base64.
"""


def _attempt_options(job: BatchJob) -> list[str]:
    """Return the options of attempt.py."""
    cluster, chain = job.cluster, job.cluster.chain
    options = [
        f"--recipe {shell_quote(job.recipe)}",
        f'--runs "$runs" --unpacked "$code" --lines "$code/{LINES}"',
        f"--save-s {chain.save_s} --stalled-s {chain.stalled_s}",
        f"--idle-attempts {chain.idle_attempts} --failures {chain.failures}",
    ]
    if chain.verify_checkpoint:
        options.append("--verify")
    if chain.self_submit:
        options.append("--self-submit")
    options.append(f"--facts {shell_quote(json.dumps(dict(job.facts), sort_keys=True))}")
    notify = cluster.notify.webhook_option()
    if notify:
        options.append(f"--notify {shell_quote(json.dumps(notify, sort_keys=True))}")
    checks = startup_checks(cluster)
    if checks:
        options.append(f"--checks {' '.join(checks)}")
    return options


def _step_options(job: BatchJob) -> list[str]:
    """Return the srun options for the ranks. All are set, because srun reads missing options from the environment."""
    size = f"--nodes={job.nodes} --ntasks={job.nodes * job.gpus} --ntasks-per-node={job.gpus}"
    # block: consecutive ranks share a node, which Megatron's tensor-parallel groups require.
    placement = "--distribution=block:block"
    if job.cluster.slurm.cpu_bind == "gpu" and not job.cluster.declared_only:
        placement += " --cpu-bind=none"  # rank.py binds each rank to the CPUs of its GPU
    return [size, _step_resources(job), placement, f"--export=ALL --mpi={job.cluster.slurm.mpi}"]


def _step_resources(job: BatchJob) -> str:
    """Return the srun options for the GPUs, CPUs and all memory of the job."""
    return " ".join([*map(shell_quote, _gpu_and_cpu_options(job.cluster, job.gpus)), "--mem=0"])


def _model_step(job: BatchJob) -> list[str]:
    """Return the srun command, without its program, for importing or exporting the model in one task on one node."""
    return [
        "srun --nodes=1 --ntasks=1 --ntasks-per-node=1",
        _step_resources(job),
        f"--export=ALL --mpi={job.cluster.slurm.mpi}",
        *_container_options(job, job.model),
    ]


def startup_checks(cluster: Cluster) -> list[str]:
    """Return the checks that each node runs before the ranks start; checks that compare nodes are not among them."""
    if not cluster.health.first_step:
        return []
    return [check for check in cluster.health.checks if check not in ("bandwidth", "time")]


def mount_problem(path: str) -> str:
    """Return an error message if a path cannot be mounted into a container; "" if it can."""
    if "," in path:
        return f"{path!r} contains ',', which separates mounts in pyxis"
    if ":" in path:
        return f"{path!r} contains ':', which separates the paths of a mount in pyxis"
    return ""


def _container_options(job: BatchJob, read_only: str = "") -> list[str]:
    """Return the pyxis options of srun; [] without a container.

    The folder for runs and, read-only, the folder `read_only` are mounted in addition to those of the profile.

    Raises:
        UserError: one of these folders cannot be mounted.
    """
    container = job.cluster.container
    if not container.image:
        return []
    for path in (read_only, job.runs):
        problem = mount_problem(path)
        if problem:
            raise UserError(problem, "move it, or specify another folder")

    mounts = [*container.mounts]
    if read_only:
        mounts.append(f"{read_only}:{read_only}:ro")
    mounts.append("$runs:$runs")  # the shell expands $runs on the node

    # In pyxis, values set in the image take precedence, except for the variables listed here.
    names = [variable.name for variable in job.variables if not variable.name.startswith("SUPERPOD_")]
    options = [
        f"--container-image={shell_quote(container.image)}",
        f'--container-mounts="{_escape_double_quoted(",".join(mounts))}"',
        f"--container-env={shell_quote(','.join(names))}",
        "--container-mount-home" if container.mount_home else "--no-container-mount-home",
    ]
    if container.writable:
        options.append("--container-writable")
    return options


def _escape_double_quoted(text: str) -> str:
    """Return `text` escaped for double quotes in a shell, except for the variable $runs."""
    escaped_text = re.sub(r'([\\"`$])', r"\\\1", text)
    return escaped_text.replace("\\$runs", "$runs")


def _payload(job: BatchJob) -> str:
    """Return the recipe, its flattened lines and the runtime as blocks of shell comments."""
    blocks = {
        RECIPE: job.recipe_file.rstrip("\n").split("\n"),
        LINES: [line for text in job.recipe_lines for line in text.split("\n")],
        RUNTIME: textwrap.wrap(base64.b64encode(job.runtime).decode(), 384),
    }
    text = [
        "\n".join([f"#>> {name}", *(f"#| {line}" if line else "#|" for line in lines), "#<<"])
        for name, lines in blocks.items()
    ]
    return "\n".join(text) + "\n"
