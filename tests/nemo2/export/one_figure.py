"""Plan a recipe, its overrides and its export: `python one_figure.py FOLDER OUT.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RECIPES = {
    "llama3_8b_pretrain_h100_bf16": 2,
    "llama3_8b_lora_h100_bf16": None,
    "mixtral_8x7b_pretrain_h100_bf16": None,
    "t5_220m_pretrain_a100_bf16": None,
    "starcoder_15b_sft_h100_bf16": None,
    "llama3_8b_pretrain_h100_fp8cs": None,
    "gpt_oss_20b_pretrain_b200_mxfp8": None,
}
"""Recipe -> nodes."""
LLAMA = "llama3_8b_pretrain_h100_bf16"
CHANGED = (
    "kv_channels=512",
    "share_embeddings_and_output_weights=True",
    "qk_layernorm=True",
    "add_qkv_bias=True",
    "gated_linear_unit=False",
    "normalization=LayerNorm",
    "vocab_size=200000",
    "num_moe_experts=8",
)
"""Fields of the model's configuration that change its parameters."""


def figures(folder: Path) -> dict[str, Any]:
    """Return the planned memory of each recipe with a neutral override, and of its export."""
    return {name: _both(name, nodes, ["trainer.max_steps=1000"], folder) for name, nodes in RECIPES.items()}


def changes(folder: Path) -> dict[str, Any]:
    """Return for each changed field the parameters planned for recipe and export, and those of the model."""
    from superpod.rehearsal import dry_build

    counts: dict[str, Any] = {}
    for change in CHANGED:
        partial, (job, exported) = _jobs(LLAMA, 2, [f"model.config.{change}"], folder)
        counted = [sum(chunk.total for chunk in one.model.chunk_parameters(one.split, 0)) for one in (job, exported)]
        counts[change] = [*counted, sum(dry_build(partial, 0, 16))]
    return counts


def _both(name: str, nodes: int | None, overrides: list[str], folder: Path) -> list[float | None]:
    from superpod.planner import predict

    return [predict.one(job).reserved_gib_max for job in _jobs(name, nodes, overrides, folder)[1]]


def _jobs(name: str, nodes: int | None, overrides: list[str], folder: Path) -> tuple[Any, tuple[Any, Any]]:
    from superpod import recipes
    from superpod.collection.registry import find
    from superpod.nemo2 import overrides as changing
    from superpod.nemo2.export import recipe_source
    from superpod.nemo2.validation import configured_job
    from superpod.runtime.rank.rank import load

    recipe = find(name)
    partial = recipes.build(name, nodes)
    changing.apply(partial, overrides)
    path = folder / f"{name}.py"
    path.write_text(recipe_source.render(partial, name, []))
    exported = load(path).recipe()
    return partial, (
        configured_job.job_from_partial(partial, recipe),
        configured_job.job_from_configuration(exported, recipe.gpu),
    )


if __name__ == "__main__":
    import superpod.rehearsal.entry  # noqa: F401 - the patches, before NeMo

    place = Path(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps({"figures": figures(place), "changes": changes(place)}))
