"""Train the exported recipe on the samples of this project; starts the ranks, or runs as one."""

import os
import sys
from pathlib import Path

import nemo_run as run
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.collections.llm.gpt.data.fine_tuning import FineTuningDataModule

from my_tuning.my_recipe import recipe

HERE = Path(__file__).parent.parent


def tuned(steps: int | None = None) -> run.Partial:
    """Return the recipe with the samples of data/*.jsonl; the loss counts their outputs."""
    whole = recipe()
    names = ("seq_length", "micro_batch_size", "global_batch_size")
    sizes = {name: getattr(whole.data, name) for name in names}
    whole.data = run.Config(
        FineTuningDataModule,
        dataset_root=str(HERE / "data"),
        tokenizer=run.Config(
            AutoTokenizer, pretrained_model_name=str(HERE / "tokenizer"), use_fast=True
        ),
        num_workers=0,  # few samples: reading them takes no time
        **sizes,
    )
    whole.trainer.max_steps = steps or whole.trainer.max_steps
    schedule = whole.optim.lr_scheduler  # a short run must not end during its warm-up
    schedule.warmup_steps = min(schedule.warmup_steps, whole.trainer.max_steps // 10)
    whole.trainer.val_check_interval = whole.trainer.max_steps
    whole.trainer.limit_val_batches, whole.trainer.limit_test_batches = 1, 0
    return whole


def main() -> None:
    """Train; the only argument is the number of steps."""
    whole = tuned(int(sys.argv[1]) if len(sys.argv) > 1 else None)
    if "RANK" in os.environ:
        run.run(whole, direct=True)
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    gpus = f"--nproc-per-node={whole.trainer.devices}"
    os.execv(sys.executable, [*torchrun, gpus, "-m", "my_tuning.train", *sys.argv[1:]])


if __name__ == "__main__":  # checkpoint writers import this file again
    main()
