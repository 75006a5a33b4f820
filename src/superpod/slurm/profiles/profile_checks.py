"""Compares a cluster profile with the live cluster. Each finding contains the value to set instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from superpod.errors import did_you_mean
from superpod.planner.hardware import match_gpu
from superpod.slurm.profiles.live_cluster import (
    UNAVAILABLE,
    Association,
    LiveCluster,
    count_gpus,
    is_usable,
    list_items,
)
from superpod.slurm.profiles.profile_values import seconds

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster


class Finding(NamedTuple):
    """A problem, and the next step (`hint`) to fix it."""

    message: str
    hint: str = ""


def partition_name(cluster: Cluster, live: LiveCluster) -> str:
    """Return the partition of the profile, or the default partition of the cluster."""
    return cluster.slurm.partition or live.default_partition


def account_name(cluster: Cluster, live: LiveCluster) -> str:
    """Return the account of the profile, or the default account of the user; "" if unknown."""
    return cluster.slurm.account or live.default_account or ""


def association(cluster: Cluster, live: LiveCluster) -> Association:
    """Return the user's association whose limits apply to a job of this profile."""
    account, name = account_name(cluster, live), partition_name(cluster, live)
    account_associations = [a for a in live.associations if account in ("", a.account)]
    partition_associations = [a for a in account_associations if a.partition == name]
    return next(
        iter([*partition_associations, *(a for a in account_associations if not a.partition)]), Association(account)
    )


def qos_names(cluster: Cluster, live: LiveCluster) -> list[str]:
    """Return the names of the partition's QOS and the job's QOS in the order in which their limits take precedence."""
    # Without slurm.qos, Slurm uses the association's default, or `normal`, which it creates itself.
    job_qos = cluster.slurm.qos or association(cluster, live).default_qos or "normal"
    partition_qos = live.partitions.get(partition_name(cluster, live), {}).get("QoS", "N/A")
    if partition_qos in ("N/A", job_qos):
        return [job_qos]
    if "OverPartQOS" in live.qos.get(job_qos, {}).get("Flags", ""):
        return [job_qos, partition_qos]
    return [partition_qos, job_qos]


def is_lifted(cluster: Cluster, live: LiveCluster, flag: str) -> bool:
    """Return whether a QOS of the job has a flag that lifts a limit of the partition, such as PartitionTimeLimit."""
    return any(flag in live.qos.get(name, {}).get("Flags", "").split(",") for name in qos_names(cluster, live))


def check_account(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield a finding if the user has no association with the account, or neither the profile nor Slurm has one."""
    accounts = list(dict.fromkeys(known.account for known in live.associations))
    if not live.associations or ("associations" not in live.enforces and not cluster.slurm.account):
        return
    if not cluster.slurm.account:
        if live.default_account == "":
            yield Finding(
                "slurm.account is empty, and you have no default account in Slurm",
                f"your accounts: {', '.join(accounts)}",
            )
    elif cluster.slurm.account not in accounts:
        yield Finding(
            f"slurm.account {cluster.slurm.account!r} is not one of your accounts",
            f"your accounts: {', '.join(accounts) or 'none'}",
        )


def check_partition(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield findings if the partition does not exist, is not up, or does not accept the account or QOS."""
    name = partition_name(cluster, live)
    partition = live.partitions.get(name)
    if partition is None:
        hint = did_you_mean(name, list(live.partitions)) or f"partitions: {', '.join(live.partitions)}"
        yield Finding(f"slurm.partition {name!r} does not exist", hint)
    elif partition.get("State", "UP") != "UP":
        yield Finding(f"partition {name} is {partition['State']}", "wait until it is up, or use another partition")
    else:
        own_account = account_name(cluster, live)
        yield from _access_findings(
            name, partition, "Accounts", "account", own_account, account_and_parents(own_account, live)
        )
        yield from _access_findings(name, partition, "Qos", "QOS", cluster.slurm.qos, [cluster.slurm.qos])


def account_and_parents(account: str, live: LiveCluster) -> list[str]:
    """Return the names of an account, its parent account, and so on up to the root."""
    names = [account]
    while True:
        parent = live.accounts.get(names[-1], {}).get("ParentName", "")
        if not parent or parent in names:
            return names
        names.append(parent)


def _access_findings(
    name: str, partition_fields: dict[str, str], key: str, noun: str, own_name: str, names_with_parents: list[str]
) -> Iterator[Finding]:
    """Yield a finding if the Allow or Deny list of a partition excludes the job's account or QOS.

    Recent versions of Slurm also apply these lists to child accounts (scontrol(1), DenyAccounts: "hierarchical"); older
    versions apply them to the account alone (`part_policy_valid_acct`). For children of a denied account,
    `sbatch --test-only` decides (`check_sbatch`). In all versions, a partition with an Allow list ignores its Deny
    list.

    Args:
        name: name of the partition.
        partition_fields: fields of the partition in Slurm.
        key: end of the names of the lists: "Accounts" or "Qos".
        noun: "account" or "QOS", for the message.
        own_name: the job's account or QOS; "" = unknown.
        names_with_parents: `own_name` and its parent accounts; it is allowed if one of them is.
    """
    accepted = list_items(partition_fields.get(f"Allow{key}", ""))
    denied = list_items(partition_fields.get(f"Deny{key}", ""))
    if own_name and accepted and not {*names_with_parents} & {*accepted}:
        yield Finding(f"partition {name} does not accept {noun} {own_name!r}", f"accepted: {', '.join(accepted)}")
    elif not accepted and own_name in denied:
        yield Finding(f"partition {name} denies {noun} {own_name!r}", f"denied: {', '.join(denied)}")


def check_qos(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield a finding if the user's associations do not include the QOS of the profile."""
    own_associations = [a for a in live.associations if a.account == account_name(cluster, live)] or live.associations
    names = list(dict.fromkeys(name for association in own_associations for name in association.qos))
    if cluster.slurm.qos and names and cluster.slurm.qos not in names:
        yield Finding(f"slurm.qos {cluster.slurm.qos!r} is not one of your QOS", f"your QOS: {', '.join(names)}")


def check_reservation(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield a finding for each reservation in slurm.options that does not exist or does not admit this user."""
    reservations = {r.name: r for r in live.reservations}
    accounts = {*account_and_parents(account_name(cluster, live), live)}
    for name in profile_reservations(cluster):
        reservation = reservations.get(name)
        if reservation is None:
            listed_names = ", ".join(reservations) or "none"
            yield Finding(f"slurm.options: there is no reservation {name!r}", f"reservations: {listed_names}")
            continue
        admitted_names = [*reservation.users, *reservation.accounts]
        if admitted_names and live.user not in reservation.users and not accounts & {*reservation.accounts}:
            yield Finding(
                f"slurm.options: reservation {name} is for {', '.join(admitted_names)}, not for {live.user}",
                "remove the option",
            )


def profile_reservations(cluster: Cluster) -> list[str]:
    """Return the names of the reservations in slurm.options."""
    options = [option.partition("=") for option in cluster.slurm.options]
    return [name for key, _, value in options if key == "--reservation" for name in value.split(",")]


def check_constraint(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield a finding for each feature in slurm.constraint that no node of the partition has."""
    name = partition_name(cluster, live)
    features = {f for n in live.nodes_in(name) for f in n.get("AvailableFeatures", "").split(",")} - {"(null)", ""}
    for word in re.findall(r"[^\s&|,()\[\]]+", re.sub(r"\*\d+", "", cluster.slurm.constraint)):  # a&b, [a|b], a*4
        if word not in features:
            listed_features = ", ".join(sorted(features)) or "none"
            yield Finding(
                f"slurm.constraint: no node of {name} has the feature {word!r}", f"features: {listed_features}"
            )


def check_gres(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield findings if the number or type of the GPUs of the nodes in Slurm does not match the profile."""
    name = partition_name(cluster, live)
    nodes = live.nodes_in(name)
    if not nodes or cluster.slurm.gpus == "none":
        return
    max_gpus = max(count_gpus(node)[0] for node in nodes)
    if max_gpus == 0:
        yield Finding(
            f"Slurm lists no GPUs for the nodes of {name}",
            'set slurm.gpus = "none", so that jobs get all GPUs of a node',
        )
    elif max_gpus < cluster.gpus_per_node:
        yield Finding(
            f"gpus_per_node is {cluster.gpus_per_node}, but the nodes of {name} have {max_gpus}",
            f"set gpus_per_node = {max_gpus}",
        )
    types = {count_gpus(node)[1] for node in nodes} - {""}
    kinds = {kind for kind in map(match_gpu, types) if kind}
    if kinds and not any(f"{cluster.gpu}_".startswith(f"{kind}_") for kind in kinds):  # a100 may be a100_40gb
        listed_types = ", ".join(sorted(types))
        yield Finding(
            f"gpu is {cluster.gpu!r}, but the GPUs of {name} have the type {listed_types} in Slurm",
            f'set gpu = "{min(kinds)}"',
        )
    if cluster.slurm.gpu_type and cluster.slurm.gpu_type not in types:
        yield Finding(
            f"slurm.gpu_type: no node of {name} has GPUs of type {cluster.slurm.gpu_type!r}",
            f"types: {', '.join(types)}",
        )


def check_cpus(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield a finding if the nodes have too few CPUs for slurm.cpus_per_task."""
    name, cpus_each = partition_name(cluster, live), cluster.slurm.cpus_per_task
    max_cpus = max((int(node.get("CPUTot", 0)) for node in live.nodes_in(name)), default=0)
    need = cpus_each * cluster.gpus_per_node
    if max_cpus and need > max_cpus:
        yield Finding(
            f"slurm.cpus_per_task {cpus_each} x {cluster.gpus_per_node} ranks = {need} CPUs, but the nodes of {name} "
            f"have at most {max_cpus}",
            f"set cpus_per_task = {max_cpus // cluster.gpus_per_node}",
        )


def check_memory(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield a finding if slurm.mem exceeds the memory of the nodes."""
    name = partition_name(cluster, live)
    max_mib = max((int(n.get("RealMemory", 0)) for n in live.nodes_in(name)), default=0)
    if max_mib and to_mib(cluster.slurm.mem) > max_mib:
        yield Finding(
            f"slurm.mem {cluster.slurm.mem} exceeds the memory of the nodes of {name}: {max_mib}M", 'set mem = "0"'
        )


def to_mib(mem: str) -> float:
    """Return the value of slurm.mem, such as "900G", in MiB; 0 means all memory of the node."""
    match = re.fullmatch(r"(\d+)([KMGT]?)", mem)
    if match is None:
        return 0
    return int(match[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[match[2]]


def check_time_limit(cluster: Cluster, live: LiveCluster, time: str = "") -> Iterator[Finding]:
    """Yield a finding if the time limit (`time`, or "" for that of the profile) exceeds that of the partition."""
    if is_lifted(cluster, live, "PartitionTimeLimit"):
        return
    name = partition_name(cluster, live)
    max_time = live.partitions.get(name, {}).get("MaxTime", "UNLIMITED")
    limit_text = time or cluster.slurm.time
    if max_time not in ("UNLIMITED", "") and seconds(limit_text) > seconds(max_time):
        yield Finding(f"the time limit {limit_text} exceeds that of partition {name}: {max_time}", f"--time {max_time}")


def check_mpi(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield a finding if Slurm does not have the PMI plug-in of the profile, or cannot load it."""
    if live.mpi and cluster.slurm.mpi not in live.mpi:
        yield Finding(
            f"slurm.mpi: this Slurm installation has no {cluster.slurm.mpi!r} MPI plug-in",
            f"plug-ins listed by `srun --mpi=list`: {', '.join(live.mpi)}",
        )
    elif live.mpi_failure:
        yield mpi_finding(cluster, live.mpi_failure)


def mpi_finding(cluster: Cluster, reason: str, where: str = "") -> Finding:
    """Return a finding for a PMI plug-in that cannot be loaded; `where` is " on NODE" or ""."""
    return Finding(
        f"srun --mpi={cluster.slurm.mpi} fails{where}: {reason}",
        'set slurm.mpi = "none" (PyTorch does not use PMI), or ask the administrators for the plug-in\'s library',
    )


def check_topology(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield a finding if the profile requires topology/block, which --segment needs, but Slurm does not use it."""
    if live.topology and cluster.slurm.topology == "block" and live.topology != "topology/block":
        yield Finding(
            f"slurm.topology is 'block', but this Slurm installation uses {live.topology}",
            'set topology = "", so that jobs are submitted without --segment',
        )


def check_pyxis(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield a finding if the profile has a container image and pyxis is not installed."""
    if cluster.container.image and not live.has_pyxis:
        yield Finding(
            "pyxis is not installed: srun has no option --container-image",
            'set container.image = "", and software.python to a virtual environment on a shared file system',
        )


def check_image(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield a finding if the image is a file that cannot be read; images in a registry are not looked up."""
    name = cluster.container.image
    if name.startswith("/") and live.paths.get(name, "file") != "file":
        yield Finding(f"container.image {name} is {live.paths[name]}", "create it with `enroot import` (docs/slurm.md)")


def check_mounts(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield a finding for each mounted path that does not exist."""
    for outside in cluster.container.mounted if cluster.container.image else []:
        if live.paths.get(outside, "folder") not in ("folder", "file"):
            yield Finding(f"container.mounts: {outside} is {live.paths[outside]}", "mount paths that every node has")


def check_host_python(cluster: Cluster, version: int, where: str = "") -> Iterator[Finding]:
    """Yield a finding if software.host_python is older than Python 3.9, or does not run.

    Args:
        cluster: profile of the cluster.
        version: its version, such as 309 for 3.9; 0 = it does not run.
        where: " on NODE" or "", for the message.
    """
    name = cluster.software.host_python
    if not version:
        yield Finding(f"software.host_python {name!r} does not run{where}", "use Python 3.9 or later")
    elif version < 309:
        yield Finding(
            f"software.host_python {name!r} is Python {format_version(version)}{where}", "use Python 3.9 or later"
        )


def format_version(version: int) -> str:
    """Format a version such as 309 as "3.9"."""
    return f"{version // 100}.{version % 100}"


def module_findings(cluster: Cluster, states: Mapping[str, str], where: str = "") -> Iterator[Finding]:
    """Yield a finding for each module in software.modules that does not load.

    Args:
        cluster: profile of the cluster.
        states: state of each module: loads, missing, or `no module command`.
        where: " on NODE" or "", for the message.
    """
    for name in cluster.software.modules:
        state = states.get(name, "missing")
        if state == "loads":
            continue
        problem = f"`module load {name}` fails" if state == "missing" else "there is no `module` command"
        yield Finding(f"software.modules: {problem}{where}", f"`module avail`{where} lists the modules")


def check_python(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield findings if Python for the batch script or for the ranks does not exist or is too old."""
    yield from check_host_python(cluster, live.python)
    if not live.ranks_python:
        yield Finding(
            f"software.python {cluster.software.python!r} does not exist", "set software.python to an existing Python"
        )


def check_modules(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield a finding for each module that does not load, if the login node has a `module` command."""
    yield from module_findings(cluster, {name: live.modules.get(name) or "loads" for name in cluster.software.modules})


def check_cache(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield a finding if folders.cache, for tokenizers and weights, does not exist."""
    name = cluster.folders.cache
    if name and live.paths.get(name, "folder") != "folder":
        yield Finding(f"folders.cache {name} is {live.paths[name]}", "create it and download the tokenizer into it")


def check_runs_folder(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield findings if the folder for runs is not writable, or other users can replace its contents."""
    if live.runs_free is None:
        yield Finding(f"{cluster.folders.runs} is not writable", "set folders.runs, or --runs, to another folder")
    if live.runs_open:
        yield Finding(
            f"other users can write to {cluster.folders.runs} (mode {live.runs_open}) and could replace your runs",
            "run `chmod +t` on it, or set folders.runs, or --runs, to another folder",
        )


def check_sbatch(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Yield a finding with sbatch's message if it rejects a job.

    This check runs only if the others, whose findings contain the key and the value to set, find nothing.
    """
    all_nodes_up = all(is_usable(node.get("State", "")) for node in live.nodes_in(partition_name(cluster, live)))
    if live.rejection == UNAVAILABLE and (live.reservations or not all_nodes_up):
        return  # while nodes are down, drained or reserved, sbatch also prints this for jobs that can run later
    if live.rejection:
        hint = "correct the options in [slurm] and slurm.options; `man sbatch` describes them"
        yield Finding(f"sbatch rejects a job with the profile {cluster.name}: {live.rejection}", hint)


PROFILE_CHECKS = (
    *(check_account, check_partition, check_qos, check_reservation),
    *(check_constraint, check_gres, check_cpus, check_memory),
    *(check_time_limit, check_mpi, check_topology, check_pyxis),
    *(check_image, check_mounts, check_python, check_modules, check_cache, check_runs_folder),
)
