"""Every block of docs/tasks.md runs as it stands, and says what somebody with that task wants to know."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.runtime.runs.run_folder import RunFolder
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "tasks.md"
TASK = re.compile(r"^## \.\.\. (?P<task>.*)\n(?P<text>(?:(?!^## ).*\n?)*)", re.MULTILINE)
BLOCK = re.compile(r"^```(?P<kind>sh|python)(?P<mark> \w+)?\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)

ANSWERS = {
    "train Llama 3 8B on 2 nodes at sequence 4,096 with a batch of 4M tokens": r"4,194,304 \(gbs 1,024 x seq 4,096\)",
    "train on my 16 nodes": r"16 nodes is not a declared size .* planned now.*\n.*128 x h100[^\n]*\nok",
    "know what fits on this machine": r"llama3_70b\s+70.6B\s+79 GiB short",
    "know which GPU is cheaper for 1T tokens": r"cost USD(?s:.*)100% of the wall-clock time",
    "plan with what my own machines reach": r"h100, 3 runs: median error \d+\.\d% with the defaults, \d\.\d% calibrated"
    r"(?s:.*)wrote mine.toml(?s:.*)legal layouts, [\d,]+ fit",
    "train a model of my own": r"legal layouts, [\d,]+ fit",
    "follow a run in W&B": r"done",
    "see two runs in one picture": r"(?s)lr.*1e-3.*1e-4",
    "use a recipe in my own script": r"Partial 10",
    "know why my run is slow": r"planned\s+20 tokens/s per GPU, 150% more than measured; bound by compute",
}
"""What is printed of each task that has a command."""


def blocks():
    """(task, mark, code in shell's words) of every block, in order."""
    for task in TASK.finditer(PAGE.read_text()):
        for block in BLOCK.finditer(task["text"]):
            yield task["task"], (block["mark"] or "").strip(), block["kind"], block["code"]


def run(kind, code, folder, **variables):
    """What a block prints, stdout and stderr, in `folder`, with this environment's `recipes` on PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-ec", code] if kind == "sh" else [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PATH": path, "COLUMNS": "200"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


def params(mark):
    return [pytest.param(task, kind, code, id=task[:40]) for task, its, kind, code in blocks() if its == mark]


def two_runs(folder):
    for name, rate in (("first", "1e-3"), ("second", "1e-4")):
        facts = {"overrides": [f"optim.config.lr={rate}"]}
        made = RunFolder.create(folder / "runs", "tiny_llama3", facts=facts, recipe_lines=["a = 1"])
        made.new_attempt().finish("done", exit_code=0)
        line = {"t": 1.0, "attempt": "001", "loss": 6.0, "step_time_s": 1.0, "tokens_per_s_per_gpu": 8.0}
        lines = [json.dumps(line | {"step": step, "tokens": 16 * step}) for step in (1, 2)]
        (made.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        layout = {"tokens_per_s_per_gpu": 20.0, "why": ["bound by compute, 87% of the step"]}
        (made.path / "plan.json").write_text(json.dumps({"layouts": [layout]}))
        made.path.rename(made.path.with_name(name))


def test_every_task_with_a_command_has_an_answer():
    assert {task for task, *_ in blocks()} == set(ANSWERS)


@pytest.mark.parametrize(("task", "kind", "code"), params(""))
@pytest.mark.slow
def test_planning_tasks(task, kind, code, tmp_path):
    assert re.search(ANSWERS[task], run(kind, code, tmp_path))


@pytest.mark.parametrize(("task", "kind", "code"), params("run"))
@pytest.mark.slow
def test_tasks_of_a_run(task, kind, code, tmp_path):
    two_runs(tmp_path)
    assert re.search(ANSWERS[task], run(kind, code, tmp_path))


@pytest.mark.long
@pytest.mark.nemo
@pytest.mark.parametrize(("task", "kind", "code"), params("nemo"))
def test_tasks_that_train(task, kind, code, tmp_path):
    assert re.search(ANSWERS[task], run(kind, code, tmp_path, WANDB_MODE="offline"))
