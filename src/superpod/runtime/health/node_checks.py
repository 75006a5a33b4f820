"""Node health as a job's first step: names bad nodes, and keeps them out of later attempts. Standard library only."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from superpod.common.files import read_json, write_json
from superpod.runtime.runs.run_folder import RunFolder

BAD = "bad_nodes.json"
"""Nodes of this run that failed a check: `{node: {"t": Unix time, "why": words}}`."""

LIMIT_S = 300


def bad_nodes(script: Path, checks: list[str], nodes: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Nodes that fail a check, each with what is wrong; a node that prints nothing within 300 s is bad too."""
    words = ["srun", "--overlap", "--ntasks-per-node=1", f"--ntasks={len(nodes)}", "--label", "--kill-on-bad-exit=0"]
    try:
        done = subprocess.run(
            [*words, "bash", str(script), *checks],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=dict(environment),
        )
        output = done.stdout
    except subprocess.TimeoutExpired as late:
        output = _decoded(late.stdout)
    # srun's --label puts the task's number before each line: `3: gpus<TAB>bad<TAB>words`.
    verdicts = [m for line in output.splitlines() if (m := re.match(r"\s*(\d+): ([\w-]+)\t(\w+)\t(.*)", line))]
    answered = {int(match[1]) for match in verdicts}
    if not answered:
        return {}  # the check itself failed, so no node is to blame
    bad = {nodes[int(match[1])]: f"{match[2]}: {match[4]}" for match in verdicts if match[3] == "bad"}
    return bad | {node: "says nothing" for task, node in enumerate(nodes) if task not in answered}


def _decoded(output: bytes | str | None) -> str:
    """What a command printed until its time was over: bytes even in text mode (CPython issue 87597)."""
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def exclude_nodes(run: RunFolder, bad: dict[str, str], jobs: list[str]) -> None:
    """Remember bad nodes, and have Slurm give the queued `jobs` of the run others."""
    known = read_json(run.path / BAD) or {}
    write_json(run.path / BAD, known | {node: {"t": time.time(), "why": why} for node, why in bad.items()})
    nodes = ",".join(excluded_nodes(run))
    for job in jobs:
        subprocess.run(["scontrol", "update", f"JobId={job}", f"ExcNodeList={nodes}"], capture_output=True, timeout=30)


def excluded_nodes(run: RunFolder) -> list[str]:
    """Nodes that later attempts of the run do not get: the bad ones, and then those that its script leaves out too.

    Empty without bad ones: Slurm reads the script, whose list `--exclude` would replace.
    """
    bad = sorted(read_json(run.path / BAD) or {})
    return [*_left_out(run), *bad] if bad else []


def _left_out(run: RunFolder) -> list[str]:
    try:
        script = (run.path / "job.sbatch").read_text(encoding="utf-8")
    except OSError:
        return []
    return re.findall(r"""^#SBATCH (?:--exclude=|-x ?)["']?([^"'\s]+)""", script, re.MULTILINE)
