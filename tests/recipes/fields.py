"""fields.py FILE: fields of built recipes, and what options make of them, as JSON in FILE; NeMo is imported once."""

import json
import sys
from pathlib import Path
from typing import Any

from superpod.errors import UserError

LORA_8, LORA_16, LORA_32 = "llama3_8b_lora_h100_bf16", "llama3_70b_lora_h100_bf16", "mixtral_8x7b_lora_h100_bf16"
SFT = "llama3_8b_sft_h100_bf16"


def finetuned(name: str, nodes: int | None = None) -> dict[str, Any]:
    """What fine-tuning sets, and what the planner knows of it."""
    from superpod.recipes import build
    from superpod.recipes.planned_job import job, of_partial
    from superpod.recipes.registry import find

    partial, recipe = build(name, nodes), find(name)
    planned = of_partial(partial, recipe)
    return {
        "strictness": partial.trainer.strategy.ckpt_load_strictness,
        "rank": getattr(getattr(partial, "peft", None), "dim", None),
        "alpha": getattr(getattr(partial, "peft", None), "alpha", None),
        "planned rank": planned.options.lora_rank,
        "as planned before": planned == job(recipe, nodes),
        "cp": partial.trainer.strategy.context_parallel_size,
        "per token": bool(partial.model.config.calculate_per_token_loss),
        "averages": bool(partial.trainer.strategy.ddp.average_in_collective),
        "steps": partial.trainer.max_steps,
        "interval": partial.trainer.val_check_interval,
        "batches": partial.trainer.limit_val_batches,
    }


def with_cp() -> str:
    """A fine-tuning recipe whose smallest size has context parallelism."""
    from superpod.recipes.registry import recipes

    return next(r.name for r in recipes().values() if r.task == "sft" and r.gpu == "h100" and r.layout().cp > 1)


def optioned(name: str, options: str) -> dict[str, Any]:
    """What an option makes of a recipe: its environment, and its precision as the planner sees it."""
    from superpod.recipes import build, environment
    from superpod.recipes.planned_job import of_partial
    from superpod.recipes.registry import find

    try:
        partial = build(name, options=options)
    except UserError as refused:
        return {"refused": str(refused), "hint": refused.hint}
    planned = of_partial(partial, find(name))
    plugin, optimizer = partial.trainer.plugins, partial.optim.config
    return {
        "environment": {v.name: v.value for v in environment.variables(planned)},
        "precision": planned.precision,
        "userbuffers": [c.tp_comm_overlap for c in partial.trainer.callbacks if hasattr(c, "tp_comm_overlap")],
        "plugin": [plugin.precision, str(plugin.params_dtype), plugin.fp16_loss_scale],
        "optimizer": [bool(optimizer.fp16), bool(optimizer.bf16)],
    }


def main(out: str) -> None:
    """The command."""
    tp = "llama3_70b_pretrain_a100_bf16"
    answers = {
        "finetuned": {name: finetuned(name) for name in (LORA_8, LORA_16, LORA_32, SFT)} | {"cp": finetuned(with_cp())},
        "options": {text: optioned(tp, text) for text in ("", "cuda_graphs", "deterministic", "fp16", "fsdp")},
        "fp8": optioned("llama3_8b_pretrain_h100_fp8cs", "fp16"),
    }
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
