import json

import pytest

from superpod.errors import UserError
from superpod.planner import hardware, models
from superpod.planner.formats import config_import
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob

DEEPSPEED = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "stage3_prefetch_bucket_size": 5e7},
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "wall_clock_breakdown": False,
}

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 4
num_processes: 32
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""

MEGATRON = r"""
torchrun --nproc-per-node 8 pretrain_gpt.py \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size=2 \
    --num-layers 32 --num-layers-per-virtual-pipeline-stage 4 \
    --sequence-parallel --use-distributed-optimizer  # ZeRO-1
    --micro-batch-size 1 --global-batch-size 128 --seq-length 4096 --bf16 \
    --recompute-granularity selective --recompute-modules mlp layernorm --log-interval 10
"""


def read(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return config_import.read(path)


def test_deepspeed(tmp_path):
    config = read(tmp_path, "ds.json", DEEPSPEED)
    assert (config.gbs, config.gpus, config.precision) == (256, 32, "bf16")
    assert config.layout == {"mbs": 2, "sharding": "zero3"}
    assert config.options == {"offload": 1.0}
    assert config.left_out == ("wall_clock_breakdown", "zero_optimization.stage3_prefetch_bucket_size")


def test_accelerate(tmp_path):
    config = read(tmp_path, "fsdp.yaml", ACCELERATE)
    assert (config.gpus, config.precision) == (32, "bf16")
    assert config.layout["sharding"] == "zero2"
    assert config.layout["recompute"] == "full"
    assert config.left_out == ("fsdp_config.fsdp_auto_wrap_policy",)


def base():
    node = hardware.node("h100")
    return PlannedJob(models.find("llama3_8b"), node, hardware.fabric("ib_ndr"), 32, 4096, "bf16", Layout(gbs=512))


def test_megatron_arguments(tmp_path):
    config = read(tmp_path, "train.sh", MEGATRON)
    assert (config.gbs, config.seq) == (128, 4096)
    layout = config.job(base()).layout
    expected = {"tp": 4, "pp": 2, "vp": 4, "sp": True, "mbs": 1, "sharding": "zero1", "recompute": "selective"}
    assert expected.items() <= vars(layout).items()
    assert set(layout.recompute_modules) == {"mlp", "layernorm"}
    assert "--log-interval 10" in config.left_out


SCRIPT = """
MODEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
)
BATCH="--micro-batch-size 2 --global-batch-size $GBS"
torchrun pretrain_gpt.py "${MODEL_ARGS[@]}" $BATCH --recompute-activations 2>&1 | tee log
"""


def test_a_script_s_arrays_strings_variables_and_pipes_are_seen_through(tmp_path):
    config = read(tmp_path, "train.sh", SCRIPT)
    layout = config.job(base()).layout
    assert (layout.tp, layout.sp, layout.mbs, layout.recompute) == (2, True, 2, "selective")
    assert any(key.startswith("global-batch-size $GBS") for key in config.left_out)


def test_the_file_s_run_keeps_the_batch_of_the_query(tmp_path):
    run = read(tmp_path, "ds.json", DEEPSPEED).job(base())
    assert (run.layout.gbs, run.layout.mbs, run.layout.sharding) == (512, 2, "zero3")
    assert run.options.offload == 1.0


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "{", "not a supported configuration"),
        ("a.json", '{"train_batch_size": -3}', "-3 is not a valid value for train_batch_size"),
        ("a.json", '{"zero_optimization": {"stage": 7}}', "7 is not a valid value for zero_optimization.stage"),
        ("a.yaml", "num_processes: many", "'many' is not a valid value for num_processes"),
        ("a.yaml", "- a list", "does not contain a mapping"),
        ("a.yaml", "a: [", "not a supported configuration"),
        ("a.txt", "--tensor-model-parallel-size two", "tensor-model-parallel-size two: invalid value"),
        ("a.txt", "", "does not contain a mapping"),
        ("a.json", "{}", "has no keys to import .such as DeepSpeed's zero_optimization.stage"),
        ("a.yaml", "{}", "has no keys"),
        ("a.yaml", "a: &a {b: *a}", "not a supported configuration"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, name, text, says):
    with pytest.raises(UserError, match=says):
        read(tmp_path, name, text).job(base())


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(UserError, match=r"none\.json does not exist"):
        config_import.read(tmp_path / "none.json")
