"""From a `Layout` to the fields of NeMo's strategy, model config and data module, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import nemo_run as run
from fiddle._src import history

from superpod.collection import layout_text
from superpod.collection.recipe_job import passes_heads
from superpod.collection.registry import Recipe
from superpod.collection.sizes.sized import SizedRecipe
from superpod.planner.layout import PARALLEL_SIZES, Layout

STRATEGY = PARALLEL_SIZES | {
    "sp": "sequence_parallel",
    "embedding_as_layer": "account_for_embedding_in_pipeline_split",
    "loss_as_layer": "account_for_loss_in_pipeline_split",
}
"""Fields of `Layout` that are fields of `MegatronStrategy` under a longer name."""

STAGES = {
    "first_layers": "num_layers_in_first_pipeline_stage",
    "last_layers": "num_layers_in_last_pipeline_stage",
}
"""The same, set only where a layout has them."""

FSDP = {"zero2": "optim_grads", "zero3": "optim_grads_params"}
"""data_parallel_sharding_strategy of Megatron-FSDP."""

DATA = {"mbs": "micro_batch_size", "gbs": "global_batch_size"}
"""Fields of `Layout` that are fields of the data module."""


def apply_layout(partial: run.Partial, recipe: Recipe, num_nodes: int) -> None:
    """Set everything that follows from the recipe's layout at `num_nodes`, and from its sequence length."""
    layout = recipe.layout(num_nodes)
    for short, field in STRATEGY.items():
        with set_by(recipe, short, num_nodes):
            setattr(partial.trainer.strategy, field, getattr(layout, short))
    for short, field in DATA.items():
        with set_by(recipe, short, num_nodes):
            setattr(partial.data, field, getattr(layout, short))
    for short, field in STAGES.items():
        if (value := getattr(layout, short)) is not None:
            with set_by(recipe, short, num_nodes):
                setattr(partial.trainer.strategy, field, value)
    if layout.chunks is not None:
        with set_by(recipe, "chunks", num_nodes):
            mtp = partial.model.config.mtp_num_layers or 0
            partial.trainer.strategy.pipeline_model_parallel_layout = _stages(layout.chunks, mtp)
    with set_by(recipe, "recompute", num_nodes):
        _recompute(partial.model.config, layout)
    with set_by(recipe, "sharding", num_nodes):
        shard(partial, layout.sharding)
    if passes_heads(recipe.shape):  # without CP it means nothing, and an override such as cp=2 finds it
        with set_by(recipe, "cp", num_nodes):
            partial.model.config.cp_comm_type = "a2a"
    with set_by(recipe, "seq", num_nodes):
        partial.model.config.seq_length = recipe.seq
        partial.data.seq_length = recipe.seq
        _positions(partial, recipe)
    partial.trainer.num_nodes = num_nodes
    partial.trainer.devices = recipe.gpus_per_node


def _positions(partial: run.Partial, recipe: Recipe) -> None:
    """Give NeMo's T5 a row of positions for every token: its table has a length of its own, other models' `seq_length`
    (NeMo 2.7.3, t5.py:227; gpt/model/base.py:399, bert/model/base.py:184).
    """
    config = partial.model.config
    if recipe.shape.cross_attention and config.max_position_embeddings != recipe.seq:
        config.max_position_embeddings = max(recipe.seq, config.seq_length_dec)


def layout_of(partial: run.Partial) -> Layout:
    """The layout that `partial` has now, overrides included: `apply_layout` backwards."""
    strategy, data, config = partial.trainer.strategy, partial.data, partial.model.config
    fields = {short: getattr(strategy, field) for short, field in (STRATEGY | STAGES).items()}
    fields |= {short: getattr(data, field) for short, field in DATA.items()}
    return Layout(
        **fields,
        chunks=_chunks(strategy.pipeline_model_parallel_layout),
        recompute=config.recompute_granularity or "none",
        recompute_method=config.recompute_method or "uniform",
        recompute_layers=config.recompute_num_layers or 1,
        recompute_modules=tuple(config.recompute_modules or ("core_attn",)),
        sharding=_sharding(partial),
    )


def _recompute(config: run.Config, layout: Layout) -> None:
    # NeMo's Hyena recomputes by default, and its T5 has a number of layers, which Megatron refuses beside "selective".
    if layout.recompute != "full" and (config.recompute_granularity or config.recompute_num_layers):
        config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
    if layout.recompute == "full":
        config.recompute_granularity = "full"
        config.recompute_method = layout.recompute_method
        config.recompute_num_layers = layout.recompute_layers
    elif layout.recompute == "selective":
        config.recompute_granularity = "selective"
        if layout.recompute_modules != Layout().recompute_modules:
            config.recompute_modules = list(layout.recompute_modules)


def shard(partial: run.Partial, sharding: str) -> None:
    """Set what data parallelism shards, of `layout.CHOICES["sharding"]`."""
    strategy = partial.trainer.strategy
    strategy.ddp.use_distributed_optimizer = sharding != "none"
    partial.optim.config.use_distributed_optimizer = sharding != "none"
    if sharding in FSDP:
        strategy.fsdp = "megatron"
        strategy.ddp.use_megatron_fsdp = True
        strategy.ddp.data_parallel_sharding_strategy = FSDP[sharding]
        strategy.ddp.average_in_collective = False  # as Megatron-Bridge's guide to Megatron-FSDP sets it
        strategy.save_ckpt_format = "fsdp_dtensor"  # the only format that NeMo saves its shards in


def _sharding(partial: run.Partial) -> Any:
    strategy = partial.trainer.strategy
    if strategy.fsdp == "megatron":
        stages = {name: stage for stage, name in FSDP.items()}
        return stages.get(strategy.ddp.data_parallel_sharding_strategy, "zero1")
    return "zero1" if partial.optim.config.use_distributed_optimizer else "none"


def _stages(chunks: tuple[int, ...], mtp: int) -> list[list[str]]:
    """Chunks in Megatron's form (transformer/pipeline_parallel_layer_layout.py)."""
    rows = [["decoder"] * count for count in chunks]
    rows[0].insert(0, "embedding")
    rows[-1] += ["mtp"] * mtp + ["loss"]
    return rows


def _chunks(stages: str | list[list[str]] | None) -> tuple[int, ...] | None:
    """Layers of each chunk, from Megatron's list or its string (`Et|tt|tL`)."""
    if isinstance(stages, str):
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        stages = [[kind.name for kind in row] for row in PipelineParallelLayerLayout.parse_str_to_list(stages)]
    return None if stages is None else tuple(row.count("decoder") for row in stages)


@contextmanager
def set_by(recipe: Recipe, key: str, num_nodes: int) -> Iterator[None]:
    """Inside, what is set is recorded as set by the size's line in the layout file, where that line gives `key`, or by
    what has set it instead.
    """
    if isinstance(recipe, SizedRecipe) and (by := recipe.set_by.get(key)):
        elsewhere = history.Location(filename=by, line_number=0, function_name=None)
        with history.custom_location(lambda: elsewhere):
            yield
        return
    saves = key == layout_text.SAVES and num_nodes in recipe.saves
    if not saves and key not in layout_text.written_fields(recipe.layout(num_nodes)):
        yield
        return
    line = recipe.lines.get(num_nodes, recipe.line)
    where = history.Location(filename=str(recipe.source), line_number=line, function_name=recipe.suffix)
    with history.custom_location(lambda: where):
        yield
