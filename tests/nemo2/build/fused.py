"""fused.py FILE: write fusions, dispatcher and moments of built recipes to FILE as JSON; imports NeMo once."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

FIELDS = (
    *("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"),
    *("cross_entropy_fusion_impl", "cross_entropy_loss_fusion", "moe_grouped_gemm", "moe_permute_fusion"),
    *("moe_router_dtype", "recompute_modules", "moe_router_padding_for_fp8", "add_bias_linear", "fp8"),
)
CONDITIONS = ("rotary_interleaved", "position_embedding_type", "multi_latent_attention", "num_moe_experts")


def seen(name: str, nodes: int | None = None, **more: Any) -> dict[str, Any]:
    """Return fields of a recipe, as built and as read back by the planner."""
    import fiddle as fdl

    from superpod.collection.registry import find
    from superpod.nemo2.validation.configured_job import job, job_from_partial
    from superpod.recipes import build

    partial, recipe = build(name, nodes, **more), find(name)
    config = partial.model.config
    planned, before = (
        {key: getattr(run.options, key) for key in ("loss_impl", "moments", "deepep")}
        for run in (job_from_partial(partial, recipe), job(recipe, nodes))
    )
    return {
        **{field: getattr(config, field, None) for field in (*FIELDS, *CONDITIONS)},
        "activation": getattr(config.activation_func, "__name__", ""),
        "callbacks": [fdl.get_callable(callback).__name__ for callback in partial.trainer.callbacks],
        "exp_avg_dtype": str(partial.optim.config.exp_avg_dtype),
        "precision_aware": partial.optim.config.use_precision_aware_optimizer,
        "planned": planned,
        "as planned before": planned == before,
    }


def recomputed_experts() -> list[dict[str, Any]]:
    """Return whether Megatron accepts the configuration of Mixtral recipes that recompute moe_act."""
    import fiddle as fdl
    from megatron.core.transformer.transformer_config import TransformerConfig

    from superpod.collection.registry import recipes
    from superpod.recipes import build

    rows = []
    for recipe in recipes().values():
        if not recipe.model.name.startswith("mixtral"):
            continue
        size = next((n for n, layout in recipe.layouts.items() if "moe_act" in layout.recompute_modules), None)
        if size is None or len(rows) >= 6:
            continue
        config = build(recipe.name, size).model.config
        names = {field.name for field in dataclasses.fields(TransformerConfig)}
        values = {key: value for key, value in fdl.ordered_arguments(config).items() if key in names}
        values |= {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "apply_rope_fusion": False}
        values |= {"moe_permute_fusion": False}  # both ask for Transformer Engine itself
        whole = {"num_moe_experts": 8, "moe_grouped_gemm": config.moe_grouped_gemm} | values
        try:
            TransformerConfig(**whole)
            rows.append({"name": recipe.name, "refused": ""})
        except (ValueError, AssertionError) as refused:
            rows.append({"name": recipe.name, "refused": str(refused)})
    return rows


def main() -> None:
    """Write all answers."""
    from superpod.collection.registry import models, recipes

    firsts: dict[str, str] = {}
    for recipe in recipes().values():
        if not recipe.model.broken:
            firsts.setdefault(f"{recipe.model.name} {recipe.task}", recipe.name)
    names = {*firsts.values(), *(f"deepseek_v3_pretrain_{gpu}_bf16" for gpu in ("a100", "h100", "h200", "b200"))}
    names |= {"deepseek_v3_pretrain_h100_fp8cs", "deepseek_v3_sft_h100_bf16", "deepseek_v2_pretrain_h100_bf16"}
    names |= {"gpt_oss_20b_pretrain_h100_fp8cs", "gpt_oss_20b_lora_b200_mxfp8", "mixtral_8x7b_pretrain_h100_fp8cs"}
    answer: dict[str, Any] = {
        "families": {name: model.family for name, model in models().items()},
        "recipes": {name: seen(name) for name in sorted(names & set(recipes()))},
        "alltoall": seen("deepseek_v3_pretrain_h100_bf16", options="alltoall"),
        "moe_act": recomputed_experts(),
    }
    answer["own"] = own_value()
    Path(sys.argv[1]).write_text(json.dumps(answer))


def own_value() -> bool:
    """Whether a field that the model sets takes precedence."""
    from superpod.collection.registry import find, nemo
    from superpod.nemo2.build import fusions
    from superpod.planner import hardware

    recipe = find("qwen2_7b_pretrain_h100_bf16")
    model = nemo("Qwen2Model", "Qwen2Config7B", apply_rope_fusion=False)
    partial = mock.Mock(model=model)
    partial.trainer.callbacks = []
    fusions.apply(partial, recipe, recipe.layout(), hardware.node("h100").gpu)
    return not model.config.apply_rope_fusion and model.config.bias_activation_fusion


if __name__ == "__main__":
    main()
