"""Every block of docs/python.md runs: the blocks of a page follow one another, as a reader would type them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.runtime.runs.run_folder import RunFolder
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "python.md"
BLOCK = re.compile(r"^```python(?P<marks>[\w ]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
MARKS = {"nemo", "cluster", "run", "script"}
"""What a block may need: NeMo, a Slurm cluster, a finished run in `runs/`; or to be a file of its own, that trains."""
SCRIPTS = 2


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
    output = run_blocks({"nemo", "cluster", "script"}, with_a_run)
    lines = re.findall(r"^    (\S.*)$", BLOCK.sub("", PAGE.read_text()), re.MULTILINE)
    assert len(lines) >= 3
    for shown in lines:
        assert shown in output, f"docs/python.md shows {shown!r}, which its blocks do not print"


@pytest.mark.nemo
@pytest.mark.slow
def test_all_blocks_but_those_of_a_cluster_run(with_a_run):
    assert "settings altered" in run_blocks({"cluster", "script"}, with_a_run)


def run_script(code: str, folder) -> subprocess.CompletedProcess:
    """The file `mine.py` with this code, as a user runs it; NeMo-Run's experiments go into `folder`."""
    (folder / "mine.py").write_text(code)
    command = [sys.executable, "-W", "ignore", "mine.py"]
    environ = {**os.environ, "NEMORUN_HOME": str(folder / "nemo_run"), "HF_HUB_OFFLINE": "1"}
    if "nemo_run.run(" in code:  # looks for torchrun on the PATH: in an activated environment
        environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environ["PATH"]))
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=500)


def experiments(folder) -> int:
    return len([path for path in (folder / "nemo_run" / "experiments").glob("*/*") if path.is_dir()])


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.long
@pytest.mark.parametrize("number", range(SCRIPTS))
def test_a_script_trains_as_one_experiment_on_a_machine_without_a_gpu(tmp_path, number):
    scripts = [code for marks, code in blocks() if "script" in marks]
    assert len(scripts) == SCRIPTS
    done = run_script(scripts[number], tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert experiments(tmp_path) == 1
    assert list(tmp_path.glob("logs/**/step=3*")), "no checkpoint of the last step"


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.long
def test_without_its_guard_a_script_is_one_experiment_all_the_same(tmp_path):
    """NeMo-Run runs the file's own lines in every rank: before, each rank started a further experiment."""
    guarded = next(code for _, code in blocks() if "__main__" in code)
    done = run_script(guarded.replace('if __name__ == "__main__":', "if True:"), tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert experiments(tmp_path) == 1
    assert "NeMo-Run imports it in every rank" in done.stdout + done.stderr
