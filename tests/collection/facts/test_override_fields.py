"""Test the refusal of misspelt fields without NeMo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.collection.facts import override_fields
from superpod.errors import UserError

SCRIPT = Path(__file__).parents[3] / "scripts" / "override_fields.py"


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("trainer.max_stepz=1", "max_steps"),
        ("trainer.strateg.tensor_model_parallel_size=1", "strategy"),
        ("trainer.strategy.tensor_parallel_model_size=2", "tensor_model_parallel_size"),
        ("trainer.strategy.ddp.overlap_grad_reduc=True", "overlap_grad_reduce"),
        ("optim.config.lrr=1", "lr"),
        ("optim.config.weight_decy*=2", "weight_decay"),
        ("log.ckpt.save_topk=2", "save_top_k"),
        ("data.seq_lenght=64", "seq_length"),
        ("resume.restore_confg.path=/x", "restore_config"),
        ("resume.restore_config.pth=/x", "path"),
        ("model.config.num_layerss=2", "num_layers"),
        ("model.config.recompute_granularty=full", "recompute_granularity"),
    ],
)
def test_refuses_misspelt_field_without_nemo(override, meant):
    with pytest.raises(UserError, match="has no field") as refused:
        override_fields.refuse_misspelt(override)
    assert meant in refused.value.hint


@pytest.mark.parametrize(
    "override",
    [
        *("trainer.max_steps=1", "trainer.callbacks[2].tp_comm_overlap=False", "optim.config.lr*=2", "with=fsdp"),
        *("model.config.of_my_own=1", "trainer.plugins.fp8=None", "trainer.of_a_class_of_your_own=1", "data.paths=[a]"),
    ],
)
def test_leaves_known_and_dissimilar_names_to_nemo(override):
    override_fields.refuse_misspelt(override)


def test_command_refuses_without_importing_nemo(recipes_cli, tmp_path):
    for name in ("nemo", "torch"):
        (tmp_path / "first" / name).mkdir(parents=True)
        (tmp_path / "first" / name / "__init__.py").write_text("raise SystemExit('it is imported')")
    path = {"PYTHONPATH": str(tmp_path / "first")}
    done = recipes_cli("run", "tiny_llama3", "optim.config.lrr=1", "--runs", tmp_path / "runs", env=path)
    assert done.returncode == 2
    assert "override optim.config.lrr: optim.config has no field 'lrr'" in done.stderr
    assert "did you mean lr" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.nemo
@pytest.mark.slow
def test_file_lists_the_fields_of_nemos_classes():
    code = f"import json, runpy; print(json.dumps(runpy.run_path({str(SCRIPT)!r})['read_fields']()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout.splitlines()[-1]) == override_fields.fields(), f"run {SCRIPT.name}"
