"""A cluster profile written from what Slurm says of itself, in the words of a shipped one."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING

from superpod.launchers import cluster, site
from superpod.planner import hardware
from superpod.planner.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from superpod.launchers.login import Login


def profile(login: Login, *, like: str = "", host: str = "", runs: str = "") -> str:
    """TOML of a profile for the cluster behind `login`.

    Raises:
        UserError: `like` is no shipped profile, Slurm does not answer, or says GPUs that no shipped profile is for.
    """
    if like and like not in cluster.names():
        hint = did_you_mean(like, cluster.names()) or f"shipped: {', '.join(cluster.names())}"
        raise UserError(f"no shipped profile is called {like!r}", hint)
    mounted = sorted({path for shipped in cluster.names() for path in cluster.load(shipped).container.mounted})
    answers = site.ask(login, cluster.load("testbed"), runs or "/", mounted)
    partition = answers.default_partition or next(iter(answers.partitions), "")
    nodes = answers.nodes_of(partition)
    (count, kind), _ = Counter(map(site.gpus_of, nodes)).most_common(1)[0] if nodes else ((0, ""), 0)
    name = like or _shipped(kind)
    if name not in cluster.names():
        raise UserError(
            f"Slurm calls its GPUs {kind!r}, which no shipped profile is for",
            f"name one with --like: {', '.join(cluster.names())}",
        )
    text = (cluster.SHIPPED / f"{name}.toml").read_text()
    account = answers.associations[0][0] if answers.associations else ""
    longest = answers.partitions.get(partition, {}).get("MaxTime", "UNLIMITED")
    values = {"account": account, "partition": partition, "gpus": "gpus-per-node" if count else "none"}
    if longest != "UNLIMITED" and cluster.seconds(longest) < cluster.seconds("4:00:00"):
        values["time"] = longest
    for key, value in values.items():
        text = _set(text, key, f'"{value}"')
    text = _set(text, "gpus_per_node", str(count)) if count else text
    text = _set(text, "runs", f'"{runs}"') if runs else text
    if answers.has_pyxis:
        box = cluster.load(name).container
        places = zip(box.mounts, box.mounted, strict=True)
        there = [mount for mount, path in places if answers.paths.get(path) in ("folder", "file")]
        text = re.sub(r"(?m)^(mounts\s*=\s*)\[.*\]", lambda match: match[1] + json.dumps(there), text)
    else:
        text = re.sub(r"\[container\]\n(?:.+\n)*", "", text)  # no pyxis: the ranks' Python is a virtual environment
    if host:
        text += f'\n[login]\nhost = "{host}"\n'
    return text


def _shipped(kind: str) -> str:
    """The profile for GPUs that Slurm calls so."""
    known = hardware.GPU_ALIASES.get(kind.lower(), kind.lower())
    return f"dgx_{known}"


def _set(text: str, key: str, value: str) -> str:
    """Give a key another value, keeping its comment; a key that is not there is left out."""
    return re.sub(rf"(?m)^({key}\s*=\s*)(\"[^\"]*\"|\S+)", lambda m: m[1] + value, text, count=1)
