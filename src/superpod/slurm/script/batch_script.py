"""A recipe and a cluster profile as one plain sbatch script. Pure: nothing is read, looked up or submitted here."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.runtime.attempts import job_code
from superpod.runtime.attempts.job_code import PLACE
from superpod.slurm.script import preamble
from superpod.slurm.script.preamble import quoted

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.script.environment import Variable

RECIPE, LINES, RUNTIME = "recipe.py", "recipe.txt", "runtime.tar.gz"
RANK = "-m superpod.rehearsal.rank"
"""A rank of a rehearsal, which needs this project in its Python."""


@dataclass(frozen=True)
class BatchJob:
    """The job of one sbatch script: a recipe's ranks on nodes of a cluster."""

    recipe: str
    cluster: Cluster
    nodes: int
    gpus: int
    """ranks and GPUs a node"""
    runs: str
    """the folder for runs, seen by every node"""
    variables: tuple[Variable, ...]
    recipe_file: str
    """the exported recipe, Python"""
    runtime: bytes = field(repr=False)
    """tar.gz of what runs beside it"""
    recipe_lines: tuple[str, ...] = ()
    """the flattened recipe: recipe.txt of a run that the job makes itself"""
    python: str = ""
    """of the ranks; "" = the profile's"""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """for run.json, where the job makes a run of its own"""
    name: str = ""
    """the job's name; "" = the recipe's"""
    time: str = ""
    """the limit of an attempt; "" = the profile's"""
    model: str = ""
    """the Hugging Face folder of a fine-tuning, which a step of the job imports and another exports; "" = none"""
    segment: int = 0
    """nodes that must share an NVLink domain (slurm/profiles/segments.py); 0 = it does not matter"""


def render(job: BatchJob) -> str:
    """The whole script. The same job gives the same text, byte by byte.

    Raises:
        UserError: a value that cannot be written into a line of its own.
    """
    carried = _carried(job)
    executed = [
        _options(job),
        preamble.shell(job.cluster.software.modules),
        preamble.host(job.cluster.software.host_python, job.nodes, job.gpus),
        preamble.INHERITED,
        _process_limits(job),
        _environment(job),
        _unpack(carried),
        _start(job),
    ]
    head = _head(job, lines=0)
    lines = "\n".join([head, *executed]).count("\n")
    return "\n".join([_head(job, lines), *executed, carried])


def option(name: str, value: str) -> str:
    """A `#SBATCH --name=value` line. sbatch reads quotes and backslashes there as a shell does, and nothing else.

    Raises:
        UserError: the value holds a line break or a control character.
    """
    if any(not c.isprintable() for c in value):
        raise UserError(f"{name} {value!r} cannot stand in an #SBATCH line", "leave out line breaks and controls")
    # sbatch reads # as the start of a comment, and a space as the end of the value.
    plain = re.fullmatch(r"[\w@%+=:,./\[\]{}()^~-]*", value, re.ASCII)
    return f"#SBATCH --{name}={value}" if plain else f'#SBATCH --{name}="{_escaped(value)}"'


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')


def _head(job: BatchJob, lines: int) -> str:
    ranks = job.nodes * job.gpus
    return f"""\
#!/bin/bash
# {job.recipe}: {ranks} ranks on {job.nodes} nodes of {job.cluster.name}, one task per GPU.
#
#   sbatch job.sbatch                                  a run of its own, in the folder for runs
#   sbatch --export=ALL,SUPERPOD_RUN_DIR=DIR job.sbatch     the next attempt of the run in DIR
#
# Lines 1 to {lines} are executed; read and change them. The rest is the recipe and a small Python runtime (base64),
# which run only as they were rendered: to change the recipe, render again. SBATCH_* variables, where you have any,
# win over the lines below (sbatch(1)); `recipes submit` drops them. Nothing is needed where this is submitted; nodes
# need {job.cluster.software.host_python} 3.9, and the ranks NeMo: in the container, or as the Python named below.
# shellcheck disable=SC1003,SC2016 # what stands in single quotes is meant as it stands
"""


def resource_options(cluster: Cluster, nodes: int, gpus: int, time: str = "") -> list[str]:
    """The resources of a job as sbatch's options: nodes, with `gpus` tasks and GPUs on each."""
    slurm = cluster.slurm
    words = [
        f"--{key}={value}" for key in ("account", "partition", "qos", "constraint") if (value := getattr(slurm, key))
    ]
    words += [f"--nodes={nodes}", f"--ntasks-per-node={gpus}", *_share_of_a_node(cluster, gpus)]
    words += ["--exclusive"] if slurm.exclusive else []
    return [*words, f"--mem={slurm.mem}", f"--time={time or slurm.time}"]


def _share_of_a_node(cluster: Cluster, gpus: int) -> list[str]:
    """GPUs and CPUs, in the site's form. srun is given them too: from 22.05 on, it takes no CPUs from the job."""
    slurm = cluster.slurm
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    forms = {"gres": [f"--gres=gpu:{kind}{gpus}"], "gpus-per-node": [f"--gpus-per-node={kind}{gpus}"]}
    return forms.get(slurm.gpus, []) + ([f"--cpus-per-task={slurm.cpus_per_task}"] if slurm.cpus_per_task else [])


def _options(job: BatchJob) -> str:
    slurm, chain = job.cluster.slurm, job.cluster.chain
    words = [f"--job-name={job.name or job.recipe}", *resource_options(job.cluster, job.nodes, job.gpus, job.time)]
    words += [f"--segment={job.segment}"] if job.segment else []
    lines = [
        *map(_line, words),
        f"#SBATCH --signal=USR1@{chain.save_s}    # to the ranks, so long before the limit: save and end",
        "#SBATCH --requeue    # after a node failure or a preemption the same job starts again",
        "#SBATCH --open-mode=append",
        "#SBATCH --wait-all-nodes=1",
        *_mail(job.cluster),
        *map(_line, slurm.options),
    ]
    return "\n".join(lines) + "\n"


def _mail(cluster: Cluster) -> list[str]:
    notify = cluster.notify
    if not notify.mail:
        return []
    return [option("mail-user", notify.mail), option("mail-type", ",".join(notify.mail_on))]


def _line(word: str) -> str:
    name, given, value = word.removeprefix("--").partition("=")
    return option(name, value) if given else f"#SBATCH --{name}"


def plain(cluster: Cluster, command: list[str]) -> str:
    """A script of this one command, in the cluster's environment."""
    return f"#!/bin/bash\n{preamble.shell(cluster.software.modules)}exec {' '.join(map(quoted, command))}\n"


def _environment(job: BatchJob) -> str:
    lines = [f"export {v.name}={quoted(v.value)}" for v in job.variables]
    width = min(60, max(map(len, lines), default=0))
    rows = [f"{text:{width}}  # {v.reason}" for text, v in zip(lines, job.variables, strict=True)]
    if first_checks(job.cluster):
        rows += ["# For the checks of every node, the job's first step.", *_for_checks(job)]
    return "# What every rank finds in its environment, and why.\n" + "\n".join(rows) + "\n"


def _for_checks(job: BatchJob) -> list[str]:
    """The variables that slurm/checks/node.sh reads when it is the job's first step."""
    cluster = job.cluster
    known = {"GPUS": str(0 if cluster.declared_only else cluster.gpus_per_node), "HCAS": cluster.network.hcas}
    known |= {"FREE_GIB": str(cluster.health.free_gib), "RUNS": job.runs}
    return [f"export {name}={quoted(value)}" for name, value in known.items()]


def _process_limits(job: BatchJob) -> str:
    """The umask and the limit of core files. srun gives its tasks both, as SLURM_UMASK is dropped above."""
    mask = job.cluster.folders.umask
    cores = "ulimit -c 0 # thousands of core files, each as large as a rank's memory, would fill the disk\n"
    if mask:
        return f"umask {mask} # who may read what the run writes (folders.umask)\n{cores}"
    return f"umask go-w # what the run writes, nobody else may change: it is executed and unpickled\n{cores}"


def _unpack(carried: str) -> str:
    """Unpack what follows `exit`, once its checksum is right, into a new folder that nobody else can write."""
    digest = hashlib.sha256(carried.encode()).hexdigest()
    return f"""\
# The recipe and a small runtime follow the last line that is executed. They go into a new folder of this node, which
# mktemp makes for this user alone, and from there attempt.py copies them into a new folder of the run.
carried=$(sed -n '/^#>> /,$p' "$0")
[[ $(printf '%s\\n' "$carried" | sha256sum) == {digest}* ]] ||
    die "the recipe or the runtime in this script is not what was rendered: render it again, with your changes"
block() {{ sed -n "/^#>> $1\\$/,/^#<<\\$/{{s/^#| \\{{0,1\\}}//p}}" <<<"$carried"; }}
unpack() {{
    block {RUNTIME} | base64 --decode | tar -xz -C "$code" &&
        block {LINES} >"$code/{LINES}" && block {RECIPE} >"$code/{RECIPE}"
}}
code=$(mktemp -d /tmp/superpod-XXXXXXXXXX || mktemp -d /dev/shm/superpod-XXXXXXXXXX) ||
    die "no folder can be made in /tmp on $HOSTNAME"
[[ $(stat -c '%F %u %a' "$code") == "directory $EUID 700" ]] || die "$code on $HOSTNAME is not this job's alone"
why=$(unpack 2>&1) || die "$code cannot be written on $HOSTNAME: $why"
"""


def _start(job: BatchJob) -> str:
    cluster, chain = job.cluster, job.cluster.chain
    python = quoted(job.python or cluster.software.python)
    controller = [
        f"--recipe {quoted(job.recipe)}",
        f'--runs "$runs" --unpacked "$code" --lines "$code/{LINES}"',
        f"--save-s {chain.save_s} --stalled-s {chain.stalled_s}",
        f"--idle-attempts {chain.idle_attempts} --failures {chain.failures}",
        *(["--verify"] if chain.verify_checkpoint else []),
        *(["--self-submit"] if chain.self_submit else []),
        f"--facts {quoted(json.dumps(dict(job.facts), sort_keys=True))}",
    ]
    ranks = ["srun --kill-on-bad-exit=1 --wait=300", *_step(job), *_container(job)]
    notify = cluster.notify.for_node()
    controller += [f"--notify {quoted(json.dumps(notify, sort_keys=True))}"] if notify else []
    controller += [f"--checks {' '.join(checks)}"] if (checks := first_checks(cluster)) else []
    # A rehearsal needs this project in the ranks' Python; a real run needs only the runtime that the script carries.
    rank = RANK if cluster.declared_only else f"'{PLACE}/superpod/runtime/rank/rank.py'"
    words = [*controller, "--", *ranks, f"{python} {rank} '{PLACE}/{RECIPE}'"]
    words += ["--", *_model_step(job), f"{python} -m superpod.launch.model_job"] if job.model else []
    body = " \\\n    ".join(['exec "$host_python" "$code/superpod/runtime/attempts/attempt.py"', *words])
    return f"""\
# attempt.py opens the next attempt of the run, picks MASTER_ADDR (this job's first node) and a free port, starts the
# ranks below with srun, watches their heartbeats, and writes how it ended. It takes this process, so that Slurm's
# signals reach it. {PLACE} is where it puts the code for all nodes: RUN/{job_code.PREFIX}XXXXXXXX.
runs={quoted(job.runs)}
{body}
exit 1 # exec failed. Nothing below is executed: the recipe, and the runtime as base64.
"""


def _step(job: BatchJob) -> list[str]:
    """srun's own options, each of them: what is not written here, it would take from the environment."""
    slurm = job.cluster.slurm
    size = f"--nodes={job.nodes} --ntasks={job.nodes * job.gpus} --ntasks-per-node={job.gpus}"
    share = " ".join([*map(quoted, _share_of_a_node(job.cluster, job.gpus)), "--mem=0"])  # all that the job has
    # block: consecutive ranks share a node, as Megatron's tensor parallel groups must. rank.py binds them, by GPU.
    bind = ["--cpu-bind=none"] if slurm.cpu_bind == "gpu" and not job.cluster.declared_only else []
    return [size, share, " ".join(["--distribution=block:block", *bind]), f"--export=ALL --mpi={slurm.mpi}"]


def _model_step(job: BatchJob) -> list[str]:
    """srun of one task on the first node, which imports the model before the ranks and exports it after them."""
    share = " ".join([*map(quoted, _share_of_a_node(job.cluster, job.gpus)), "--mem=0"])
    size = "srun --nodes=1 --ntasks=1 --ntasks-per-node=1"
    return [size, share, f"--export=ALL --mpi={job.cluster.slurm.mpi}", *_container(job, job.model)]


def first_checks(cluster: Cluster) -> list[str]:
    """Checks of every node before the ranks start; those that need all nodes together are left to `cluster health`."""
    return [c for c in cluster.health.checks if c not in ("bandwidth", "time")] if cluster.health.first_step else []


def unmountable(path: str) -> str:
    """Why a path cannot be mounted into a container; '' = it can."""
    sign = next((sign for sign in ",:" if sign in path), "")
    separates = {",": "commas separate mounts", ":": "colons separate the paths of a mount"}
    return f"{path!r} contains {sign!r}, and in pyxis {separates[sign]}" if sign else ""


def _container(job: BatchJob, folder: str = "") -> list[str]:
    """The container's options, with a folder that it reads."""
    box = job.cluster.container
    if not box.image:
        return []
    for path in (folder, job.runs):
        if problem := unmountable(path):
            raise UserError(problem, "move it, or name another folder")
    more = [f"{folder}:{folder}:ro"] if folder else []
    mounts = ",".join([*box.mounts, *more, "$runs:$runs"])  # the shell expands $runs on the node
    flags = [f"--container-image={quoted(box.image)}", f'--container-mounts="{_in_quotes(mounts)}"']
    # In pyxis the image's value of a variable wins, except for those named here.
    contested = [variable.name for variable in job.variables if not variable.name.startswith("SUPERPOD_")]
    flags.append(f"--container-env={quoted(','.join(contested))}")
    flags.append("--container-mount-home" if box.mount_home else "--no-container-mount-home")
    return flags + (["--container-writable"] if box.writable else [])


def _in_quotes(text: str) -> str:
    """`text` for double quotes: inert, except our own $runs."""
    inert = re.sub(r'([\\"`$])', r"\\\1", text)
    return inert.replace("\\$runs", "$runs")


def _carried(job: BatchJob) -> str:
    blocks = {
        RECIPE: job.recipe_file.rstrip("\n").split("\n"),
        LINES: [line for text in job.recipe_lines for line in text.split("\n")],
        RUNTIME: list(_base64(job.runtime)),
    }
    text = [
        "\n".join([f"#>> {name}", *(f"#| {line}" if line else "#|" for line in lines), "#<<"])
        for name, lines in blocks.items()
    ]
    return "\n".join(text) + "\n"


def _base64(data: bytes) -> Iterator[str]:
    yield from textwrap.wrap(base64.b64encode(data).decode(), 384)
