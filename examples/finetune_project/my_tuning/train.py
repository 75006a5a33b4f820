"""Train the exported recipe on this project's samples. Starts the ranks, or runs as one of them."""

import os
import sys
from pathlib import Path

import nemo_run as run
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.collections.llm.gpt.data.fine_tuning import FineTuningDataModule

from my_tuning.my_recipe import recipe

HERE = Path(__file__).parent.parent


def tuned(steps: int | None = None) -> run.Partial:
    """Return the recipe with the samples of data/*.jsonl, for `steps` steps (None = the recipe's).

    The loss is computed on the outputs of the samples.
    """
    partial = recipe()
    names = ("seq_length", "micro_batch_size", "global_batch_size")
    sizes = {name: getattr(partial.data, name) for name in names}
    partial.data = run.Config(
        FineTuningDataModule,
        dataset_root=str(HERE / "data"),
        tokenizer=run.Config(
            AutoTokenizer, pretrained_model_name=str(HERE / "tokenizer"), use_fast=True
        ),
        num_workers=0,  # reading a few samples takes no time
        **sizes,
    )
    partial.trainer.max_steps = steps or partial.trainer.max_steps
    schedule = partial.optim.lr_scheduler  # a short run must not end during its warm-up
    schedule.warmup_steps = min(schedule.warmup_steps, partial.trainer.max_steps // 10)
    partial.trainer.val_check_interval = partial.trainer.max_steps
    partial.trainer.limit_val_batches, partial.trainer.limit_test_batches = 1, 0
    return partial


def main() -> None:
    """Train for the number of steps in the first command-line argument, by default the recipe's."""
    partial = tuned(int(sys.argv[1]) if len(sys.argv) > 1 else None)
    if "RANK" in os.environ:
        run.run(partial, direct=True)
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    gpus = f"--nproc-per-node={partial.trainer.devices}"
    os.execv(sys.executable, [*torchrun, gpus, "-m", "my_tuning.train", *sys.argv[1:]])


if __name__ == "__main__":  # checkpoint writers import this file again
    main()
