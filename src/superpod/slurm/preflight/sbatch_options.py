"""All options of sbatch (22.05 to 25.05), and whether `slurm.options` of a profile may contain them.

The script sets the size, the placement of ranks, the output and the signals of a job, and the chain of attempts relies
on them (docs/slurm.md, The profile). Options that would change these are rejected, with the reason and the profile key
to use instead. Options that are not listed here, such as those of SPANK plug-ins of a site, are checked by
`sbatch --test-only` (slurm/profiles/live_cluster.py).

Source: sbatch(1) of Slurm 22.05, and the release notes of 23.02 to 25.05 for later options.
"""

from __future__ import annotations

from typing import NamedTuple


class SbatchOption(NamedTuple):
    """The reason for rejecting an option in `slurm.options`, and the replacement."""

    rejected: str = ""
    """reason; "" = the option is allowed"""
    key: str = ""
    """replacement: a key of the profile or an option of `recipes submit`; "" = none"""


def _rejected_options(reason: str, *names: str, key: str = "") -> dict[str, SbatchOption]:
    """Return options that are rejected for the same reason, by name."""
    return {name: SbatchOption(reason, key) for name in names}


def _options_of_key(key: str, *names: str) -> dict[str, SbatchOption]:
    """Return options that are rejected because a key of the profile sets them, by name."""
    return _rejected_options("the script sets it from a key of the profile", *names, key=key)


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
    **_options_of_key("slurm.account", "account"),
    **_options_of_key("slurm.partition", "partition"),
    **_options_of_key("slurm.qos", "qos"),
    **_options_of_key("slurm.constraint", "constraint"),
    **_options_of_key("slurm.gpus", "gpus-per-node"),
    **_options_of_key("slurm.exclusive", "exclusive", "oversubscribe", "share"),
    **_options_of_key("slurm.mem", "mem", "mem-per-cpu", "mem-per-gpu"),
    **_options_of_key("slurm.cpus_per_task", "cpus-per-task", "cpus-per-gpu"),
    **_options_of_key("slurm.time, or --time of `recipes submit`", "time"),
    **_options_of_key("notify.mail", "mail-user"),
    **_options_of_key("notify.mail_on", "mail-type"),
    **_options_of_key("container.image", "container", "container-id", "container-image"),
    **_options_of_key("container.mounts", "container-mounts"),
    **_options_of_key("container.writable", "container-writable"),
    **_options_of_key("container.mount_home", "container-mount-home", "no-container-mount-home"),
    **_options_of_key("chain.save_s", "signal"),
    **_rejected_options(
        "the number of nodes follows from the recipe and its layout",
        *("nodes", "nodefile"),
        key="--nodes of `recipes submit`",
    ),
    **_rejected_options(
        "a job has one task per GPU on every node",
        *("ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket", "overcommit"),
        *("gpus", "gpus-per-task", "gpus-per-socket", "tres-per-task"),
        key="gpus_per_node and slurm.gpus",
    ),
    **_rejected_options(
        "the script sets it for srun: consecutive ranks share a node, and each is bound to the CPUs of its GPU",
        *("distribution", "mem-bind", "gpu-bind", "tres-bind", "cpu-bind"),
        key="slurm.cpu_bind",
    ),
    **_rejected_options(
        "the tasks of the array would all train in the same run folder",
        "array",
        key="--sweep of `recipes submit`",
    ),
    **_rejected_options(
        "it would delay or block every attempt of the chain",
        *("begin", "hold", "deadline"),
        key="--after of `recipes submit`, or `scontrol hold`",
    ),
    **_rejected_options(
        "it would replace --dependency=singleton, which makes the attempts of a run wait for each other",
        *("dependency", "kill-on-invalid-dep"),
        key="--after of `recipes submit`",
    ),
    **_rejected_options("the jobs of a run are identified by their common name", "job-name"),
    **_rejected_options(
        "attempts must be requeued after a preemption or a node failure; the script sets it", "requeue", "no-requeue"
    ),
    **_rejected_options("all nodes must be ready before the ranks start", "wait-all-nodes"),
    **_rejected_options("ranks cannot continue after one of their nodes has failed", "no-kill"),
    **_rejected_options("Slurm could reduce the time limit below what an attempt needs to start and save", "time-min"),
    **_rejected_options(
        "`recipes logs` and `why` read the job's output in the run folder",
        *("output", "error", "input", "open-mode", "chdir"),
        key="folders.runs",
    ),
    **_rejected_options(
        "the job finds its run folder through an environment variable that `recipes submit` sets",
        *("export", "export-file", "get-user-env"),
        key="[env]",
    ),
    **_rejected_options("the run's files must belong to the submitting user", "uid", "gid", "user", "group"),
    **_rejected_options("the script must run on the first node, which is the ranks' MASTER_ADDR", "batch"),
    **_rejected_options(
        "the jobs would run on a different cluster from the one that is queried", "clusters", "cluster", key="[login]"
    ),
    **_rejected_options(
        "sbatch would not queue the script, or its output could not be parsed",
        *("test-only", "wrap", "parsable", "wait", "help", "usage", "version", "autocomplete", "external"),
    ),
}
"""All options by name, without the leading dashes."""


def problem(text: str) -> str:
    """Return an error message if `slurm.options` must not contain an option such as `--nodes=4`; "" if it may.

    sbatch accepts any unambiguous prefix of a name (getopt_long), such as `--arr` for `--array`. Here names must be
    complete.
    """
    name, _, value = text.removeprefix("--").partition("=")
    option = OPTIONS.get(name)
    if option is None:
        matching = sorted(known for known in OPTIONS if known.startswith(name))
        return f"must not abbreviate --{matching[0]}; write option names in full" if matching else ""
    if option.rejected:
        message = f"must not contain --{name}: {option.rejected}"
        return f"{message}; use {option.key}" if option.key else message
    if name == "gres" and any(item.strip().startswith("gpu") for item in value.split(",")):
        return "must not request GPUs with --gres; use slurm.gpus and gpus_per_node"
    if name == "priority" and value.strip() == "0":
        return "must not contain --priority=0, which holds the job forever"
    return ""
