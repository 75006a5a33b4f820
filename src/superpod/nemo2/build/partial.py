"""Build the complete `run.Partial` of a recipe. Imports NeMo; called by `superpod.recipes.build`."""

from __future__ import annotations

import nemo_run as run
from fiddle._src import history
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.lightning.pytorch.callbacks.garbage_collection import GarbageCollectionCallback
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule
from nemo.utils.exp_manager import TimingCallback

from superpod.collection.recipe_job import options
from superpod.collection.registry import Recipe
from superpod.nemo2.build import finetuning_recipe, fusions, overlap, precision, resilience
from superpod.nemo2.build.layout import apply_layout
from superpod.nemo2.data_module import mock_data_module
from superpod.planner import hardware

# `show --why` prints the caller's line, not the lines of these libraries.
for _library in ("nemo_run/config.py", "fiddle/_src/experimental/dataclasses.py"):
    history.add_exclude_location(_library)


def build(recipe: Recipe, num_nodes: int | None = None) -> run.Partial:
    """Return the complete configuration of a recipe on `num_nodes` nodes; None = the fewest with a layout.

    Raises:
        UserError: the recipe has no layout for that many nodes.
    """
    size = num_nodes or recipe.nodes[0]
    layout = recipe.layout(size)
    partial = run.Partial(
        llm.pretrain if recipe.task == "pretrain" else llm.finetune,
        model=recipe.model.make(),
        # `requests/resolve.py` replaces it if there is a data folder.
        data=mock_data_module(recipe.model.vocab_size),
        trainer=_trainer(recipe),
        log=run.Config(
            nl.NeMoLogger,
            name=recipe.name,
            tensorboard=run.Config(TensorBoardLogger, save_dir="tb_logs", name=recipe.name),
        ),
        optim=_optimizer(recipe),
    )
    if recipe.model.mtp_layers and not recipe.shape.mtp_layers:
        partial.model.config.mtp_num_layers = None  # imported weights have no MTP layers
    planner_options = options(recipe, size)
    precision.apply(partial, recipe.precision, fp8_params=planner_options.fp8_params, bf16_ends=recipe.shape.bf16_ends)
    apply_layout(partial, recipe, size)
    overlap.apply(partial, layout, recipe, planner_options)
    resilience.apply(partial, recipe, size)
    if recipe.task != "pretrain":
        finetuning_recipe.apply(partial, recipe)
    fusions.apply(partial, recipe, layout, hardware.node(recipe.gpu).gpu)
    # Last, so that the model can change any field.
    if recipe.model.tune:
        recipe.model.tune(partial)
    return partial


def _trainer(recipe: Recipe) -> run.Config:
    ddp = run.Config(
        DistributedDataParallelConfig,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=True,  # stop at the first step with non-finite gradients
        average_in_collective=True,  # the collective averages, which saves a pass over the gradients
    )
    return run.Config(
        nl.Trainer,
        accelerator="gpu",
        max_steps=recipe.schedule.max_steps,
        val_check_interval=2000,
        limit_val_batches=32,
        limit_test_batches=32,
        log_every_n_steps=10,
        accumulate_grad_batches=1,  # Megatron accumulates: gbs / (mbs x dp)
        use_distributed_sampler=False,  # NeMo's MegatronDataSampler distributes the samples
        strategy=run.Config(nl.MegatronStrategy, ddp=ddp, gradient_as_bucket_view=True),
        callbacks=[
            run.Config(TimingCallback),
            # All ranks collect garbage at the same steps, so that they do not wait for each other.
            run.Config(GarbageCollectionCallback, gc_interval_train=100, gc_interval_val=100),
        ],
    )


def _optimizer(recipe: Recipe) -> run.Config:
    config = run.Config(
        OptimizerConfig,
        optimizer="adam",
        lr=recipe.schedule.lr,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-5,
        clip_grad=1.0,
        use_distributed_optimizer=True,
    )
    # The strategy copies trainer.max_steps into the schedule, whose default is 10.
    schedule = run.Config(
        CosineAnnealingScheduler,
        warmup_steps=recipe.schedule.warmup_steps,
        constant_steps=0,
        min_lr=recipe.schedule.min_lr,
    )
    return run.Config(MegatronOptimizerModule, config=config, lr_scheduler=schedule)
