"""NeMo-Run's SlurmExecutor for a cluster profile, for a user's own `run.Experiment`. Imports NeMo-Run: 3 to 7 s.

>>> from superpod.slurm.executor import executor
>>> with run.Experiment("mine") as experiment:
...     experiment.add(recipe, executor=executor("dgx_h100", nodes=4, gpus=8), name="train")
...     experiment.run()

NeMo-Run packages, tunnels, submits and reads logs as ever. What it writes into the batch script, and how it reads
states, is ours: two of its names are replaced when this module is imported, and only for executors made here.

| NeMo-Run 0.11.1 | here |
|---|---|
| exports variables unquoted, and prints them (`set -evx`) | quoted, and not printed |
| expands the node's number on the first node: every node is 0 | each task reads its own |
| port 29500 for all | a free one on the first node |
| srun's arguments unquoted | quoted |
| tokens among `env_vars` stand in three files | they travel in sbatch's environment only (LocalTunnel) |
| PREEMPTED and NODE_FAIL are failures, though Slurm requeues | pending while the job is in the queue |
| with a grace time the script ends before Slurm can requeue it | it asks to be requeued |
| a failed job ends a script with 0 | `finish(experiment)` ends it with 1 |
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

import nemo_run as run
from nemo_run.core.execution.slurm import SlurmBatchRequest
from nemo_run.core.tunnel.client import LocalTunnel, SSHTunnel
from nemo_run.run.torchx_backend.schedulers import api
from nemo_run.run.torchx_backend.schedulers import slurm as scheduler
from torchx.schedulers.api import DescribeAppResponse
from torchx.specs.api import AppState

from superpod.node.redaction import is_secret_name
from superpod.slurm import profiles
from superpod.slurm.batch_script import option, quoted


@dataclass(kw_only=True)
class ProfileExecutor(run.SlurmExecutor):
    """A SlurmExecutor whose batch script is written here."""


def executor(cluster: str, *, nodes: int, gpus: int, job_dir: str = "", **more: Any) -> ProfileExecutor:
    """An executor for `nodes` nodes of a profile, one task per GPU; `more` are fields of NeMo-Run's SlurmExecutor.

    `job_dir` is the folder behind SSH; on this machine jobs lie under NEMORUN_HOME, which nodes must see.

    Raises:
        UserError: no such profile, or what is wrong in it.
    """
    profile = profiles.load(cluster)
    slurm, box, login = profile.slurm, profile.container, profile.login
    # NeMo-Run copies nothing to another folder of this machine: NEMORUN_HOME is that folder.
    tunnel = LocalTunnel(job_dir="")
    if login.host:
        tunnel = SSHTunnel(
            host=login.host, user=login.user, job_dir=job_dir, port=login.port, identity=login.key or None
        )
    fields: dict[str, Any] = {
        "account": slurm.account,
        "partition": slurm.partition or None,
        "qos": slurm.qos or None,
        "constraint": slurm.constraint or None,
        "nodes": nodes,
        "ntasks_per_node": gpus,
        "gpus_per_node": gpus if slurm.gpus == "gpus-per-node" else None,
        "gres": f"gpu:{gpus}" if slurm.gpus == "gres" else None,
        "exclusive": slurm.exclusive or None,
        "mem": slurm.mem,
        "time": slurm.time,
        "container_image": box.image or None,
        "container_mounts": list(box.mounts),
        "srun_args": [f"--mpi={slurm.mpi}"],
        "env_vars": _without_secrets(profile.env | more.pop("env_vars", {})),
        "packager": run.Packager(),
        "tunnel": tunnel,
        "poll_estimated_start_time": False,
    }
    return ProfileExecutor(**fields | more)


def _without_secrets(values: dict[str, str]) -> dict[str, str]:
    """The variables that may be written into files; secrets go into this environment, which sbatch passes on."""
    os.environ.update({key: value for key, value in values.items() if is_secret_name(key)})
    return {key: value for key, value in values.items() if not is_secret_name(key)}


def finish(experiment: run.Experiment) -> NoReturn:
    """End the script as its jobs ended: 0 when all succeeded, else 1."""
    sys.exit(0 if all(str(job.state).endswith("SUCCEEDED") for job in experiment.jobs) else 1)


class _Request(SlurmBatchRequest):
    """NeMo-Run's request for a job, with the batch script of this module for the executors of this module."""

    def materialize(self) -> str:
        """The batch script."""
        return batch_script(self) if isinstance(self.executor, ProfileExecutor) else super().materialize()


def batch_script(request: SlurmBatchRequest) -> str:
    """A plain batch script for a request of NeMo-Run.

    Raises:
        UserError: a value that cannot be written into it.
    """
    executor = request.executor
    folder = os.path.join(executor.tunnel.job_dir, os.path.basename(executor.job_dir))
    details = executor.job_details
    details.job_name = details.job_name or f"{executor.job_name_prefix or ''}{request.jobs[0]}"
    details.folder = details.folder or folder
    lines = ["#!/bin/bash", "# Written by superpod.slurm.executor for NeMo-Run.", *_options(request)]
    lines += ["", "set -uo pipefail", "export PYTHONUNBUFFERED=1", f"export TORCHX_MAX_RETRIES={request.max_retries}"]
    lines += [f"export {key}={quoted(value)}" for key, value in (executor.env_vars | request.extra_env).items()]
    lines += [_RENDEZVOUS]
    for group in request.command_groups:
        lines += [_srun(request, " ".join(group), folder)]
    return "\n".join(lines) + "\n" + _END


def _options(request: SlurmBatchRequest) -> list[str]:
    executor, details = request.executor, request.executor.job_details
    values = {key: getattr(executor, key, None) for key in executor.SBATCH_FLAGS}
    values |= {"job_name": details.job_name, "output": str(details.stdout), "open_mode": executor.open_mode}
    values |= executor.additional_parameters or {}
    lines = []
    for key, value in sorted(values.items()):
        if value is True:
            lines.append(f"#SBATCH --{key.replace('_', '-')}")
        elif value is not None and value is not False:
            lines.append(option(key.replace("_", "-"), str(value)))
    if executor.dependencies:
        lines.append(option("dependency", f"{executor.dependency_type}:{':'.join(executor.parse_deps())}"))
    return lines


_RENDEZVOUS = """\
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
while (: <"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done
export MASTER_ADDR MASTER_PORT head_node_ip=$MASTER_ADDR
code=0
"""

_END = """\
requeue() {
    for attempt in 1 2 3; do # a controller that restarts answers a little later
        scontrol requeue "$SLURM_JOB_ID" && sleep 600 # until Slurm ends this job
        sleep 2
    done
}
# Preempted with some grace left, the step alone has got SIGTERM: give the nodes back, and queue for the next attempt.
if ((code)) && [[ $(scontrol show job -o "$SLURM_JOB_ID") == *" PreemptTime=2"* ]]; then
    requeue
fi
if ((code && TORCHX_MAX_RETRIES > ${SLURM_RESTART_COUNT:-0})); then
    requeue
fi
echo "job exited with code $code"
exit "$code"
"""

_RANK = (
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID GROUP_RANK=$SLURM_NODEID WORLD_SIZE=$SLURM_NTASKS "
    "LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES)); "
)


def _srun(request: SlurmBatchRequest, command: str, folder: str) -> str:
    """The step: a shell on each node runs NeMo-Run's command, so that Slurm's variables are that task's."""
    executor = request.executor
    # NeMo-Run has its port fixed in the command.
    inside = command.replace(":29500", ":$MASTER_PORT").replace("=29500", "=$MASTER_PORT")
    # --export: SBATCH_EXPORT=NONE of whoever submitted would hold for the step too.
    words = ["srun", "--export=ALL", *_place(request, folder), "--wait=60", "--kill-on-bad-exit=1"]
    words += executor.srun_args or []
    if executor.container_image is None:
        inside = inside.replace("/nemo_run", folder)  # where NeMo-Run's folder is mounted in a container
    by_torchrun = "torch.distributed.run" in command or command.startswith("torchrun")
    # torchrun sets the ranks' variables itself.
    script = ("" if by_torchrun else _RANK) + inside
    out = str(executor.job_details.srun_stdout).replace("%j", "${SLURM_JOB_ID}")
    quotes = out.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`")
    step = f'{shlex.join([*words, "bash", "-c", script])} >>"{quotes}" 2>&1'
    return f"{step}\nlast=$?\n((code)) || code=$last\n"


def _place(request: SlurmBatchRequest, folder: str) -> list[str]:
    executor = request.executor
    if executor.container_image is None:
        return ["--chdir", os.path.join(folder, "code")]
    mounts = [m.replace("/nemo_run", folder, 1) if m.startswith("/nemo_run") else m for m in executor.container_mounts]
    words = ["--container-image", executor.container_image, "--container-workdir", "/nemo_run/code"]
    words += ["--container-mounts", ",".join([*mounts, f"{folder}:/nemo_run"])]
    names = ",".join([*(executor.container_env or []), *executor.env_vars])
    return [*words, "--container-env", names] if names else words


_describe = scheduler.SlurmTunnelScheduler.describe


def _describe_requeued(self: scheduler.SlurmTunnelScheduler, app_id: str) -> DescribeAppResponse | None:
    """NeMo-Run's answer, but pending where accounting has a preemption or node failure and the job is queued."""
    answer = _describe(self, app_id)
    if answer is not None and str(answer.msg).startswith(("PREEMPTED", "NODE_FAIL", "REQUEUED")) and self.tunnel:
        queue = self.tunnel.run(f"squeue -h -j {shlex.quote(app_id)} -o %T", warn=True)
        if (queue.stdout or "").strip():
            answer.state = AppState.PENDING
    return answer


for _supported in ("_PARALLEL", "_DETACH", "_DEPENDENCY"):  # NeMo-Run compares classes, and takes no subclass
    _name = f"{_supported}_SUPPORTED_EXECUTORS"
    setattr(run.Experiment, _name, (*getattr(run.Experiment, _name), ProfileExecutor))
api.EXECUTOR_MAPPING[ProfileExecutor] = "slurm_tunnel"
scheduler.SlurmBatchRequest = _Request
scheduler.SlurmTunnelScheduler.describe = _describe_requeued
