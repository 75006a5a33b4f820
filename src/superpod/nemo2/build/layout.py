"""Convert a `Layout` to the fields of NeMo's strategy, model configuration and data module, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import nemo_run as run
from fiddle._src import history

from superpod.collection import layout_text
from superpod.collection.recipe_job import exchanges_heads
from superpod.collection.registry import Recipe
from superpod.collection.sizes.sized import SizedRecipe
from superpod.planner.layout import PARALLEL_SIZES, Layout

STRATEGY = PARALLEL_SIZES | {
    "sp": "sequence_parallel",
    "embedding_as_layer": "account_for_embedding_in_pipeline_split",
    "loss_as_layer": "account_for_loss_in_pipeline_split",
}
"""Field of `Layout` -> field of `MegatronStrategy`."""

STAGES = {
    "first_layers": "num_layers_in_first_pipeline_stage",
    "last_layers": "num_layers_in_last_pipeline_stage",
}
"""Field of `Layout` -> field of `MegatronStrategy`, set only if the layout has a value."""

FSDP = {"zero2": "optim_grads", "zero3": "optim_grads_params"}
"""Data-parallel sharding -> data_parallel_sharding_strategy of Megatron-FSDP."""

DATA = {"mbs": "micro_batch_size", "gbs": "global_batch_size"}
"""Field of `Layout` -> field of the data module."""


def apply_layout(partial: run.Partial, recipe: Recipe, num_nodes: int) -> None:
    """Set all fields of `partial` that depend on the recipe's layout for `num_nodes` nodes and its sequence length."""
    layout = recipe.layout(num_nodes)
    for short, field in STRATEGY.items():
        with record_source(recipe, short, num_nodes):
            setattr(partial.trainer.strategy, field, getattr(layout, short))
    for short, field in DATA.items():
        with record_source(recipe, short, num_nodes):
            setattr(partial.data, field, getattr(layout, short))
    for short, field in STAGES.items():
        value = getattr(layout, short)
        if value is not None:
            with record_source(recipe, short, num_nodes):
                setattr(partial.trainer.strategy, field, value)
    if layout.chunks is not None:
        with record_source(recipe, "chunks", num_nodes):
            mtp_layers = partial.model.config.mtp_num_layers or 0
            stages = _format_stages(layout.chunks, mtp_layers)
            partial.trainer.strategy.pipeline_model_parallel_layout = stages
    with record_source(recipe, "recompute", num_nodes):
        _set_recompute(partial.model.config, layout)
    with record_source(recipe, "sharding", num_nodes):
        set_sharding(partial, layout.sharding)
    if exchanges_heads(recipe.shape):  # no effect without CP, but an override may add CP
        with record_source(recipe, "cp", num_nodes):
            partial.model.config.cp_comm_type = "a2a"
    with record_source(recipe, "seq", num_nodes):
        partial.model.config.seq_length = recipe.seq
        partial.data.seq_length = recipe.seq
        _set_positions(partial, recipe)
    partial.trainer.num_nodes = num_nodes
    partial.trainer.devices = recipe.gpus_per_node


def _set_positions(partial: run.Partial, recipe: Recipe) -> None:
    """Set the size of T5's learned position embedding to the sequence length.

    It has `max_position_embeddings` rows, that of other models `seq_length` rows (NeMo 2.7.3, t5.py:227;
    gpt/model/base.py:399, bert/model/base.py:184).
    """
    config = partial.model.config
    if recipe.shape.cross_attention and config.max_position_embeddings != recipe.seq:
        config.max_position_embeddings = max(recipe.seq, config.seq_length_dec)


def read_layout(partial: run.Partial) -> Layout:
    """Return the layout that the fields of `partial` describe: the inverse of `apply_layout`."""
    strategy, data, config = partial.trainer.strategy, partial.data, partial.model.config
    fields = {short: getattr(strategy, field) for short, field in (STRATEGY | STAGES).items()}
    fields |= {short: getattr(data, field) for short, field in DATA.items()}
    return Layout(
        **fields,
        chunks=_parse_stages(strategy.pipeline_model_parallel_layout),
        recompute=config.recompute_granularity or "none",
        recompute_method=config.recompute_method or "uniform",
        recompute_layers=config.recompute_num_layers or 1,
        recompute_modules=tuple(config.recompute_modules or ("core_attn",)),
        sharding=_read_sharding(partial),
    )


def _set_recompute(config: run.Config, layout: Layout) -> None:
    # NeMo's Hyena recomputes by default. Its T5 sets recompute_num_layers, which Megatron rejects with "selective".
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


def set_sharding(partial: run.Partial, sharding: str) -> None:
    """Set the data-parallel sharding of a recipe; `sharding` is one of `layout.CHOICES["sharding"]`."""
    strategy = partial.trainer.strategy
    strategy.ddp.use_distributed_optimizer = sharding != "none"
    partial.optim.config.use_distributed_optimizer = sharding != "none"
    if sharding in FSDP:
        strategy.fsdp = "megatron"
        strategy.ddp.use_megatron_fsdp = True
        strategy.ddp.data_parallel_sharding_strategy = FSDP[sharding]
        strategy.ddp.average_in_collective = False  # recommended by Megatron-Bridge's guide to Megatron-FSDP
        strategy.save_ckpt_format = "fsdp_dtensor"  # NeMo saves FSDP shards in no other format


def _read_sharding(partial: run.Partial) -> Any:
    """Return the data-parallel sharding, one of `layout.CHOICES["sharding"]`."""
    strategy = partial.trainer.strategy
    if strategy.fsdp == "megatron":
        stages = {name: stage for stage, name in FSDP.items()}
        return stages.get(strategy.ddp.data_parallel_sharding_strategy, "zero1")
    return "zero1" if partial.optim.config.use_distributed_optimizer else "none"


def _format_stages(chunks: tuple[int, ...], mtp_layers: int) -> list[list[str]]:
    """Return Megatron's pipeline layout, a list of layer types per chunk, for the numbers of layers in `chunks`."""
    rows = [["decoder"] * count for count in chunks]
    rows[0].insert(0, "embedding")
    rows[-1] += ["mtp"] * mtp_layers + ["loss"]
    return rows


def _parse_stages(stages: str | list[list[str]] | None) -> tuple[int, ...] | None:
    """Return the number of layers per chunk of a pipeline layout, which is a list or a string such as `Et|tt|tL`."""
    if stages is None:
        return None
    if isinstance(stages, str):
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        stages = [[kind.name for kind in row] for row in PipelineParallelLayerLayout.parse_str_to_list(stages)]
    return tuple(row.count("decoder") for row in stages)


@contextmanager
def record_source(recipe: Recipe, key: str, num_nodes: int) -> Iterator[None]:
    """Record the source of the fields that are set in this context, for `recipes show --why`.

    The source is the command line or the planner if it set `key` in a `SizedRecipe`, or else the line of the layout
    file if it contains `key`, or else the calling code.
    """
    source = recipe.set_by.get(key) if isinstance(recipe, SizedRecipe) else None
    has_interval = key == layout_text.SAVES and num_nodes in recipe.saves
    if source:
        location = history.Location(filename=source, line_number=0, function_name=None)
    elif has_interval or key in layout_text.list_written_fields(recipe.layout(num_nodes)):
        line = recipe.lines.get(num_nodes, recipe.line)
        location = history.Location(filename=str(recipe.source), line_number=line, function_name=recipe.suffix)
    else:
        yield
        return
    with history.custom_location(lambda: location):
        yield
