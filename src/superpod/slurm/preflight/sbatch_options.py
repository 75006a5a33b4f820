"""Every option of sbatch (22.05 to 25.05), and whether a profile's `slurm.options` may hold it.

The script sets the size, the layout of ranks, the output and the signals of a job, and the chain of attempts relies on
them (docs/slurm.md, The profile). An option that would change these is refused, with the reason and the key of the
profile to use instead. Options that are not listed here, such as those of a site's SPANK plug-ins, are left to
`sbatch --test-only` (slurm/profiles/live_cluster.py).

Source: sbatch(1) of Slurm 22.05, and the release notes of 23.02 to 25.05 for the options since.
"""

from __future__ import annotations

from typing import NamedTuple


class SbatchOption(NamedTuple):
    """Whether `slurm.options` may hold an option."""

    refused: str = ""
    """why it is refused; "" = it is allowed"""
    key: str = ""
    """what to use instead: a key of the profile or an option of `recipes submit`"""


def _refused(reason: str, *names: str, key: str = "") -> dict[str, SbatchOption]:
    return {name: SbatchOption(reason, key) for name in names}


def _owned(key: str, *names: str) -> dict[str, SbatchOption]:
    return {name: SbatchOption("the script sets it from the profile", key) for name in names}


_ALLOWED = (
    # nodes, topology, priority
    *("nodelist", "exclude", "reservation", "prefer", "cluster-constraint", "switches", "contiguous", "spread-job"),
    *("segment", "consolidate-segments", "spread-segments", "use-min-nodes", "nice", "priority", "licenses", "network"),
    # resources of a node
    *("mincpus", "sockets-per-node", "cores-per-socket", "threads-per-core", "extra-node-info", "tmp", "gres"),
    *("core-spec", "thread-spec", "gres-flags", "hint", "cpu-freq", "gpu-freq", "power", "reboot", "delay-boot"),
    *("bb", "bbf", "oom-kill-step", "stepmgr"),
    # accounting and comments
    *("comment", "admin-comment", "extra", "wckey", "mcs-label", "acctg-freq", "profile", "propagate"),
    *("quiet", "verbose", "ignore-pbs"),
)

OPTIONS: dict[str, SbatchOption] = {
    **{name: SbatchOption() for name in _ALLOWED},
    **_owned("slurm.account", "account"),
    **_owned("slurm.partition", "partition"),
    **_owned("slurm.qos", "qos"),
    **_owned("slurm.constraint", "constraint"),
    **_owned("slurm.gpus", "gpus-per-node"),
    **_owned("slurm.exclusive", "exclusive", "oversubscribe", "share"),
    **_owned("slurm.mem", "mem", "mem-per-cpu", "mem-per-gpu"),
    **_owned("slurm.cpus_per_task", "cpus-per-task", "cpus-per-gpu"),
    **_owned("slurm.time, or --time of `recipes submit`", "time"),
    **_owned("notify.mail", "mail-user"),
    **_owned("notify.mail_on", "mail-type"),
    **_owned("container.image", "container", "container-id", "container-image"),
    **_owned("container.mounts", "container-mounts"),
    **_owned("container.writable", "container-writable"),
    **_owned("container.mount_home", "container-mount-home", "no-container-mount-home"),
    **_owned("chain.save_s", "signal"),
    **_refused(
        "the recipe and its layout decide the number of nodes",
        *("nodes", "nodefile"),
        key="--nodes of `recipes submit`",
    ),
    **_refused(
        "a job has one task per GPU on every node, and srun starts exactly these",
        *("ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket", "overcommit"),
        *("gpus", "gpus-per-task", "gpus-per-socket", "tres-per-task"),
        key="gpus_per_node and slurm.gpus",
    ),
    **_refused(
        "consecutive ranks must share a node, and each binds to the CPUs of its own GPU; the script's srun sets it",
        *("distribution", "mem-bind", "gpu-bind", "tres-bind", "cpu-bind"),
        key="slurm.cpu_bind",
    ),
    **_refused(
        "every attempt would be many jobs, all of which train in the same run folder",
        "array",
        key="--sweep of `recipes submit`",
    ),
    **_refused(
        "every attempt of the chain would wait for it, and start too late or never",
        *("begin", "hold", "deadline"),
        key="--after of `recipes submit`, or `scontrol hold`",
    ),
    **_refused(
        "attempts of a run wait for each other by --dependency=singleton, which this replaces",
        *("dependency", "kill-on-invalid-dep"),
        key="--after of `recipes submit`",
    ),
    **_refused("one run's jobs share a name, by which they are found and wait for each other", "job-name"),
    **_refused("a preempted attempt, or one whose node has failed, is requeued", "requeue", "no-requeue"),
    **_refused("all nodes must be ready before the ranks start", "wait-all-nodes"),
    **_refused("ranks cannot continue after one of their nodes has failed", "no-kill"),
    **_refused("Slurm could give an attempt less time than its start and its last save take", "time-min"),
    **_refused(
        "the run's folder holds the job's output, and `recipes logs` and `why` read it there",
        *("output", "error", "input", "open-mode", "chdir"),
        key="folders.runs",
    ),
    **_refused(
        "the job finds its run by the environment that `recipes submit` passes on",
        *("export", "export-file", "get-user-env"),
        key="[env]",
    ),
    **_refused("the run's files belong to the user who submits", "uid", "gid", "user", "group"),
    **_refused("the script runs on the first node, which is the ranks' MASTER_ADDR", "batch"),
    **_refused(
        "the jobs would be in another cluster than the one that is queried", "clusters", "cluster", key="[login]"
    ),
    **_refused(
        "sbatch would do something else than queue this script, or answer in another form",
        *("test-only", "wrap", "parsable", "wait", "help", "usage", "version", "autocomplete", "external"),
    ),
}
"""By name, without dashes."""


def problem(text: str) -> str:
    """Why an option such as `--nodes=4` cannot be in `slurm.options`, and what to use instead; "" if it can.

    sbatch takes any unambiguous prefix of a name (getopt_long): `--arr` is `--array`. Here names must be complete.
    """
    name, _, value = text.removeprefix("--").partition("=")
    option = OPTIONS.get(name)
    if option is None:
        longer = sorted(known for known in OPTIONS if known.startswith(name))
        return f"abbreviates --{longer[0]}; write names of options in full" if longer else ""
    if option.refused:
        return f"cannot hold --{name}: {option.refused}" + (f"; use {option.key}" if option.key else "")
    if name == "gres" and any(word.strip().startswith("gpu") for word in value.split(",")):
        return "cannot hold GPUs as --gres: the script sets them from the profile; use slurm.gpus and gpus_per_node"
    if name == "priority" and value.strip() == "0":
        return "cannot hold --priority=0, which holds the job forever"
    return ""
