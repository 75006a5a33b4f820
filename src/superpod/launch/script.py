"""Train a configuration from your own script on this machine: on its GPUs or, if it has none, rehearsed on CPUs.

from superpod.launch import script
from superpod.recipes import build

recipe = build("tiny_llama3")
script.train(recipe)
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from superpod.collection.ranks import is_rank

if TYPE_CHECKING:
    import nemo_run as run


def train(recipe: run.Partial, name: str = "") -> None:
    """Train `recipe` with NeMo-Run's LocalExecutor and torchrun, and wait until training ends.

    NeMo writes logs and checkpoints to the folder in `recipe.log`, NeMo-Run its experiment to ~/.nemo_run. NeMo-Run
    imports the script in every rank, where this function does nothing, so the script needs no guard. `recipes run` also
    creates a run folder, shows the progress, and saves a checkpoint on Ctrl-C.

    Args:
        recipe: a partial of `llm.pretrain`, `finetune`, `distill` or `prune`; it is not modified.
        name: name of NeMo-Run's experiment; "" = the name in the recipe's log.

    Raises:
        UserError: too few GPUs, or too little memory for a rehearsal.
        SystemExit: a rank failed; the exit code is 1, and NeMo-Run has printed its log.
    """
    if is_rank():
        return
    import nemo_run
    import torch

    from superpod.launch import local
    from superpod.rehearsal import rehearse

    title = name or str(getattr(getattr(recipe, "log", None), "name", None) or "recipe")
    size = getattr(recipe, "trainer", recipe)  # llm.prune creates its own trainer
    ranks = size.num_nodes * size.devices
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        local.require_gpus(title, recipe, gpus)
    else:
        if hasattr(recipe, "model"):  # else the ranks read the model from checkpoints
            local.require_memory(title, recipe, ranks)
        recipe, changes = rehearse(recipe, devices=ranks)
        print(
            f"no GPU on this machine: rehearsing on {ranks} CPU ranks with {len(changes)} changed GPU settings "
            "(superpod.rehearsal.rehearse returns them)",
            file=sys.stderr,
        )
    environment = local.rank_environment(0 if gpus else ranks)
    executor = nemo_run.LocalExecutor(ntasks_per_node=ranks, launcher="torchrun", env_vars=environment)
    with local.add_torchrun_to_path(), nemo_run.Experiment(title, enable_goodbye_message=False) as experiment:
        experiment.add(recipe, executor=executor, name="train", tail_logs=True)
        experiment.run()
    state = str(experiment.jobs[0].state)
    if state != "SUCCEEDED":
        raise SystemExit(f"{title}: {state}; see the logs of the ranks above")
