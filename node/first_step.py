"""Node health as a job's first step: bad nodes are named, and kept out of later attempts. Standard library only."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from superpod.node.files import read_json, write_json
from superpod.node.run_folder import RunFolder

BAD = "bad_nodes.json"
"""What was found bad in the nodes that this run was given: `{node: words}`."""

LIMIT_S = 300


def bad_nodes(script: Path, checks: list[str], nodes: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Nodes that fail a check, each with what is wrong; a node that says nothing at all within 300 s is bad too."""
    words = ["srun", "--overlap", "--ntasks-per-node=1", f"--ntasks={len(nodes)}", "--label", "--kill-on-bad-exit=0"]
    try:
        done = subprocess.run(
            [*words, "bash", str(script), *checks],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=dict(environment),
        )
        said = done.stdout
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
    found = [match for line in said.splitlines() if (match := re.match(r"\s*(\d+): ([\w-]+)\t(\w+)\t(.*)", line))]
    heard = {int(match[1]) for match in found}
    if not heard:
        return {}  # the check itself failed: that is no node's fault
    bad = {nodes[int(m[1])]: f"{m[2]}: {m[4]}" for m in found if m[3] == "bad"}
    return bad | {node: "says nothing" for i, node in enumerate(nodes) if i not in heard}


def keep_out(run: RunFolder, bad: dict[str, str], jobs: list[str]) -> None:
    """Remember bad nodes, and have Slurm give the queued `jobs` of the run others."""
    known = read_json(run.path / BAD) or {}
    write_json(run.path / BAD, known | {node: {"t": time.time(), "why": why} for node, why in bad.items()})
    nodes = ",".join(sorted({*known, *bad}))
    for job in jobs:
        subprocess.run(["scontrol", "update", f"JobId={job}", f"ExcNodeList={nodes}"], capture_output=True, timeout=30)


def excluded(run: RunFolder) -> list[str]:
    """Nodes that later attempts of the run are kept from."""
    return sorted(read_json(run.path / BAD) or {})
