"""The one bridge from a `Layout` to the fields of NeMo's strategy, model config and data module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import nemo_run as run
from fiddle._src import history

from superpod.planner.layout import Layout
from superpod.recipes.registry import Recipe

STRATEGY = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
    "embedding_as_layer": "account_for_embedding_in_pipeline_split",
    "loss_as_layer": "account_for_loss_in_pipeline_split",
}
"""Fields of `Layout` that are fields of `MegatronStrategy` under a longer name."""

DATA = {"mbs": "micro_batch_size", "gbs": "global_batch_size"}
"""Fields of `Layout` that are fields of the data module."""


def apply(partial: run.Partial, recipe: Recipe, num_nodes: int) -> None:
    """Set everything that follows from the recipe's layout at `num_nodes`, and from its sequence length."""
    layout = recipe.layout(num_nodes)
    for short, field in STRATEGY.items():
        with _set_by(recipe, short, num_nodes):
            setattr(partial.trainer.strategy, field, getattr(layout, short))
    for short, field in DATA.items():
        with _set_by(recipe, short, num_nodes):
            setattr(partial.data, field, getattr(layout, short))
    with _set_by(recipe, "recompute", num_nodes):
        _recompute(partial.model.config, layout.recompute)
    with _set_by(recipe, "sharding", num_nodes):
        partial.trainer.strategy.ddp.use_distributed_optimizer = layout.sharding == "zero1"
        partial.optim.config.use_distributed_optimizer = layout.sharding == "zero1"
    partial.model.config.seq_length = recipe.seq
    partial.data.seq_length = recipe.seq
    partial.trainer.num_nodes = num_nodes
    partial.trainer.devices = recipe.gpus_per_node


def read(partial: run.Partial) -> Layout:
    """The layout that `partial` has now, overrides included: `apply` backwards."""
    strategy, data = partial.trainer.strategy, partial.data
    fields = {short: getattr(strategy, field) for short, field in STRATEGY.items()}
    fields |= {short: getattr(data, field) for short, field in DATA.items()}
    sharding = "zero1" if partial.optim.config.use_distributed_optimizer else "none"
    return Layout(**fields, recompute=partial.model.config.recompute_granularity or "none", sharding=sharding)


def _recompute(config: run.Config, how: str) -> None:
    if how == "full":
        config.recompute_granularity = "full"
        config.recompute_method = "uniform"
        config.recompute_num_layers = 1
    elif how == "selective":
        config.recompute_granularity = "selective"


@contextmanager
def _set_by(recipe: Recipe, key: str, num_nodes: int) -> Iterator[None]:
    """Inside, what is set is recorded as set by the line of the layout file that says so, if one does."""
    line = _line_of(recipe, key, num_nodes)
    if line is None:
        yield
        return
    where = history.Location(filename=str(recipe.source), line_number=line, function_name=recipe.table)
    with history.custom_location(lambda: where):
        yield


def _line_of(recipe: Recipe, key: str, num_nodes: int) -> int | None:
    """Line of `key` in the recipe's table: in its `at.N` line for this size, else the table's own."""
    table, own = None, None
    for number, line in enumerate(recipe.source.read_text().splitlines(), start=1):
        if header := re.fullmatch(r"\[(\w+)\]\s*", line):
            table = header[1]
        elif table == recipe.table and re.match(rf"at\.{num_nodes}\s*=.*[{{ ]{key}\s*=", line):
            return number
        elif table == recipe.table and re.match(rf"{key}\s*=", line):
            own = number
    return own
