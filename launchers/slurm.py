"""Submit a recipe to Slurm as a NeMo-Run experiment.

    python launchers/slurm.py CLUSTER

CLUSTER is a profile: a name, such as dgx_h100, or the path of a TOML file. It contains account, partition, container
and folders. `recipes submit` also checks the job against the cluster, and queues further attempts, which resume it.
"""

import sys

import nemo_run

from superpod.recipes import build
from superpod.slurm.executor import executor, finish

RECIPE = "llama3_8b_pretrain_h100_bf16"
NODES = 4


def main(cluster: str) -> None:
    """Submit the recipe as one job to the cluster profile `cluster`, and wait until it ends."""
    recipe = build(RECIPE, num_nodes=NODES)
    recipe.trainer.max_steps = 1000
    on_slurm = executor(cluster, nodes=NODES, gpus=recipe.trainer.devices, time="4:00:00")
    with nemo_run.Experiment(RECIPE) as experiment:
        experiment.add(recipe, executor=on_slurm, name="train")
        experiment.run()
        finish(experiment)  # exits with 1 if the job failed


if __name__ == "__main__":  # NeMo-Run imports this file in every rank
    main(sys.argv[1])
