"""Train a recipe on this machine.

    python launchers/local.py

It starts one process per GPU. Without a GPU, it rehearses the recipe on CPUs, with NeMo's and Megatron-Core's code.
"""

from superpod.launch import script
from superpod.nemo2.overrides import apply
from superpod.recipes import build

RECIPE = "tiny_llama3"
OVERRIDES = [
    "trainer.max_steps=4",
    "trainer.val_check_interval=4",
    "trainer.limit_val_batches=1",
    "optim.config.lr=0.001",
]

recipe = build(RECIPE)
apply(recipe, OVERRIDES)
recipe.log.log_dir = "logs"
script.train(recipe)  # does nothing in the ranks, which also import this file
