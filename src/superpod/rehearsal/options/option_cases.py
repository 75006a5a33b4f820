"""Every `with=` option on a recipe of each kind in each precision: the cases of the table in docs/rehearsal.md.

Needs no NeMo; `option_table.py` executes the cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from superpod.collection import recipe_job
from superpod.collection.registry import find, recipes
from superpod.nemo2.options import OPTIONS
from superpod.planner import hardware
from superpod.planner.layout import PARALLEL_SIZES

MODELS = {
    "dense": ("llama3_8b_pretrain",),
    "MoE": ("deepseek_v2_lite_pretrain", "mixtral_8x7b_pretrain"),
    "SFT": ("llama3_8b_sft",),
    "LoRA": ("llama3_8b_lora",),
}
"""Kind of recipe: models with a task, the first that has a recipe in a precision. DeepSeek's alone uses DeepEP."""
GPUS = {"bf16": "h100", "fp16": "h100", "fp8ds": "h100", "fp8cs": "h100", "fp8bw": "h100", "mxfp8": "b200"}
"""Precision: the GPU whose recipe has it."""
NOT_BESIDE = {
    "fsdp": ("pipeline_model_parallel_size", "expert_model_parallel_size"),
    "offload_activations": ("pipeline_model_parallel_size",),
}
"""Options that go with no such parallelism: it is switched off, where the recipe's layout has it."""


@dataclass(frozen=True)
class OptionCase:
    """An option on a recipe."""

    option: str
    kind: str
    precision: str
    recipe: str
    overrides: tuple[str, ...]

    @property
    def key(self) -> str:
        """Its name in a command and in the file of results: `fsdp/MoE/bf16`."""
        return f"{self.option}/{self.kind}/{self.precision}"


def cases() -> Iterator[OptionCase]:
    """Every option, kind and precision. FP16 is an option itself, on a recipe in BF16."""
    for option in OPTIONS:
        for kind in MODELS:
            for precision in GPUS:
                if (option, precision) == ("fp16", "fp16"):  # it is the line of fp16 on BF16
                    continue
                recipe = recipe_of(kind, precision)
                before = ("with=fp16",) if precision == "fp16" else ()
                layout = [text for field in NOT_BESIDE.get(option, ()) for text in _switched_off(recipe, field)]
                yield OptionCase(option, kind, precision, recipe, (*before, *layout, f"with={option}"))


def _switched_off(name: str, field: str) -> Iterator[str]:
    """Overrides after which a recipe's smallest size has no such parallelism."""
    recipe = find(name)
    layout = recipe.layout()
    short = next(short for short, known in PARALLEL_SIZES.items() if known == field)
    if getattr(layout, short) == 1:
        return
    yield f"trainer.strategy.{field}=1"
    if short == "pp" and layout.vp:
        yield "trainer.strategy.virtual_pipeline_model_parallel_size=None"
    if short == "pp" and layout.chunks:
        yield "trainer.strategy.pipeline_model_parallel_layout=None"
    if short == "ep" and recipe_job.uses_deepep(recipe.shape, hardware.node(recipe.gpu).gpu, layout):
        yield "with=alltoall"  # DeepEP wants several ranks


def recipe_of(kind: str, precision: str) -> str:
    """The recipe of a kind that trains in a precision; in FP16, the one in BF16 that an option changes."""
    suffix = f"{GPUS[precision]}_{'bf16' if precision == 'fp16' else precision}"
    return next(name for model in MODELS[kind] if (name := f"{model}_{suffix}") in recipes())
