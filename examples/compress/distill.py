"""Distill a teacher into a student: `python distill.py STUDENT TEACHER LOGS [PATH=VALUE ...]`.

Runs `llm.distill` (NeMo 2.7.3, ModelOpt 0.37) on the GPUs of this machine, or rehearses it on CPUs. Both are NeMo
checkpoints of GPTModels with one tokenizer; the student may come from prune.py.
"""

import sys

import nemo_run as run
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.collections.llm.modelopt.recipes.distillation_recipe import distillation_recipe

from superpod.launch import script
from superpod.nemo2 import overrides
from superpod.nemo2.build import learning_rate_schedule


def recipe(student: str = "STUDENT", teacher: str = "TEACHER", logs: str = "logs") -> run.Partial:
    """NeMo's recipe for one node of 8 GPUs, with all required values."""
    whole = distillation_recipe(student, teacher, dir=logs, name="distill", num_nodes=1, num_gpus_per_node=8)
    # distillation_config_path: a YAML file with intermediate_layer_pairs (hidden states to match, in addition to
    # the logits), skip_lm_loss (true to ignore the labels) and kd_loss_scale. None matches only the logits.

    steps = 1000
    whole.trainer.max_steps, whole.trainer.val_check_interval, whole.trainer.limit_val_batches = steps, steps, 8
    whole.optim.config.lr = 1e-4
    whole.optim.lr_scheduler.warmup_steps, whole.optim.lr_scheduler.min_lr = 50, 1e-5

    # Both models have the same layout, without virtual stages, which NeMo refuses here. The weights and logits of the
    # teacher also need memory.
    strategy = whole.trainer.strategy
    strategy.tensor_model_parallel_size, strategy.sequence_parallel = 8, True
    strategy.pipeline_model_parallel_size = strategy.context_parallel_size = 1

    # NeMo's data is random tokens; to use text: run.Config(llm.PreTrainingDataModule, paths=["1.0", PREFIX], ...)
    whole.data.seq_length, whole.data.micro_batch_size, whole.data.global_batch_size = 8192, 1, 128
    whole.data.tokenizer = run.Config(AutoTokenizer, pretrained_model_name=f"{teacher}/context/nemo_tokenizer")
    return whole


if __name__ == "__main__":
    student, teacher, logs, *changes = sys.argv[1:]
    whole = recipe(student, teacher, logs)
    overrides.apply(whole, changes)
    learning_rate_schedule.fit(whole, changes)
    script.train(whole, "distill")
