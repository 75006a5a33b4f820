"""Prune a NeMo checkpoint: `python prune.py CHECKPOINT OUT [PATH=VALUE ...]`.

It runs `llm.prune` (NeMo 2.7.3, ModelOpt 0.37) on the GPUs of this machine; without a GPU, it rehearses on CPUs.
"""

import ast
import operator
import sys

import nemo_run as run
from nemo.collections import llm
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.collections.llm.modelopt.prune import PruningConfig

from superpod.launch import script


def recipe(checkpoint: str = "CHECKPOINT", out: str = "OUT") -> run.Partial:
    """Return a recipe that keeps the 16 most important of 32 layers of `checkpoint` and writes the folder `out`.

    The comments list other sizes that can be pruned.
    """
    return run.Partial(
        llm.prune,
        nemo_checkpoint=checkpoint,  # of a GPTModel: `recipes ckpt convert HF_FOLDER CHECKPOINT`, or runs/.../step=...
        save_path=out,
        pruning_config=run.Config(
            PruningConfig,  # None leaves a size unchanged; importance is measured on the samples below
            target_num_layers=16,  # the layers that change the hidden state least are dropped
            target_ffn_hidden_size=None,  # a multiple of 64
            target_hidden_size=None,  # a multiple of 64; the head size stays the same
            target_num_attention_heads=None,  # set both or neither; heads must be a multiple of groups
            target_num_query_groups=None,
            drop_layers=None,  # instead of all these: numbers of layers to drop, from 1, without measuring
        ),
        devices=1,  # for several GPUs, set devices and pp_size to their number
        num_nodes=1,
        tp_size=1,  # measuring importance requires tp_size=1
        pp_size=1,
        num_train_samples=1024,  # as in Minitron (arXiv:2407.14679)
        # Random tokens show no importance; to use text: run.Config(llm.PreTrainingDataModule, paths=["1.0", PREFIX])
        data=run.Config(
            llm.MockDataModule,
            seq_length=8192,
            micro_batch_size=1,
            global_batch_size=1,  # NeMo requires the same as micro_batch_size
            tokenizer=run.Config(AutoTokenizer, pretrained_model_name=f"{checkpoint}/context/nemo_tokenizer"),
        ),
    )


def change(partial: run.Partial, path: str, value: str) -> None:
    """Set the field at `path` to a Python literal, because NeMo-Run cannot parse values of type `int | None`."""
    parent, _, name = path.rpartition(".")
    setattr(operator.attrgetter(parent)(partial) if parent else partial, name, ast.literal_eval(value))


if __name__ == "__main__":
    checkpoint, out, *changes = sys.argv[1:]
    partial = recipe(checkpoint, out)
    for text in changes:
        change(partial, *text.split("=", 1))
    script.train(partial, "prune")
