"""Check that precision plugin, optimizer, strategy and model have the same number formats."""

from __future__ import annotations

from collections.abc import Iterator

from superpod.nemo2.validation.reading import PLUGIN, Reader
from superpod.planner.rules.rules import Violation

BF16, FP16 = ("bf16", "bf16-mixed"), ("16", "fp16", "16-mixed", "fp16-mixed")
"""Names of the precisions of NeMo's plugin."""

OVERWRITTEN_FIELDS = (
    *("bf16", "fp16", "params_dtype", "pipeline_dtype", "fp8", "fp8_recipe", "fp8_wgrad", "fp8_margin"),
    *("fp8_dot_product_attention", "fp8_multi_head_attention", "fp4", "fp4_recipe", "first_last_layers_bf16"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
)
"""Fields of Megatron's configuration that NeMo 2.7.3 sets from the precision plugin's fields of the same name."""


def number_format(precision: object) -> str:
    """Return bf16, fp16 or fp32 for a precision of NeMo's plugin, which treats unknown values as fp32."""
    if str(precision) in BF16:
        return "bf16"
    return "fp16" if str(precision) in FP16 else "fp32"


def check_formats(r: Reader) -> Iterator[Violation]:
    """Yield a violation unless the plugin's precision and dtypes and the optimizer's flags specify the same format."""
    if r.precision_plugin is None:
        return
    expected = number_format(r[f"{PLUGIN}.precision"])
    for name in ("bf16", "fp16"):
        path = f"optim.config.{name}"
        if r.is_overridden(path) and bool(r[path]) != (expected == name):  # megatron_strategy.py:498 overwrites it
            precision = "16-mixed" if name == "fp16" else "bf16-mixed"
            yield Violation(
                "optimizer_precision",
                f"{path} is {r[path]}, but the precision plugin, which takes precedence in NeMo, has {expected}",
                f"set trainer.plugins.precision={precision} and its dtypes",
            )
    yield from _check_overwritten(r, expected)
    for path in (f"{PLUGIN}.params_dtype", f"{PLUGIN}.pipeline_dtype", "trainer.strategy.pipeline_dtype"):
        dtype = _short_name(r[path])
        if dtype and dtype != expected and not (path.endswith("params_dtype") and dtype == "fp32"):
            yield Violation(
                "dtypes",
                f"trainer.plugins.precision is {r[f'{PLUGIN}.precision']}, but {path} is {dtype}",
                "set precision, params_dtype, both pipeline_dtype fields and the optimizer's flag to the same format, "
                "or use a recipe in that precision (`recipes list`)",
            )
            return


def _check_overwritten(r: Reader, expected: str) -> Iterator[Violation]:
    """Yield a violation per overridden model field that the plugin overwrites (update_config_with_dtype_overrides)."""
    for name in OVERWRITTEN_FIELDS:
        path = f"model.config.{name}"
        source, value = f"trainer.plugins.{name}", r[f"{PLUGIN}.{name}"]
        if name in ("bf16", "fp16"):
            source, value = "trainer.plugins.precision", expected == name
        if r.is_overridden(path) and r[path] != value:
            message = f"{path} is {r[path]}, but NeMo overwrites it with the precision plugin's value: {value}"
            yield Violation("model_precision", message, f"change {source} instead")


def check_loss_scale(r: Reader) -> Iterator[Violation]:
    """Yield a violation if the loss scale in FP16 is not 1: NeMo 2.7.3 never scales the loss."""
    if r.precision_plugin is None or number_format(r[f"{PLUGIN}.precision"]) != "fp16":
        return
    scale = r[f"{PLUGIN}.fp16_loss_scale"]
    if scale != 1:
        initial = r[f"{PLUGIN}.fp16_initial_loss_scale"] if scale is None else scale
        yield Violation(
            "loss_scale",
            f"fp16 with an initial loss scale of {initial:g}: NeMo 2.7.3 divides the gradients by it but never scales "
            "the loss, so the gradients underflow",
            "train in bf16, or set trainer.plugins.fp16_loss_scale=1.0",
        )


def check_fp8(r: Reader) -> Iterator[Violation]:
    """Yield a violation for FP8 on a base other than BF16, for its switches without FP8, or if no layer is in FP8."""
    if r.precision_plugin is None:
        return
    fp8, base = r[f"{PLUGIN}.fp8"], number_format(r[f"{PLUGIN}.precision"])
    if fp8 and base != "bf16":
        message = f"trainer.plugins.fp8 is {fp8} with {base}, but Transformer Engine supports FP8 only with BF16"
        yield Violation("fp8_above", message, "set trainer.plugins.precision=bf16-mixed and its dtypes")
    if fp8 and r[f"{PLUGIN}.fp4"]:  # TransformerConfig.__post_init__
        message = "trainer.plugins has both fp8 and fp4, but Megatron supports only one of them"
        yield Violation("fp8_fp4", message, "set trainer.plugins.fp8=None, or trainer.plugins.fp4=None")
    gathers = r[f"{PLUGIN}.fp8_param_gather"] or r[f"{PLUGIN}.fp8_params"]
    if gathers and not fp8:  # TransformerConfig.__post_init__: fp8_param needs fp8
        fix = "set trainer.plugins.fp8_param_gather=False"
        if r[f"{PLUGIN}.reuse_grad_buf_for_mxfp8_param_ag"]:
            fix += " trainer.plugins.reuse_grad_buf_for_mxfp8_param_ag=False"
        yield Violation("fp8_gather", "trainer.plugins.fp8_param_gather requires trainer.plugins.fp8", fix)
    yield from _check_bf16_ends(r, bool(fp8))
    yield from _check_expert_bias(r, bool(fp8))


def _check_expert_bias(r: Reader, is_fp8: bool) -> Iterator[Violation]:
    """Yield a violation for biased experts in FP8 without padded token counts (`fusions._pad_tokens_of_experts`)."""
    has_expert_bias = r["model.config.num_moe_experts"] and r["model.config.add_bias_linear"]
    if not (is_fp8 and has_expert_bias and r["model.config.moe_grouped_gemm"]):
        return
    if not r["model.config.moe_router_padding_for_fp8"]:
        message = "experts with biases (add_bias_linear) in FP8 require model.config.moe_router_padding_for_fp8"
        yield Violation("fp8_expert_bias", message, "set model.config.moe_router_padding_for_fp8=True")


def _check_bf16_ends(r: Reader, is_fp8: bool) -> Iterator[Violation]:
    """Yield a violation if the numbers of first and last layers in BF16 have no effect or leave no layer in FP8.

    Megatron's check (TransformerConfig.__post_init__) runs before the plugin sets these fields.
    """
    paths = [f"{PLUGIN}.num_layers_at_{end}_in_bf16" for end in ("start", "end")]
    first, last = (r[path] or 0 for path in paths)
    enabled, layers = r[f"{PLUGIN}.first_last_layers_bf16"], r["model.config.num_layers"]
    if enabled and is_fp8 and r[f"{PLUGIN}.fp8_recipe"] == "delayed":
        message = "first_last_layers_bf16 with fp8_recipe delayed: Megatron's delayed scaling applies to all layers"
        yield Violation("bf16_ends", message, "set trainer.plugins.first_last_layers_bf16=False")
    if enabled and isinstance(layers, int) and first + last >= layers:
        message = f"{first} first and {last} last layers in BF16 leave none of the {layers} layers in FP8"
        yield Violation("bf16_ends", message, "reduce them, or set trainer.plugins.fp8=None")
    if not enabled and first + last and r.is_overridden(*paths):
        message = f"{first} + {last} layers in BF16 have no effect without first_last_layers_bf16"
        yield Violation("bf16_ends", message, "also set trainer.plugins.first_last_layers_bf16=True")


def _short_name(dtype: object) -> str:
    """Return bf16, fp16 or fp32 for a torch data type; "" for None and other types."""
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return names.get(str(dtype).rpartition(".")[2], "")


def check_plugin(r: Reader) -> Iterator[Violation]:
    """Yield a violation if there is no precision plugin: NeMo computes in FP32 then, despite the optimizer's flags."""
    if r.precision_plugin is not None or r["trainer.precision"] is not None:
        return
    flags = [name for name in ("bf16", "fp16") if r[f"optim.config.{name}"]]
    if flags or r.is_overridden("trainer.plugins"):
        cause = f"but optim.config.{flags[0]} is set" if flags else "because an override removes it"
        yield Violation(
            "no_precision",
            f"trainer.plugins has no precision plugin, {cause}: the model would be trained in FP32",
            "keep the plugin, and override its fields instead: trainer.plugins.precision=...",
        )


MOMENTS = ("float32", "float16", "bfloat16", "uint8")
STATES = {
    "optim.config.exp_avg_dtype": MOMENTS,
    "optim.config.exp_avg_sq_dtype": MOMENTS,
    "optim.config.main_params_dtype": ("float32", "float16"),
}
"""Field -> data types that Transformer Engine's FusedAdam accepts (optimizers/fused_adam.py:135)."""


def check_optimizer_dtypes(r: Reader) -> Iterator[Violation]:
    """Yield a violation for optimizer states with a data type that Transformer Engine's Adam does not support."""
    for path, known in STATES.items():
        name = str(r[path]).rpartition(".")[2]
        if r[path] is None or name in known:
            continue
        fix = f"set {path}=torch.{known[0]}"
        if "float8" in name and "uint8" in known:
            fix = "use torch.uint8, which stands for FP8 with a scale"
        yield Violation("states", f"{path} is {name}; Transformer Engine's Adam accepts {', '.join(known)}", fix)


RULES = (check_plugin, check_formats, check_loss_scale, check_fp8, check_optimizer_dtypes)
