"""Every block of docs/python.md runs: the blocks of a page follow one another, as a reader would type them."""

import json
import re
import subprocess
import sys

import pytest

from superpod.node.run_folder import RunFolder
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "python.md"
BLOCK = re.compile(r"^```python(?P<marks>[\w ]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
MARKS = {"nemo", "cluster", "run"}
"""What a block may need: NeMo, a Slurm cluster, a finished run in `runs/`."""


def blocks() -> list[tuple[set[str], str]]:
    """(marks, code) of every Python block of the page, in order."""
    return [(set(match["marks"].split()), match["code"]) for match in BLOCK.finditer(PAGE.read_text())]


def run_blocks(without: set[str], folder) -> str:
    """The output of all blocks that carry none of these marks, run as one program in `folder`."""
    code = "\n".join(code for marks, code in blocks() if not marks & without)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def with_a_run(tmp_path):
    run = RunFolder.create(tmp_path / "runs", "tiny_llama3", facts={}, recipe_lines=["a = 1"])
    run.new_attempt().finish("done", exit_code=0)
    line = {"t": 1.0, "attempt": "001", "loss": 6.0, "step_time_s": 1.0, "tokens_per_s_per_gpu": 8.0}
    lines = [json.dumps(line | {"step": step, "tokens": 16 * step}) for step in (1, 2)]
    (run.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_marks_are_known_and_every_block_parses():
    assert len(blocks()) >= 8
    for marks, code in blocks():
        assert marks <= MARKS
        compile(code, PAGE.name, "exec")


def test_blocks_without_nemo_run(with_a_run):
    output = run_blocks({"nemo", "cluster"}, with_a_run)
    for shown in re.findall(r"^    (\S.*)$", BLOCK.sub("", PAGE.read_text()), re.MULTILINE):
        assert shown in output, f"docs/python.md shows {shown!r}, which its blocks do not print"


@pytest.mark.nemo
def test_all_blocks_but_those_of_a_cluster_run(with_a_run):
    assert "settings altered" in run_blocks({"cluster"}, with_a_run)
