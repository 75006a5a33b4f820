"""Train small recipes through the code for GPUs, on a CPU."""

import json
import math
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.nemo, pytest.mark.slow]

SCRIPT = """
import json, sys
from pathlib import Path
from superpod.rehearsal.on_gpu.case import Case
from superpod.rehearsal.on_gpu.first_steps import run_cases

cases = [
    Case("tiny_llama3"), Case("tiny_llama3_lora", lock=sys.argv[1] + "/lock"),
    Case("tiny_llama3", bare=True, lock=sys.argv[1] + "/lock"), Case("no_such_recipe"),
]
seen = []
results = run_cases(cases, Path(sys.argv[1]), workers=2, note=seen.append)
print(json.dumps([len(seen), results]))
"""


def run(folder):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("on_gpu")
    count, results = run(folder)
    assert count == 4
    return folder, {(result["case"]["recipe"], result["case"]["bare"]): result for result in results}


def test_records_loss_and_time_of_every_step(trained):
    _, results = trained
    for recipe in ("tiny_llama3", "tiny_llama3_lora"):
        result = results[recipe, False]
        assert not result["error"]
        assert len(result["losses"]) == len(result["seconds"]) == 3
        assert result["losses"] == sorted(result["losses"], reverse=True)
        assert result["predicted"]["verdict"] == "ok"
        assert result["flops_per_step"] > 0


def test_bare_loop_starts_with_the_loss_of_a_uniform_distribution(trained):
    _, results = trained
    result = results["tiny_llama3", True]
    assert not result["error"]
    assert result["losses"][0] == pytest.approx(math.log(result["folded"]["vocab"][1]), rel=0.02)
    assert result["parameters"] == results["tiny_llama3", False]["parameters"]


def test_records_the_error_of_a_case_that_fails(trained):
    folder, results = trained
    assert results["no_such_recipe", False]["error"].startswith("UserError: there is no recipe")
    assert "Traceback" in (folder / "no_such_recipe" / "output.log").read_text()


def test_finished_cases_are_not_trained_again(trained):
    folder, _ = trained
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"case": {"recipe"')  # a process was killed while it wrote this line
    count, results = run(folder)
    assert (count, len(results)) == (0, 4)
