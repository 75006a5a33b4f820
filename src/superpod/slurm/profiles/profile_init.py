"""Write a cluster profile based on a default profile and on what Slurm and one of its nodes report.

Only verified values are written: for example, the cache folder exists, and a node has the network interface.
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
    """Render the TOML of a profile for the cluster behind `connection`.

    Args:
        connection: to the cluster.
        like: default profile to start from; "" = chosen based on the GPUs.
        host: login host to write into the profile.
        runs: folder for runs to write into the profile.

    Raises:
        UserError: there is no profile `like`, Slurm does not answer, or no default profile has these GPUs.
    """
    if like and like not in profiles.names():
        hint = did_you_mean(like, profiles.names()) or f"profiles: {', '.join(profiles.names())}"
        raise UserError(f"--like: there is no cluster profile {like!r}", hint)
    defaults = [profiles.load(name) for name in profiles.names()]
    mounted_paths = sorted({path for one in defaults for path in (*one.container.mounted, one.folders.cache) if path})
    # Any profile will do here: only its host_python is used.
    answers = live_cluster.query_cluster(connection, profiles.load("testbed"), runs or "/", mounted_paths)
    partition = answers.default_partition or next(iter(answers.partitions), "")
    nodes = answers.nodes_in(partition)
    (count, kind), _ = Counter(map(live_cluster.count_gpus, nodes)).most_common(1)[0] if nodes else ((0, ""), 0)
    name = like or _default_name(kind)
    if name not in profiles.names():
        raise UserError(
            f"the GPUs have the type {kind!r} in Slurm, and there is no default profile for it",
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
        box = profiles.load(name).container
        places = zip(box.mounts, box.mounted, strict=True)
        existing_mounts = [mount for mount, path in places if answers.paths.get(path) in ("folder", "file")]
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
    """Set the network keys to the values that a node reports; clear them if no node is free."""
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


def _default_name(kind: str) -> str:
    """Return the name of the default profile for a GPU type as named in Slurm."""
    return f"dgx_{hardware.builtin().gpu_name(kind)}"


def _set(text: str, key: str, value: str) -> str:
    """Set the value of a key and keep its comment; do nothing if the key is missing."""
    return re.sub(rf"(?m)^({key}\s*=\s*)(\"[^\"]*\"|\S+)", lambda m: m[1] + value, text, count=1)
