"""Test models that cannot train, and their workarounds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.collection import registry
from superpod.collection.facts import proof_level
from superpod.errors import UserError
from superpod.launch import local
from superpod.launch.finetuning import finetune
from superpod.requests.request import Request
from superpod.slurm.preflight.preflight import findings
from tests.slurm.preflight.test_preflight import case
from tests.weights import tiny

GEMMA3 = "gemma3_1b_pretrain_h100_bf16"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gemma3"


def cli(*words):
    return subprocess.run([sys.executable, "-m", "superpod.cli", *words], capture_output=True, text=True, timeout=900)


def test_every_gemma3_recipe_is_broken():
    names = [name for name in registry.recipes() if name.startswith("gemma3_1b_")]
    assert len(names) > 40
    for name in names:
        recipe = registry.find(name)
        assert "rotary_pos_cos_sin" in (proof_level.training_problem(recipe) or [""])[0]
        assert set(proof_level.lookup(recipe).broken) == set(recipe.nodes)


def test_overrides_do_not_help():
    problem = proof_level.explain_refusal(registry.find(GEMMA3), 1, ["model.config.window_size=128"])
    assert problem is not None
    assert "examples/gemma3" in problem[1]


def test_refuses_local_run_before_importing_nemo(monkeypatch):
    monkeypatch.setattr(local, "resolve", lambda request: pytest.fail("resolved"))
    with pytest.raises(UserError, match="cannot train: Megatron-Core") as refused:
        local.prepare(Request(GEMMA3))
    assert "gemma3_1b_fixed" in refused.value.hint


def test_refuses_finetuning_by_model_name(tmp_path):
    with pytest.raises(UserError, match="gemma3_1b_lora_h100_bf16 cannot train: Megatron-Core") as refused:
        finetune.check("gemma3_1b_lora_h100_bf16", finetune.Task(str(tmp_path / "none"), ("none.jsonl",)))
    assert "gemma3_1b_fixed" in refused.value.hint


def test_refuses_gemma3_in_a_user_file_with_workaround(tmp_path):
    from superpod.weights.families.hf_model import hf_model

    keys = {"model_type": "gemma3_text", **tiny.SIZES, "head_dim": 16, "sliding_window": 8}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(UserError, match=r"its model cannot train: .* TypeError") as refused:
        hf_model(tmp_path / "config.json")
    assert "CosSinConfig1B" in refused.value.hint


def test_refuses_submission():
    messages = [finding.message for finding in findings(case(recipe=GEMMA3, nodes=1))]
    assert any("rotary_pos_cos_sin" in message for message in messages)


def test_check_refuses_gemma3():
    done = cli("check", GEMMA3)
    assert done.returncode == 2
    assert "rotary_pos_cos_sin" in done.stdout + done.stderr


def test_broken_models_have_workarounds():
    broken = {name: m for name, m in registry.models().items() if m.broken}
    assert set(broken) == {"gemma3_1b"}
    assert all(m.workaround for m in broken.values())


def test_workaround_has_the_same_recipes():
    done = cli("--recipes", str(EXAMPLE), "list", "gemma3_1b_fixed")
    assert done.returncode == 0, done.stderr
    own = [line for line in done.stdout.splitlines() if line.startswith("gemma3_1b_fixed_")]
    assert len(own) == len([name for name in registry.recipes() if name.startswith("gemma3_1b_")])


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_workaround_trains():
    """Rehearse on two ranks: same losses and gradients as one rank; saved, resumed, resharded."""
    words = ("rehearse", "gemma3_1b_fixed_pretrain_h100_bf16", "--ranks", "2", "--steps", "4")
    done = cli("--recipes", str(EXAMPLE), *words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "passed" in done.stdout.splitlines()[-1]
