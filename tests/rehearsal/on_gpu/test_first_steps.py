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
    Case("tiny_llama3"), Case("tiny_llama3_lora", exclusive=True), Case("tiny_llama3", bare=True, exclusive=True),
    Case("no_such_recipe"), *(Case(name) for name in sys.argv[2:]),
]
seen = []
results = run_cases(cases, Path(sys.argv[1]), workers=2, note=seen.append)
print(json.dumps([len(seen), results]))
"""


def run(folder, *more):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, folder, *more]
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


def test_bare_loop_starts_with_the_loss_of_a_uniform_distribution(trained):
    _, results = trained
    result = results["tiny_llama3", True]
    assert not result["error"]
    assert result["losses"][0] == pytest.approx(math.log(result["folded"]["vocab"][1]), rel=0.02)
    assert result["parameters"] == results["tiny_llama3", False]["parameters"]


def test_records_the_error_of_a_case_that_fails(trained):
    folder, results = trained
    assert results["no_such_recipe", False]["error"].startswith("UserError: there is no recipe")
    [log] = folder.glob("no_such_recipe-*/output.log")
    assert "Traceback" in log.read_text()


def test_finished_cases_are_not_trained_again(trained):
    folder, _ = trained
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"case": {"recipe"')  # a process was killed while it wrote this line
    count, results = run(folder, "another_unknown_recipe")
    assert (count, len(results)) == (1, 5)
    count, results = run(folder, "another_unknown_recipe")
    assert (count, len(results)) == (0, 5)


BUILD = """
import json, sys
from pathlib import Path
import superpod.rehearsal.entry
import fiddle as fdl
from superpod.rehearsal.on_gpu.case import Case, build_folded_recipe
from superpod.rehearsal.on_gpu.fold import fold
from superpod.requests.request import Request
from superpod.requests.resolve import build_configuration, plan_job

built = {}
for name in ("llama3_70b_pretrain_h100_bf16", "deepseek_v2_lite_pretrain_h100_bf16"):
    request = Request(name)
    full, _ = build_configuration(request)
    folded = fold(plan_job(full, request))
    small = build_folded_recipe(full, folded, Case(name), Path(sys.argv[1]) / name)
    config = small.model.config
    built[name] = {
        "callbacks": [fdl.get_callable(callback).__name__ for callback in small.trainer.callbacks],
        "heads": [config.num_attention_heads, config.kv_channels, config.hidden_size],
        "tp": small.trainer.strategy.tensor_model_parallel_size,
    }
print(json.dumps(built))
"""


def test_heads_keep_their_width_and_deepep_is_left_out(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", BUILD, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    built = json.loads(done.stdout.splitlines()[-1])
    llama = built["llama3_70b_pretrain_h100_bf16"]
    assert llama["tp"] == 1
    assert llama["heads"][0] < 64
    assert llama["heads"][1:] == [128, 8192]
    assert "DeepEPCallback" not in built["deepseek_v2_lite_pretrain_h100_bf16"]["callbacks"]
