"""Write a cluster profile from what Slurm reports, on the model of a shipped profile."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING

from superpod.errors import UserError, did_you_mean
from superpod.planner import hardware
from superpod.slurm import live_cluster, profiles

if TYPE_CHECKING:
    from superpod.slurm.connection import Connection


def profile(connection: Connection, *, like: str = "", host: str = "", runs: str = "") -> str:
    """TOML of a profile for the cluster behind `connection`.

    Raises:
        UserError: `like` is no shipped profile, Slurm does not answer, or no shipped profile has these GPUs.
    """
    if like and like not in profiles.names():
        hint = did_you_mean(like, profiles.names()) or f"shipped: {', '.join(profiles.names())}"
        raise UserError(f"no shipped profile is called {like!r}", hint)
    mounted = sorted({path for shipped in profiles.names() for path in profiles.load(shipped).container.mounted})
    # Any profile will do here: only its host_python is used.
    answers = live_cluster.ask(connection, profiles.load("testbed"), runs or "/", mounted)
    partition = answers.default_partition or next(iter(answers.partitions), "")
    nodes = answers.nodes_of(partition)
    (count, kind), _ = Counter(map(live_cluster.gpus_of, nodes)).most_common(1)[0] if nodes else ((0, ""), 0)
    name = like or _shipped(kind)
    if name not in profiles.names():
        raise UserError(
            f"Slurm calls its GPUs {kind!r}, which no shipped profile is for",
            f"name one with --like: {', '.join(profiles.names())}",
        )
    text = (profiles.SHIPPED / f"{name}.toml").read_text()
    account = answers.associations[0][0] if answers.associations else ""
    longest = answers.partitions.get(partition, {}).get("MaxTime", "UNLIMITED")
    values = {"account": account, "partition": partition, "gpus": "gpus-per-node" if count else "none"}
    # Only a partition with a shorter limit needs another time than the profile's.
    if longest != "UNLIMITED" and profiles.seconds(longest) < profiles.seconds("4:00:00"):
        values["time"] = longest
    for key, value in values.items():
        text = _set(text, key, f'"{value}"')
    text = _set(text, "gpus_per_node", str(count)) if count else text
    text = _set(text, "runs", f'"{runs}"') if runs else text
    if answers.has_pyxis:
        box = profiles.load(name).container
        places = zip(box.mounts, box.mounted, strict=True)
        there = [mount for mount, path in places if answers.paths.get(path) in ("folder", "file")]
        text = re.sub(r"(?m)^(mounts\s*=\s*)\[.*\]", lambda match: match[1] + json.dumps(there), text)
    else:
        text = re.sub(r"\[container\]\n(?:.+\n)*", "", text)  # no pyxis: the ranks' Python is a virtual environment
    if host:
        text += f'\n[login]\nhost = "{host}"\n'
    return text


def _shipped(kind: str) -> str:
    """The name that a shipped profile for Slurm's GPU type `kind` would have."""
    return f"dgx_{hardware.builtin().gpu_name(kind)}"


def _set(text: str, key: str, value: str) -> str:
    """Change the value of a key and keep its comment; does nothing when the key is missing."""
    return re.sub(rf"(?m)^({key}\s*=\s*)(\"[^\"]*\"|\S+)", lambda m: m[1] + value, text, count=1)
