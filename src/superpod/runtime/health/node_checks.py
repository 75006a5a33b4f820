"""Run node checks in the first step of a job, and exclude bad nodes from later attempts. Standard library only."""

from __future__ import annotations

import re
import time
from pathlib import Path

from superpod.common.json_files import read_json, write_json
from superpod.runtime.attempts import job_step
from superpod.runtime.processes.command import output_of
from superpod.runtime.runs.run_folder import RunFolder

BAD = "bad_nodes.json"
"""File in the run folder with the nodes that failed a check: `{node: {"t": Unix time, "why": reason}}`."""

LIMIT_S = 300
"""Timeout of the checks in seconds."""


def bad_nodes(script: Path, checks: list[str], nodes: list[str]) -> dict[str, str]:
    """Run `checks` with `script` on all nodes of the job; return node -> reason for each bad node.

    A node that prints nothing within LIMIT_S seconds is bad. If all nodes print nothing, none is.
    """
    lines, _ = job_step.run_on_every_node(len(nodes), ["bash", str(script), *checks], LIMIT_S)
    bad, responding = {}, set()
    for task, printed in lines.items():
        for line in printed:
            match = re.match(r"([\w-]+)\t(\w+)\t(.*)", line)  # such as gpus<TAB>bad<TAB>reason
            if match:
                responding.add(task)
                if match[2] == "bad":
                    bad[nodes[task]] = f"{match[1]}: {match[3]}"
    if not responding:
        return {}  # the script itself failed, so the nodes are not at fault
    return bad | {node: "does not respond" for task, node in enumerate(nodes) if task not in responding}


def exclude_nodes(run: RunFolder, bad: dict[str, str], jobs: list[str]) -> None:
    """Record the bad nodes (node -> reason) in the run folder, and exclude them from its pending `jobs`."""
    known_nodes = read_json(run.path / BAD) or {}
    write_json(run.path / BAD, known_nodes | {node: {"t": time.time(), "why": why} for node, why in bad.items()})
    nodes = ",".join(excluded_nodes(run))
    for job in jobs:
        output_of(["scontrol", "update", f"JobId={job}", f"ExcNodeList={nodes}"], timeout_s=30)


def excluded_nodes(run: RunFolder) -> list[str]:
    """Return the nodes for the `--exclude` option of later jobs: those in the run's script, and the bad nodes.

    Empty if there are no bad nodes, since the list in the script is then sufficient.
    """
    bad = sorted(read_json(run.path / BAD) or {})
    return [*_excluded_in_script(run), *bad] if bad else []


def _excluded_in_script(run: RunFolder) -> list[str]:
    try:
        script = (run.path / "job.sbatch").read_text(encoding="utf-8")
    except OSError:
        return []
    return re.findall(r"""^#SBATCH (?:--exclude=|-x ?)["']?([^"'\s]+)""", script, re.MULTILINE)
