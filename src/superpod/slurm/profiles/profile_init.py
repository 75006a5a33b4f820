"""Renders a cluster profile from a default profile and the values that Slurm and one of its nodes report.

Only verified values are written, such as a cache folder that exists and a network interface that a node has.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING

from superpod.errors import UserError, did_you_mean
from superpod.planner import hardware
from superpod.slurm.profiles import live_cluster, node_probe, profile_values, profiles

if TYPE_CHECKING:
    from superpod.slurm.submission.connection import Connection


def render_profile(connection: Connection, *, like: str = "", host: str = "", runs: str = "") -> str:
    """Return a profile for the cluster behind `connection`, as TOML.

    Args:
        connection: connection to the cluster.
        like: default profile to start from; "" = the one for the GPU type that Slurm lists.
        host: login node to write into the profile.
        runs: folder for runs to write into the profile.

    Raises:
        UserError: there is no profile `like`, Slurm does not answer, or no default profile has these GPUs.
    """
    if like and like not in profiles.names():
        hint = did_you_mean(like, profiles.names()) or f"profiles: {', '.join(profiles.names())}"
        raise UserError(f"--like: there is no cluster profile {like!r}", hint)
    defaults = [profiles.load(name) for name in profiles.names()]
    mounted_paths = sorted({path for one in defaults for path in (*one.container.mounted, one.folders.cache) if path})
    # Only host_python of this profile is used, which is the same in all default profiles.
    answers = live_cluster.query_cluster(connection, profiles.load("testbed"), runs or "/", mounted_paths)
    partition = answers.default_partition or next(iter(answers.partitions), "")
    nodes = answers.nodes_in(partition)
    (count, kind), _ = Counter(map(live_cluster.count_gpus, nodes)).most_common(1)[0] if nodes else ((0, ""), 0)
    name = like or f"dgx_{hardware.builtin().gpu_name(kind)}"
    if name not in profiles.names():
        raise UserError(
            f"there is no default profile for the GPU type {kind!r} that Slurm lists",
            f"choose a profile with --like: {', '.join(profiles.names())}",
        )
    text = (profiles.DEFAULT_PROFILES / f"{name}.toml").read_text()
    account = answers.associations[0].account if answers.associations else ""
    max_time = answers.partitions.get(partition, {}).get("MaxTime", "UNLIMITED")
    values = {"account": account, "partition": partition, "gpus": "gpus-per-node" if count else "none"}
    # Keep the time limit of the profile unless that of the partition is shorter.
    if max_time != "UNLIMITED" and profile_values.seconds(max_time) < profile_values.seconds("4:00:00"):
        values["time"] = max_time
    for key, value in values.items():
        text = _set(text, key, f'"{value}"')
    text = _set(text, "gpus_per_node", str(count)) if count else text
    text = _set(text, "runs", f'"{runs}"') if runs else text
    if answers.has_pyxis:
        container = profiles.load(name).container
        mounts = zip(container.mounts, container.mounted, strict=True)
        existing_mounts = [mount for mount, path in mounts if answers.paths.get(path) in ("folder", "file")]
        text = re.sub(r"(?m)^(mounts\s*=\s*)\[.*\]", lambda match: match[1] + json.dumps(existing_mounts), text)
    else:
        text = re.sub(r"\[container\]\n(?:.+\n)*", "", text)  # without pyxis, ranks need a virtual environment
    if answers.paths.get(profiles.load(name).folders.cache) != "folder":
        text = _set(text, "cache", '""')
    text = _set_network(text, name, connection)
    if host:
        text += f'\n[login]\nhost = "{host}"\n'
    return text


def _set_network(text: str, name: str, connection: Connection) -> str:
    """Return the profile `text` with the network keys set to the values of a node, or cleared if no node is free."""
    try:
        node = node_probe.probe_node(connection, profiles.parse(text, name), [])
    except UserError:
        return _set(_set(text, "interface", '""'), "hcas", '""')
    default_network = profiles.load(name).network
    interfaces = [interface for interface in node.interfaces if interface != "lo"]
    guess = node.route or (interfaces[0] if len(interfaces) == 1 else "")
    interface = default_network.interface if default_network.interface in interfaces else guess
    hca_names = {hca.name for hca in node.hcas}
    hcas = default_network.hcas if set(default_network.hcas.split(",")) <= hca_names else ""
    values = {
        "interface": interface,
        "hcas": hcas,
        "kind": default_network.kind if default_network.kind == "none" else node.network,
    }
    for key, value in values.items():
        text = _set(text, key, f'"{value}"')
    return text


def _set(text: str, key: str, value: str) -> str:
    """Return TOML with the value of a key replaced, keeping its comment; unchanged if the key is missing."""
    return re.sub(rf"(?m)^({key}\s*=\s*)(\"[^\"]*\"|\S+)", lambda m: m[1] + value, text, count=1)
