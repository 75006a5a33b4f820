"""NeMo-Run's SlurmExecutor for a cluster profile, for a user's own `run.Experiment`. Imports NeMo-Run: 3 to 7 s.

>>> from superpod.slurm.executor import executor
>>> with run.Experiment("mine") as experiment:
...     experiment.add(recipe, executor=executor("dgx_h100", nodes=4, gpus=8), name="train")
...     experiment.run()

NeMo-Run packages, tunnels, submits and reads logs as usual. On import, this module patches two of NeMo-Run's names to
replace its batch script and its evaluation of job states; only executors created here are affected.

| NeMo-Run 0.11.1 | this module |
|---|---|
| exports variables unquoted, and prints them (`set -evx`) | quotes them and does not print them |
| expands the node's rank on the first node: it is 0 on every node | each task reads its own |
| uses port 29500 for all jobs | uses a free port on the first node |
| does not quote srun's arguments | quotes them |
| writes tokens in `env_vars` to three files | passes them in sbatch's environment only (LocalTunnel) |
| treats PREEMPTED and NODE_FAIL as failures although Slurm requeues the job | reports pending while it is queued |
| with a grace time, the script ends before Slurm can requeue the job | requeues its job with scontrol |
| exits with 0 after a failed job | `finish(experiment)` exits with 1 |
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

from superpod.common.redaction import is_secret_name
from superpod.slurm.profiles import profiles
from superpod.slurm.script.batch_script import sbatch_line, shell_quote


@dataclass(kw_only=True)
class ProfileExecutor(run.SlurmExecutor):
    """A SlurmExecutor whose batch script this module renders."""


def executor(cluster: str, *, nodes: int, gpus: int, job_dir: str = "", **more: Any) -> ProfileExecutor:
    """Return an executor for a cluster profile, with one task per GPU.

    Args:
        cluster: name or path of a profile.
        nodes: number of nodes.
        gpus: GPUs per node.
        job_dir: folder for jobs on a cluster reached over SSH. On this machine it is NEMORUN_HOME, which must be on a
            file system shared by all nodes.
        **more: fields of NeMo-Run's SlurmExecutor.

    Raises:
        UserError: there is no such profile, or it is invalid.
    """
    profile = profiles.load(cluster)
    slurm, container, login = profile.slurm, profile.container, profile.login
    # On this machine NeMo-Run copies nothing, and jobs remain in NEMORUN_HOME.
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
        "container_image": container.image or None,
        "container_mounts": list(container.mounts),
        "srun_args": [f"--mpi={slurm.mpi}"],
        "env_vars": _without_secrets(profile.env | more.pop("env_vars", {})),
        "packager": run.Packager(),
        "tunnel": tunnel,
        "poll_estimated_start_time": False,
    }
    return ProfileExecutor(**fields | more)


def _without_secrets(values: dict[str, str]) -> dict[str, str]:
    """Return the variables that are not secrets; set the others in this process, whose environment sbatch exports."""
    os.environ.update({key: value for key, value in values.items() if is_secret_name(key)})
    return {key: value for key, value in values.items() if not is_secret_name(key)}


def finish(experiment: run.Experiment) -> NoReturn:
    """Exit with 0 if all jobs of an experiment have succeeded, otherwise with 1."""
    succeeded = all(str(job.state).endswith("SUCCEEDED") for job in experiment.jobs)
    sys.exit(0 if succeeded else 1)


class _Request(SlurmBatchRequest):
    """NeMo-Run's request for a job, which renders the script of this module if its executor is from this module."""

    def materialize(self) -> str:
        """Return the batch script."""
        if isinstance(self.executor, ProfileExecutor):
            return batch_script(self)
        return super().materialize()


def batch_script(request: SlurmBatchRequest) -> str:
    """Return the batch script for a NeMo-Run request.

    Raises:
        UserError: a value cannot be written into the script.
    """
    executor = request.executor
    folder = os.path.join(executor.tunnel.job_dir, os.path.basename(executor.job_dir))
    details = executor.job_details
    details.job_name = details.job_name or f"{executor.job_name_prefix or ''}{request.jobs[0]}"
    details.folder = details.folder or folder
    lines = ["#!/bin/bash", "# Written by superpod.slurm.executor for NeMo-Run.", *_options(request)]
    lines += ["", "set -uo pipefail", "export PYTHONUNBUFFERED=1", f"export TORCHX_MAX_RETRIES={request.max_retries}"]
    lines += [f"export {key}={shell_quote(value)}" for key, value in (executor.env_vars | request.extra_env).items()]
    lines += [_RENDEZVOUS]
    for group in request.command_groups:
        lines += [_srun(request, " ".join(group), folder)]
    return "\n".join(lines) + "\n" + _END


def _options(request: SlurmBatchRequest) -> list[str]:
    """Return the #SBATCH lines."""
    executor, details = request.executor, request.executor.job_details
    values = {key: getattr(executor, key, None) for key in executor.SBATCH_FLAGS}
    values |= {"job_name": details.job_name, "output": str(details.stdout), "open_mode": executor.open_mode}
    values |= executor.additional_parameters or {}
    lines = []
    for key, value in sorted(values.items()):
        if value is True:
            lines.append(f"#SBATCH --{key.replace('_', '-')}")
        elif value is not None and value is not False:
            lines.append(sbatch_line(key.replace("_", "-"), str(value)))
    if executor.dependencies:
        lines.append(sbatch_line("dependency", f"{executor.dependency_type}:{':'.join(executor.parse_deps())}"))
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
    for attempt in 1 2 3; do # slurmctld may be restarting
        scontrol requeue "$SLURM_JOB_ID" && sleep 600 # until Slurm ends this job
        sleep 2
    done
}
# After a preemption with a grace time, only the step has received SIGTERM: release the nodes and requeue the job.
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
    """Return the shell code of a job step, in which each task runs NeMo-Run's `command` in a shell.

    The shell expands the Slurm variables of its task. `folder` is the folder of the job on the cluster.
    """
    executor = request.executor
    # NeMo-Run writes a fixed port into the command.
    script = command.replace(":29500", ":$MASTER_PORT").replace("=29500", "=$MASTER_PORT")
    if executor.container_image is None:
        script = script.replace("/nemo_run", folder)  # the mount point of NeMo-Run's folder in a container
    # torchrun sets the variables of its ranks itself.
    if "torch.distributed.run" not in command and not command.startswith("torchrun"):
        script = _RANK + script

    # Without --export=ALL, SBATCH_EXPORT=NONE of the submitting shell would apply to the step too.
    srun = ["srun", "--export=ALL", *_workdir_options(request, folder), "--wait=60", "--kill-on-bad-exit=1"]
    srun += executor.srun_args or []
    out = str(executor.job_details.srun_stdout).replace("%j", "${SLURM_JOB_ID}")
    quoted_out = out.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`")
    step = f'{shlex.join([*srun, "bash", "-c", script])} >>"{quoted_out}" 2>&1'
    return f"{step}\nlast=$?\n((code)) || code=$last\n"


def _workdir_options(request: SlurmBatchRequest, folder: str) -> list[str]:
    """Return the srun options for the working folder and the container."""
    executor = request.executor
    if executor.container_image is None:
        return ["--chdir", os.path.join(folder, "code")]
    mounts = [m.replace("/nemo_run", folder, 1) if m.startswith("/nemo_run") else m for m in executor.container_mounts]
    options = ["--container-image", executor.container_image, "--container-workdir", "/nemo_run/code"]
    options += ["--container-mounts", ",".join([*mounts, f"{folder}:/nemo_run"])]
    names = ",".join([*(executor.container_env or []), *executor.env_vars])
    if names:
        options += ["--container-env", names]
    return options


_describe = scheduler.SlurmTunnelScheduler.describe


def _describe_requeued(self: scheduler.SlurmTunnelScheduler, app_id: str) -> DescribeAppResponse | None:
    """Return NeMo-Run's description of a job, with the state PENDING if Slurm has requeued the job."""
    answer = _describe(self, app_id)
    if answer is not None and str(answer.msg).startswith(("PREEMPTED", "NODE_FAIL", "REQUEUED")) and self.tunnel:
        queue = self.tunnel.run(f"squeue -h -j {shlex.quote(app_id)} -o %T", warn=True)
        if (queue.stdout or "").strip():
            answer.state = AppState.PENDING
    return answer


for _supported in ("_PARALLEL", "_DETACH", "_DEPENDENCY"):  # NeMo-Run compares classes and does not accept subclasses
    _name = f"{_supported}_SUPPORTED_EXECUTORS"
    setattr(run.Experiment, _name, (*getattr(run.Experiment, _name), ProfileExecutor))
api.EXECUTOR_MAPPING[ProfileExecutor] = "slurm_tunnel"
scheduler.SlurmBatchRequest = _Request
scheduler.SlurmTunnelScheduler.describe = _describe_requeued
