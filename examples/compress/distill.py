"""Distill a teacher into a student: `python distill.py STUDENT TEACHER LOGS [PATH=VALUE ...]`.

It runs `llm.distill` (NeMo 2.7.3, ModelOpt 0.37) on the GPUs of this machine; without a GPU, it rehearses on CPUs.
STUDENT and TEACHER are NeMo checkpoints of GPTModels with the same tokenizer; prune.py can create the student.
"""

import sys

import nemo_run as run
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.collections.llm.modelopt.recipes.distillation_recipe import distillation_recipe

from superpod.launch import script
from superpod.nemo2 import overrides
from superpod.nemo2.build import learning_rate_schedule


def recipe(student: str = "STUDENT", teacher: str = "TEACHER", logs: str = "logs") -> run.Partial:
    """Return NeMo's distillation recipe for one node with 8 GPUs, with all required values.

    `student` and `teacher` are paths of checkpoints, `logs` is the folder of logs and checkpoints.
    """
    partial = distillation_recipe(student, teacher, dir=logs, name="distill", num_nodes=1, num_gpus_per_node=8)
    # distillation_config_path: a YAML file with intermediate_layer_pairs (hidden states to match, in addition to
    # the logits), skip_lm_loss (true to ignore the labels) and kd_loss_scale. With None, only the logits are matched.

    steps = 1000
    partial.trainer.max_steps, partial.trainer.val_check_interval, partial.trainer.limit_val_batches = steps, steps, 8
    partial.optim.config.lr = 1e-4
    partial.optim.lr_scheduler.warmup_steps, partial.optim.lr_scheduler.min_lr = 50, 1e-5

    # Both models have the same layout. NeMo does not support virtual stages here. The teacher's weights and logits also
    # need memory.
    strategy = partial.trainer.strategy
    strategy.tensor_model_parallel_size, strategy.sequence_parallel = 8, True
    strategy.pipeline_model_parallel_size = strategy.context_parallel_size = 1

    # NeMo's data is random tokens; to use text: run.Config(llm.PreTrainingDataModule, paths=["1.0", PREFIX], ...)
    partial.data.seq_length, partial.data.micro_batch_size, partial.data.global_batch_size = 8192, 1, 128
    partial.data.tokenizer = run.Config(AutoTokenizer, pretrained_model_name=f"{teacher}/context/nemo_tokenizer")
    return partial


if __name__ == "__main__":
    student, teacher, logs, *changes = sys.argv[1:]
    partial = recipe(student, teacher, logs)
    overrides.apply(partial, changes)
    learning_rate_schedule.fit(partial, changes)
    script.train(partial, "distill")
