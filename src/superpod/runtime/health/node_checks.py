"""Run node checks in the first step of a job, and exclude bad nodes from later attempts. Standard library only."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from superpod.common.json_files import read_json, write_json
from superpod.runtime.runs.run_folder import RunFolder

BAD = "bad_nodes.json"
"""File in the run folder with the nodes that failed a check: `{node: {"t": Unix time, "why": reason}}`."""

LIMIT_S = 300
"""Timeout of the checks in seconds."""


def bad_nodes(script: Path, checks: list[str], nodes: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Run `checks` with `script` on all nodes of the job; return node -> reason for each bad node.

    A node that prints nothing within LIMIT_S seconds is bad. If all nodes print nothing, none is.
    """
    srun = ["srun", "--overlap", "--ntasks-per-node=1", f"--ntasks={len(nodes)}", "--label", "--kill-on-bad-exit=0"]
    try:
        process = subprocess.run(
            [*srun, "bash", str(script), *checks],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=dict(environment),
        )
        output = process.stdout
    except subprocess.TimeoutExpired as late:
        output = _decode(late.stdout)

    # srun's --label prefixes each line with the task's number: `3: gpus<TAB>bad<TAB>reason`.
    matches = (re.match(r"\s*(\d+): ([\w-]+)\t(\w+)\t(.*)", line) for line in output.splitlines())
    verdicts = [match for match in matches if match]
    answered_tasks = {int(match[1]) for match in verdicts}
    if not answered_tasks:
        return {}  # the script itself failed, so the nodes are not at fault
    bad = {nodes[int(match[1])]: f"{match[2]}: {match[4]}" for match in verdicts if match[3] == "bad"}
    return bad | {node: "does not respond" for task, node in enumerate(nodes) if task not in answered_tasks}


def _decode(output: bytes | str | None) -> str:
    """Decode the output in a TimeoutExpired, which is bytes even in text mode (CPython issue 87597)."""
    if isinstance(output, bytes):
        return output.decode(errors="replace")
    return output or ""


def exclude_nodes(run: RunFolder, bad: dict[str, str], jobs: list[str]) -> None:
    """Record the bad nodes (node -> reason) in the run folder, and exclude them from its pending `jobs`."""
    known_nodes = read_json(run.path / BAD) or {}
    write_json(run.path / BAD, known_nodes | {node: {"t": time.time(), "why": why} for node, why in bad.items()})
    nodes = ",".join(excluded_nodes(run))
    for job in jobs:
        subprocess.run(["scontrol", "update", f"JobId={job}", f"ExcNodeList={nodes}"], capture_output=True, timeout=30)


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
