"""Train a configuration from a script of one's own, on this machine: on its GPUs, or as a rehearsal where it has none.

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
    """Train `recipe` with NeMo-Run's LocalExecutor and torchrun, and wait for its end.

    NeMo writes logs and checkpoints where `recipe.log` says, NeMo-Run its experiment to ~/.nemo_run. NeMo-Run imports
    the script in every rank, in which this does nothing: a script needs no guard for it. `recipes run` gives a run
    folder, progress, and saving on Ctrl-C besides.

    Args:
        recipe: of `llm.pretrain`, `finetune`, `distill` or `prune`; it is not changed.
        name: of NeMo-Run's experiment; "" = that of the recipe's log.

    Raises:
        UserError: too few GPUs, or too little memory for a rehearsal.
        SystemExit: with 1, where a rank has failed; NeMo-Run has printed its log.
    """
    if is_rank():
        return
    import nemo_run
    import torch

    from superpod.launch import local
    from superpod.rehearsal import rehearse

    title = name or str(getattr(getattr(recipe, "log", None), "name", None) or "recipe")
    size = getattr(recipe, "trainer", recipe)  # llm.prune makes its trainer itself
    ranks = size.num_nodes * size.devices
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        local.require_gpus(title, recipe, gpus)
    else:
        if hasattr(recipe, "model"):  # else it is in checkpoints, which ranks read
            local.require_memory(title, recipe, ranks)
        recipe, changes = rehearse(recipe, devices=ranks)
        print(
            f"no GPU here: rehearsing on {ranks} CPU ranks; {len(changes)} GPU settings changed "
            "(superpod.rehearsal.rehearse returns them)",
            file=sys.stderr,
        )
    environment = local.rank_environment(0 if gpus else ranks)
    executor = nemo_run.LocalExecutor(ntasks_per_node=ranks, launcher="torchrun", env_vars=environment)
    with local.torchrun_on_path(), nemo_run.Experiment(title, enable_goodbye_message=False) as experiment:
        experiment.add(recipe, executor=executor, name="train", tail_logs=True)
        experiment.run()
    state = str(experiment.jobs[0].state)
    if state != "SUCCEEDED":
        raise SystemExit(f"{title}: {state}; its ranks' logs are above")
