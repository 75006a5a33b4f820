"""A cluster profile against the live cluster: what Slurm would refuse, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from superpod.errors import did_you_mean
from superpod.slurm.profiles.live_cluster import (
    UNAVAILABLE,
    Association,
    LiveCluster,
    count_gpus,
    is_usable,
    list_items,
)
from superpod.slurm.profiles.profile_values import match_gpu, seconds

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster


class Finding(NamedTuple):
    """One problem, and the next move."""

    message: str
    hint: str = ""


def partition_name(cluster: Cluster, live: LiveCluster) -> str:
    """The profile's partition, or the cluster's default."""
    return cluster.slurm.partition or live.default_partition


def account_name(cluster: Cluster, live: LiveCluster) -> str:
    """The profile's account, or the user's default; "" = not known."""
    return cluster.slurm.account or live.default_account or ""


def association(cluster: Cluster, live: LiveCluster) -> Association:
    """The association that a job of this profile counts against."""
    account, name = account_name(cluster, live), partition_name(cluster, live)
    own = [a for a in live.associations if account in ("", a.account)]
    exact = [a for a in own if a.partition == name]
    return next(iter([*exact, *(a for a in own if not a.partition)]), Association(account))


def qos_names(cluster: Cluster, live: LiveCluster) -> list[str]:
    """The QOS whose limits count for a job, first the one that wins: the partition's, and the job's own."""
    # That of a job that names none is the association's default, or `normal`, which Slurm makes itself.
    own = cluster.slurm.qos or association(cluster, live).default_qos or "normal"
    of_partition = live.partitions.get(partition_name(cluster, live), {}).get("QoS", "N/A")
    names = [own] if of_partition in ("N/A", own) else [of_partition, own]
    return names[::-1] if "OverPartQOS" in live.qos.get(own, {}).get("Flags", "") else names


def is_lifted(cluster: Cluster, live: LiveCluster, flag: str) -> bool:
    """A QOS of the job lifts a limit of the partition: PartitionTimeLimit, PartitionMaxNodes, PartitionMinNodes."""
    return any(flag in live.qos.get(name, {}).get("Flags", "").split(",") for name in qos_names(cluster, live))


def account(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The account is one of this user's."""
    accounts = list(dict.fromkeys(known.account for known in live.associations))
    if not live.associations or ("associations" not in live.enforces and not cluster.slurm.account):
        return
    if not cluster.slurm.account:
        if live.default_account == "":
            yield Finding(
                "slurm.account is empty, and you have no default account in Slurm", f"yours: {', '.join(accounts)}"
            )
    elif cluster.slurm.account not in accounts:
        yield Finding(
            f"slurm.account {cluster.slurm.account!r} is not one of yours",
            f"yours: {', '.join(accounts) or 'none at all'}",
        )


def partition(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The partition exists, is up, and accepts this account."""
    name = partition_name(cluster, live)
    known = live.partitions.get(name)
    if known is None:
        hint = did_you_mean(name, list(live.partitions)) or f"there are {', '.join(live.partitions)}"
        yield Finding(f"slurm.partition {name!r} does not exist", hint)
    elif known.get("State", "UP") != "UP":
        yield Finding(f"partition {name} is {known['State']}", "wait for its administrators, or choose another")
    else:
        own = account_name(cluster, live)
        yield from _access_findings(name, known, "Accounts", "account", own, with_parents(own, live))
        yield from _access_findings(name, known, "Qos", "QOS", cluster.slurm.qos, [cluster.slurm.qos])


def with_parents(account: str, live: LiveCluster) -> list[str]:
    """An account, and those above it."""
    names = [account]
    while (parent := live.accounts.get(names[-1], {}).get("ParentName", "")) and parent not in names:
        names.append(parent)
    return names


def _access_findings(
    name: str, known: dict[str, str], key: str, what: str, own: str, counting: list[str]
) -> Iterator[Finding]:
    """`own` is accepted where one of `counting` is: recent Slurm lets the accounts below an allowed one in, too.

    It takes denied ones the same way (scontrol(1), DenyAccounts: "hierarchical"), older ones by their own name alone
    (`part_policy_valid_acct`): what an account below a denied one may, `sbatch --test-only` says (`refused`). What
    accepts some denies none, in every version.
    """
    accepted, denied = list_items(known.get(f"Allow{key}", "")), list_items(known.get(f"Deny{key}", ""))
    if own and accepted and not {*counting} & {*accepted}:
        yield Finding(f"partition {name} does not accept {what} {own!r}", f"it accepts {', '.join(accepted)}")
    elif not accepted and own in denied:
        yield Finding(f"partition {name} denies {what} {own!r}", f"it denies {', '.join(denied)}")


def qos(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The QOS is one that this user's account has."""
    own = [a for a in live.associations if a.account == account_name(cluster, live)] or live.associations
    names = list(dict.fromkeys(name for association in own for name in association.qos))
    if cluster.slurm.qos and names and cluster.slurm.qos not in names:
        yield Finding(f"slurm.qos {cluster.slurm.qos!r} is not one of yours", f"yours: {', '.join(names)}")


def reservation(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The reservations that slurm.options name exist, and are for this user."""
    known = {r.name: r for r in live.reservations}
    for name in own_reservations(cluster):
        if name not in known:
            listed = ", ".join(known) or "none at all"
            yield Finding(f"slurm.options: there is no reservation {name!r}", f"there are: {listed}")
        elif (who := [*known[name].users, *known[name].accounts]) and not (
            live.user in known[name].users
            or {*known[name].accounts} & {*with_parents(account_name(cluster, live), live)}
        ):
            yield Finding(
                f"slurm.options: reservation {name} is for {', '.join(who)}, not for {live.user}", "leave it out"
            )


def own_reservations(cluster: Cluster) -> list[str]:
    """The reservations that the profile's jobs go to."""
    options = [option.partition("=") for option in cluster.slurm.options]
    return [name for key, _, value in options if key == "--reservation" for name in value.split(",")]


def constraint(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Every feature of the constraint is one that a node of the partition has."""
    name = partition_name(cluster, live)
    features = {f for n in live.nodes_in(name) for f in n.get("AvailableFeatures", "").split(",")} - {"(null)", ""}
    for word in re.findall(r"[^\s&|,()\[\]]+", re.sub(r"\*\d+", "", cluster.slurm.constraint)):  # a&b, [a|b], a*4
        if word not in features:
            listed = ", ".join(sorted(features)) or "none at all"
            yield Finding(f"slurm.constraint {word!r} is a feature of no node in {name}", f"features there: {listed}")


def gres(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Nodes have the number and type of GPUs that the profile names, if Slurm counts GPUs."""
    name = partition_name(cluster, live)
    nodes = live.nodes_in(name)
    if not nodes:
        return
    most = max(count_gpus(node)[0] for node in nodes)
    if cluster.slurm.gpus == "none":
        return
    if most == 0:
        yield Finding(f"Slurm lists no GPUs for any node of {name}", 'write slurm.gpus = "none": jobs get whole nodes')
    elif most < cluster.gpus_per_node:
        yield Finding(
            f"gpus_per_node is {cluster.gpus_per_node}, but the nodes of {name} have {most}",
            f"write gpus_per_node = {most}",
        )
    types = {count_gpus(node)[1] for node in nodes} - {""}
    kinds = {kind for kind in map(match_gpu, types) if kind}
    if kinds and not any(f"{cluster.gpu}_".startswith(f"{kind}_") for kind in kinds):  # a100 may be a100_40gb
        listed = ", ".join(sorted(types))
        yield Finding(
            f"gpu is {cluster.gpu!r}, but Slurm calls the GPUs of {name} {listed}", f'write gpu = "{min(kinds)}"'
        )
    if cluster.slurm.gpu_type and cluster.slurm.gpu_type not in types:
        yield Finding(
            f"slurm.gpu_type {cluster.slurm.gpu_type!r} is in no node of {name}", f"types: {', '.join(types)}"
        )


def cpus(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """A node has the cores for all its ranks."""
    name, cpus_each = partition_name(cluster, live), cluster.slurm.cpus_per_task
    most = max((int(node.get("CPUTot", 0)) for node in live.nodes_in(name)), default=0)
    need = cpus_each * cluster.gpus_per_node
    if most and need > most:
        yield Finding(
            f"slurm.cpus_per_task {cpus_each} x {cluster.gpus_per_node} ranks = {need} CPUs, but a node of {name} "
            f"has {most}",
            f"write cpus_per_task = {most // cluster.gpus_per_node}",
        )


def memory(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The memory is no more than a node has."""
    name = partition_name(cluster, live)
    most = max((int(n.get("RealMemory", 0)) for n in live.nodes_in(name)), default=0)
    if most and mib(cluster.slurm.mem) > most:
        yield Finding(f"slurm.mem {cluster.slurm.mem} is more than a node of {name} has: {most}M", 'write mem = "0"')


def mib(mem: str) -> float:
    """MiB of `slurm.mem`; 0 = all of the node."""
    match = re.fullmatch(r"(\d+)([KMGT]?)", mem)
    return int(match[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[match[2]] if match else 0


def limit(cluster: Cluster, live: LiveCluster, time: str = "") -> Iterator[Finding]:
    """The time limit is no longer than the partition allows."""
    if is_lifted(cluster, live, "PartitionTimeLimit"):
        return
    name = partition_name(cluster, live)
    longest = live.partitions.get(name, {}).get("MaxTime", "UNLIMITED")
    limit_text = time or cluster.slurm.time
    if longest not in ("UNLIMITED", "") and seconds(limit_text) > seconds(longest):
        yield Finding(f"an attempt of {limit_text} is longer than {name} allows: {longest}", f"--time {longest}")


def mpi(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The PMI plug-in is one that this Slurm has."""
    if live.mpi and cluster.slurm.mpi not in live.mpi:
        yield Finding(f"slurm.mpi {cluster.slurm.mpi!r} is not in this Slurm", f"it has {', '.join(live.mpi)}")
    elif live.mpi_failure:
        yield mpi_finding(cluster, live.mpi_failure)


def mpi_finding(cluster: Cluster, reason: str, where: str = "") -> Finding:
    """The PMI plug-in is listed and cannot be used."""
    return Finding(
        f"srun --mpi={cluster.slurm.mpi} fails{where}: {reason}",
        'write slurm.mpi = "none": PyTorch needs no PMI; or ask the site for the plug-in\'s library',
    )


def topology(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Slurm knows NVLink domains where the profile says so: --segment means something with topology/block only."""
    if live.topology and cluster.slurm.topology == "block" and live.topology != "topology/block":
        yield Finding(
            f"slurm.topology is 'block', but this Slurm runs {live.topology}",
            'write topology = "": jobs then ask for no --segment',
        )


def pyxis(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """pyxis is installed, if the profile names a container."""
    if cluster.container.image and not live.has_pyxis:
        yield Finding(
            "srun has no --container-image here: pyxis is not installed",
            'write container.image = "", and a virtual environment on a shared disk as software.python',
        )


def image(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The image file can be read; the name of an image in a registry is not looked up."""
    name = cluster.container.image
    if name.startswith("/") and live.paths.get(name, "file") != "file":
        yield Finding(f"container.image {name} is {live.paths[name]}", "enroot import writes it: docs/slurm.md")


def mounts(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Every mounted path exists."""
    for outside in cluster.container.mounted if cluster.container.image else []:
        if live.paths.get(outside, "folder") not in ("folder", "file"):
            yield Finding(f"container.mounts: {outside} is {live.paths[outside]}", "mount only what every node has")


def host_python(cluster: Cluster, version: int, where: str = "") -> Iterator[Finding]:
    """The batch script's Python, of this version (309; 0 = none) where it was looked at, is 3.9 or later."""
    name = cluster.software.host_python
    if not version:
        yield Finding(f"software.host_python {name!r} does not run{where}", "name a Python 3.9 or later")
    elif version < 309:
        yield Finding(f"software.host_python {name!r} is {format_version(version)}{where}", "3.9 or later")


def format_version(version: int) -> str:
    """309 as 3.9."""
    return f"{version // 100}.{version % 100}"


def module_findings(cluster: Cluster, states: Mapping[str, str], where: str = "") -> Iterator[Finding]:
    """Every module loads, by its state where it was looked at: loads, missing, or `no module command`."""
    for name in cluster.software.modules:
        if (state := states.get(name, "missing")) != "loads":
            why = "there is no `module` command" if state != "missing" else f"`module load {name}` fails"
            yield Finding(f"software.modules: {why}{where}", f"`module avail`{' there' * bool(where)} lists them")


def python(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The Pythons of the batch script and of the ranks exist, and the former is 3.9 or later."""
    yield from host_python(cluster, live.python)
    if not live.ranks_python:
        yield Finding(f"the ranks' Python {cluster.software.python!r} does not exist", "see software.python")


def modules(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Every module can be loaded, where this machine has modules."""
    yield from module_findings(cluster, {name: live.modules.get(name) or "loads" for name in cluster.software.modules})


def cache(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The cache of tokenizers and weights exists, if the profile names one."""
    name = cluster.folders.cache
    if name and live.paths.get(name, "folder") != "folder":
        yield Finding(f"folders.cache {name} is {live.paths[name]}", "create it, and put the tokenizer into it")


def runs_folder(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The folder for runs can be written, and what is in it cannot be replaced by others."""
    if live.runs_free is None:
        yield Finding(f"{cluster.folders.runs} cannot be written", "set folders.runs, or --runs, to another folder")
    if live.runs_open:
        yield Finding(
            f"others can write to {cluster.folders.runs} (mode {live.runs_open}), and could replace your runs in it",
            "chmod +t, or set folders.runs, or --runs, to another folder",
        )


def sbatch_refusal(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Slurm's own judgement of the job, last: the checks before it name the key and what to write."""
    everything_up = all(is_usable(node.get("State", "")) for node in live.nodes_in(partition_name(cluster, live)))
    if live.refused == UNAVAILABLE and (live.reservations or not everything_up):
        return  # while nodes are down, drained or reserved, this is said of jobs that can run later
    if live.refused:
        hint = "`man sbatch` lists the options; the profile's are [slurm] and slurm.options"
        yield Finding(f"sbatch refuses a job with the profile of {cluster.name}: {live.refused}", hint)


PROFILE_CHECKS = (
    *(account, partition, qos, reservation, constraint, gres, cpus, memory, limit, mpi),
    *(topology, pyxis, image, mounts, python, modules, cache, runs_folder),
)
