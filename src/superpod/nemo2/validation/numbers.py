"""What the precision plugin, the optimizer, the strategy and the model must agree on about number formats."""

from __future__ import annotations

from collections.abc import Iterator

from superpod.nemo2.validation.reading import PLUGIN, Reader
from superpod.planner.rules.rules import Violation

BF16, FP16, FP32 = ("bf16", "bf16-mixed"), ("16", "fp16", "16-mixed", "fp16-mixed"), ("32", "fp32")

WRITTEN_OVER = (
    *("bf16", "fp16", "params_dtype", "pipeline_dtype", "fp8", "fp8_recipe", "fp8_wgrad", "fp8_margin"),
    *("fp8_dot_product_attention", "fp8_multi_head_attention", "fp4", "fp4_recipe", "first_last_layers_bf16"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
)
"""Fields of NeMo 2.7.3's precision plugin that Megatron's configuration has by the same name."""


def kind_of(precision: object) -> str:
    """bf16, fp16 or fp32: how NeMo's plugin reads its word; any other word is fp32 to it."""
    word = str(precision)
    return "bf16" if word in BF16 else "fp16" if word in FP16 else "fp32"


def formats_match(r: Reader) -> Iterator[Violation]:
    """The plugin's words, its types, and the optimizer's flags name one format."""
    if r.precision_plugin is None:
        return
    kind = kind_of(r[f"{PLUGIN}.precision"])
    for name in ("bf16", "fp16"):
        path = f"optim.config.{name}"
        if r.overridden(path) and bool(r[path]) != (kind == name):  # megatron_strategy.py:498 writes the plugin's
            yield Violation(
                "optimizer_precision",
                f"{path} is {r[path]}, and the precision plugin says {kind}: NeMo takes the plugin's",
                f"write trainer.plugins.precision={'16-mixed' if name == 'fp16' else 'bf16-mixed'} and its dtypes",
            )
    yield from _written_over(r, kind)
    for path in (f"{PLUGIN}.params_dtype", f"{PLUGIN}.pipeline_dtype", "trainer.strategy.pipeline_dtype"):
        dtype = _short(r[path])
        if dtype and dtype != kind and not (path.endswith("params_dtype") and dtype == "fp32"):
            yield Violation(
                "dtypes",
                f"trainer.plugins.precision is {r[f'{PLUGIN}.precision']}, and {path} is {dtype}",
                "a format is the word, params_dtype, both pipeline_dtype and the optimizer's flag; "
                "a recipe of that precision sets all: `recipes list`",
            )
            return


def _written_over(r: Reader, kind: str) -> Iterator[Violation]:
    """Fields of the model that the plugin writes when the run starts (update_config_with_dtype_overrides)."""
    for name in WRITTEN_OVER:
        path = f"model.config.{name}"
        own = kind == name if name in ("bf16", "fp16") else r[f"{PLUGIN}.{name}"]
        if r.overridden(path) and r[path] != own:
            instead = "precision" if name in ("bf16", "fp16") else name
            message = f"{path} is {r[path]}, and NeMo writes the precision plugin's value over it: {own}"
            yield Violation("model_precision", message, f"change trainer.plugins.{instead} instead")


def loss_scale(r: Reader) -> Iterator[Violation]:
    """FP16 without a working loss scale: NeMo 2.7.3 divides gradients by it, and never multiplies the loss."""
    if r.precision_plugin is not None and kind_of(r[f"{PLUGIN}.precision"]) == "fp16":
        scale = r[f"{PLUGIN}.fp16_loss_scale"]
        if scale != 1:
            start = r[f"{PLUGIN}.fp16_initial_loss_scale"] if scale is None else scale
            yield Violation(
                "loss_scale",
                f"fp16 with a loss scale from {start:g}: NeMo 2.7.3 divides gradients by it and never multiplies the "
                "loss, so nothing is left of them",
                "train in bf16, or write trainer.plugins.fp16_loss_scale=1.0",
            )


def fp8(r: Reader) -> Iterator[Violation]:
    """FP8 is above BF16, its parts need it, and not every layer is left out of it."""
    if r.precision_plugin is None:
        return
    on, kind = r[f"{PLUGIN}.fp8"], kind_of(r[f"{PLUGIN}.precision"])
    if on and kind != "bf16":
        message = f"trainer.plugins.fp8 is {on} above {kind}; Transformer Engine's FP8 is above BF16"
        yield Violation("fp8_above", message, "write trainer.plugins.precision=bf16-mixed and its dtypes")
    if on and r[f"{PLUGIN}.fp4"]:  # TransformerConfig.__post_init__
        yield Violation("fp8_fp4", "trainer.plugins has fp8 and fp4", "write trainer.plugins.fp8=None, or fp4=None")
    gathers = r[f"{PLUGIN}.fp8_param_gather"] or r[f"{PLUGIN}.fp8_params"]
    if gathers and not on:  # TransformerConfig.__post_init__: fp8_param needs fp8
        message = "trainer.plugins.fp8_param_gather is on without FP8"
        reuse = r[f"{PLUGIN}.reuse_grad_buf_for_mxfp8_param_ag"]
        also = " trainer.plugins.reuse_grad_buf_for_mxfp8_param_ag=False" * bool(reuse)
        yield Violation("fp8_gather", message, f"write trainer.plugins.fp8_param_gather=False{also}")
    yield from _ends_in_bf16(r, bool(on))


def _ends_in_bf16(r: Reader, on: bool) -> Iterator[Violation]:
    """First and last layers in BF16 (TransformerConfig.__post_init__, which sees none of what the plugin sets)."""
    ends = [r[f"{PLUGIN}.num_layers_at_{end}_in_bf16"] or 0 for end in ("start", "end")]
    wanted, layers = r[f"{PLUGIN}.first_last_layers_bf16"], r["model.config.num_layers"]
    if wanted and on and r[f"{PLUGIN}.fp8_recipe"] == "delayed":
        message = "first_last_layers_bf16 with fp8_recipe delayed; Megatron's delayed scaling takes every layer"
        yield Violation("bf16_ends", message, "write trainer.plugins.first_last_layers_bf16=False")
    if wanted and isinstance(layers, int) and sum(ends) >= layers:
        message = f"{ends[0]} layers at the start and {ends[1]} at the end in BF16 are all of {layers}: FP8 has none"
        yield Violation("bf16_ends", message, "write fewer, or trainer.plugins.fp8=None")
    counts = [f"{PLUGIN}.num_layers_at_{end}_in_bf16" for end in ("start", "end")]
    if not wanted and sum(ends) and r.overridden(*counts):
        message = f"{ends[0]} + {ends[1]} layers in BF16 have no effect without first_last_layers_bf16"
        yield Violation("bf16_ends", message, "write trainer.plugins.first_last_layers_bf16=True too")


def _short(dtype: object) -> str:
    """bf16, fp16, fp32 of a torch type; "" of None or another."""
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return names.get(str(dtype).rpartition(".")[2], "")


def plugin(r: Reader) -> Iterator[Violation]:
    """Without a precision plugin, NeMo computes in FP32, whatever the optimizer's flags and the recipe's name say."""
    if r.precision_plugin is not None or r["trainer.precision"] is not None:
        return
    flags = [name for name in ("bf16", "fp16") if r[f"optim.config.{name}"]]
    if flags or r.overridden("trainer.plugins"):
        what = f"optim.config.{flags[0]} is on" if flags else "the overrides remove it"
        yield Violation(
            "no_precision",
            f"trainer.plugins has no precision plugin, and {what}: the model would be trained in FP32",
            "leave trainer.plugins as the recipe has it, and change its fields: trainer.plugins.precision=...",
        )


MOMENTS = ("float32", "float16", "bfloat16", "uint8")
STATES = {
    "optim.config.exp_avg_dtype": MOMENTS,
    "optim.config.exp_avg_sq_dtype": MOMENTS,
    "optim.config.main_params_dtype": ("float32", "float16"),
}
"""What Transformer Engine's FusedAdam takes, which makes it when the model is built (optimizers/fused_adam.py:135)."""


def states(r: Reader) -> Iterator[Violation]:
    """Formats of the optimizer's states: FP8 is uint8 to Transformer Engine, with a scale beside it."""
    for path, known in STATES.items():
        name = str(r[path]).rpartition(".")[2]
        if r[path] is not None and name not in known:
            near = "write torch.uint8, which is FP8 with a scale" if "float8" in name and "uint8" in known else ""
            yield Violation(
                "states",
                f"{path} is {name}; Transformer Engine's Adam takes {', '.join(known)}",
                near or f"write {path}=torch.{known[0]}",
            )


RULES = (plugin, formats_match, loss_scale, fp8, states)
"""All rules of this file."""
