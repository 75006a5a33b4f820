"""Lists the cases of the option table in docs/rehearsal.md: every `with=` option for each kind of recipe and precision.

Does not import NeMo; `option_table.py` executes the cases.
"""

from __future__ import annotations

import itertools
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
"""Kind of recipe -> candidates for model and task, in order of preference. Only DeepSeek's recipe uses DeepEP."""
GPUS = {"bf16": "h100", "fp16": "h100", "fp8ds": "h100", "fp8cs": "h100", "fp8bw": "h100", "mxfp8": "b200"}
"""Precision -> GPU of the recipes."""
INCOMPATIBLE_PARALLELISM = {
    "fsdp": ("pipeline_model_parallel_size", "expert_model_parallel_size"),
    "offload_activations": ("pipeline_model_parallel_size",),
}
"""Option -> kinds of parallelism that it does not support, which a case switches off."""


@dataclass(frozen=True)
class OptionCase:
    """A `with=` option applied to a recipe."""

    option: str
    kind: str
    """A key of `MODELS`."""
    precision: str
    recipe: str
    overrides: tuple[str, ...]
    """All overrides of the recipe; the last one is `with={option}`."""

    @property
    def key(self) -> str:
        """The name on the command line and in the results, such as `fsdp/MoE/bf16`."""
        return f"{self.option}/{self.kind}/{self.precision}"


def list_cases() -> Iterator[OptionCase]:
    """Yield a case for every option, kind and precision. FP16 is an option of BF16 recipes."""
    for option, kind, precision in itertools.product(OPTIONS, MODELS, GPUS):
        if (option, precision) == ("fp16", "fp16"):  # the same as option fp16 in BF16
            continue
        recipe = find_recipe(kind, precision)
        overrides = ["with=fp16"] if precision == "fp16" else []
        for field in INCOMPATIBLE_PARALLELISM.get(option, ()):
            overrides += _disable_parallelism(recipe, field)
        yield OptionCase(option, kind, precision, recipe, (*overrides, f"with={option}"))


def _disable_parallelism(name: str, field: str) -> Iterator[str]:
    """Yield the overrides that set a parallel size of a recipe (`field` of the strategy) to 1 on its fewest nodes."""
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
        yield "with=alltoall"  # DeepEP requires several ranks


def find_recipe(kind: str, precision: str) -> str:
    """Return the name of the first recipe of a kind (a key of `MODELS`) in a precision; for fp16, a recipe in bf16."""
    suffix = f"{GPUS[precision]}_{'bf16' if precision == 'fp16' else precision}"
    candidates = [f"{model}_{suffix}" for model in MODELS[kind]]
    return next(name for name in candidates if name in recipes())
