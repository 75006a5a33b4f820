"""Apply Megatron-LM's command-line arguments, such as `--tensor-model-parallel-size 8 --swiglu`, to a `PlannedJob`.

`parse` reads them from a command line, or from `name=value; name=value`. `apply` changes a job and lists the arguments
without an equivalent. Names and defaults: Megatron-LM core_r0.15, megatron/training/arguments.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from superpod.errors import UserError, cut
from superpod.planner.layout import MODULES
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import PlannedJob
from superpod.planner.rules import pipeline_layout

Args = Mapping[str, str]

MEGATRON_DEFAULTS: dict[str, str] = {
    "hidden-dropout": "0.1",
    "attention-dropout": "0.1",
    "cross-entropy-loss-fusion": "false",
    "cross-entropy-fusion-impl": "native",
    "use-distributed-optimizer": "false",
    "sequence-parallel": "false",
    "moe-grouped-gemm": "false",
}
"""Megatron-LM's defaults, where they differ from those of this project."""

TRUE, FALSE = ("true", "1", "yes", "on", ""), ("false", "0", "no", "off", "none")


@dataclass
class Changes:
    """Fields to change, for each part of the job."""

    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    """Arguments without an equivalent in this project, as given."""


def parse(text: str) -> dict[str, str]:
    """Parse a command line, or `name=value; name=value`, to name -> value; names have no leading dashes.

    >>> parse("--swiglu --num-layers 12")
    {'swiglu': '', 'num-layers': '12'}
    >>> parse("swiglu=True; num-layers=12")
    {'swiglu': 'True', 'num-layers': '12'}
    """
    if "--" not in text:
        pairs = (part.partition("=") for part in text.split(";") if part.strip())
        return {_normalize(name): value.strip() for name, _, value in pairs}
    values: dict[str, str] = {}
    last = ""
    for word in _split_words(text):
        if re.match(r"--[a-z]", word):
            last, _, value = _normalize(word).partition("=")
            values[last] = value
        elif last:
            values[last] = f"{values[last]} {word}".strip()
    return values


def _split_words(text: str) -> list[str]:
    """Split a command line into words; raises UserError if a quote is not closed."""
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as broken:
        raise UserError(f"the arguments cannot be parsed: {broken}", "close all quotes") from broken


def _normalize(text: str) -> str:
    """Remove the leading dashes of `--name` or `--name=value`, and write the name with dashes, not underscores."""
    name, equals, value = text.strip().removeprefix("--").partition("=")
    return f"{name.replace('_', '-')}{equals}{value}"


def apply(job: PlannedJob, args: Args, *, defaults: bool = True) -> tuple[PlannedJob, list[str]]:
    """Return the job with the arguments applied, and the arguments without an equivalent.

    Args:
        job: job whose values apply where the arguments set none.
        args: result of `parse`.
        defaults: whether absent arguments take Megatron-LM's defaults instead of the job's values.

    Raises:
        UserError: an argument has an invalid value.
    """
    changes = _read_changes({**MEGATRON_DEFAULTS, **args} if defaults else args)
    model = job.model.replace(**_derive_model_fields(changes.model, job)) if changes.model else job.model
    options = {**vars(job.options), **changes.options}
    if "fp8-format" in args and job.precision in ("fp32", "tf32"):
        options["unquantised"] = "fp32"
    new_job = job.replace(
        model=model,
        layout=job.layout.replace(**_derive_layout_fields(changes.layout, job, model)),
        options=type(job.options)(**options),
        **changes.job,
    )
    return new_job, changes.unknown


def _read_changes(args: Args) -> Changes:
    """Return the fields of layout, model, options and job that the arguments set.

    Raises:
        UserError: an argument has an invalid value.
    """
    changes = Changes()
    for name, text in args.items():
        if name in IGNORED_ARGUMENTS:
            continue
        if name not in TABLE:
            changes.unknown.append(f"--{name} {text}".strip())
            continue
        part, parse_value = TABLE[name]
        shown_text = text if len(text) <= 100 else cut(text)
        try:
            getattr(changes, part).update(parse_value(text.strip()))
        except UserError as wrong:
            raise UserError(f"--{name} {shown_text}: invalid value: {wrong}", wrong.hint) from wrong
        except (ValueError, KeyError, IndexError, OverflowError) as wrong:
            raise UserError(f"--{name} {shown_text}: invalid value", "see Megatron-LM's --help") from wrong
    return changes


def _derive_model_fields(changes: dict[str, Any], job: PlannedJob) -> dict[str, Any]:
    """Return the changed model fields and those that Megatron derives from them, such as the FFN width of SwiGLU."""
    changes = dict(changes)
    if changes.get("experts") and not job.model.topk:
        changes.setdefault("topk", 2)  # moe-router-topk
    if changes.get("experts") and not changes.get("expert_ffn") and not job.model.expert_ffn:
        changes["expert_ffn"] = changes.get("ffn") or job.model.ffn
    if changes.get("gated") and not changes.get("ffn") and not job.model.gated:
        # Megatron keeps the number of parameters of 4 x hidden with three matrices instead of two, rounded to 64.
        changes["ffn"] = int(4 * changes.get("hidden", job.model.hidden) * 2 / 3 / 64) * 64
    mla = changes.pop("mla", False)
    for key, size in MLA_DEFAULTS.items() if mla else ():
        changes.setdefault(key, getattr(job.model, key) or size)
    return changes


def _derive_layout_fields(changes: dict[str, Any], job: PlannedJob, model: ModelShape) -> dict[str, Any]:
    """Return the changed layout fields and those that Megatron derives, such as vp from layers per virtual stage."""
    fields = dict(changes)
    tp, pp = fields.get("tp", job.layout.tp), fields.get("pp", job.layout.pp)
    if (layers_per_chunk := fields.pop("layers_per_virtual", 0)) and pp > 0:
        fields |= {"vp": model.layers // (pp * layers_per_chunk), "chunks": None}
    if stages := fields.pop("stages", ()):
        fields |= _partition_fields(stages, fields, job, model)
    elif any(fields.get(name) for name in ENDS_OF_STAGES):
        fields["chunks"] = None  # replaces stages that were only assumed
    if fields.get("first_layers") or fields.get("last_layers"):
        fields = {"embedding_as_layer": False, "loss_as_layer": False, **fields}
    if fields.get("vp") == 1:
        fields["vp"] = None
    if tp == 1:
        fields["sp"] = False
    return fields


ENDS_OF_STAGES = ("first_layers", "last_layers", "embedding_as_layer", "loss_as_layer")
"""Fields of `Layout` that determine the first or the last stage."""


def _partition_fields(
    stages: tuple[str, ...], fields: dict[str, Any], job: PlannedJob, model: ModelShape
) -> dict[str, Any]:
    """Return the fields of `Layout` for `--pipeline-model-parallel-layout`, given as the text of each stage.

    Raises:
        UserError: Megatron rejects the stages (transformer_config.py, "PP layout").
    """
    if given := [name for name in ENDS_OF_STAGES if fields.get(name)]:
        raise UserError(f"the pipeline layout cannot be combined with {given[0]}", "set only the pipeline layout")
    pp, vp = fields.get("pp", job.layout.pp), fields.get("vp", job.layout.vp)
    if pp < 1:
        raise UserError(f"pp must be at least 1, not {pp}")
    if why := pipeline_layout.refusal(stages, pp, model.layers, model.mtp_layers):
        raise UserError(f"Megatron rejects the pipeline layout: {why}", pipeline_layout.FORM)
    stages_per_rank = len(stages) // pp
    if vp and vp != stages_per_rank:
        raise UserError(
            f"the pipeline layout has {len(stages)} stages, but pp {pp} x vp {vp} is {pp * vp}",
            f"omit vp; with pp {pp}, the pipeline layout sets it to {stages_per_rank}",
        )
    other_fields = {"first_layers": None, "last_layers": None, "embedding_as_layer": False, "loss_as_layer": False}
    return {**other_fields, "chunks": pipeline_layout.count_layers(stages), "vp": stages_per_rank}


MLA_DEFAULTS = {"kv_lora": 32, "qk_nope_dim": 128, "qk_rope_dim": 64, "v_dim": 128}
"""Megatron-LM's sizes of multi-latent attention."""

Parser = Callable[[str], dict[str, Any]]


def _parse_flag(text: str) -> bool:
    """Return whether a switch is on; "" = on. Raises ValueError for other words."""
    low = text.lower()
    if low not in TRUE + FALSE:
        raise ValueError(text)
    return low in TRUE


def _integer(key: str) -> Parser:
    """Return a parser that sets field `key` to an integer."""
    return lambda text: {key: int(text)}


def _switch(key: str, on: Any = True, off: Any = False) -> Parser:
    """Return a parser that sets field `key` to `on` or `off`."""
    return lambda text: {key: on if _parse_flag(text) else off}


def _choice(key: str, **values: Any) -> Parser:
    """Return a parser that sets field `key` to the value of the given keyword; raises KeyError for other words."""
    return lambda text: {key: values[text.lower()]}


def _parse_recompute_modules(text: str) -> dict[str, Any]:
    named_modules = tuple(word for word in MODULES if re.search(rf"\b{word}\b", text))
    return {"recompute": "selective", "recompute_modules": named_modules or ("core_attn",)}


def _parse_moe_frequency(text: str) -> dict[str, Any]:
    """Parse moe-layer-freq: `2`, or `([0]*1+[1]*15)`, which means one dense layer before the MoE layers."""
    if text.isdigit():
        return {"moe_every": int(text)}
    match = re.match(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", text.replace(" ", ""))
    if not match:
        raise ValueError(text)
    return {"dense_first": int(match[1])}


_LAYOUT_NUMBERS = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "num-virtual-stages-per-pipeline-rank": "vp",
    "virtual-pipeline-model-parallel-size": "vp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "expert-tensor-parallel-size": "etp",
    "micro-batch-size": "mbs",
    "global-batch-size": "gbs",
    "recompute-num-layers": "recompute_layers",
    "num-layers-per-virtual-pipeline-stage": "layers_per_virtual",
    "decoder-first-pipeline-num-layers": "first_layers",
    "decoder-last-pipeline-num-layers": "last_layers",
}
_MODEL_NUMBERS = {
    "num-layers": "layers",
    "hidden-size": "hidden",
    "ffn-hidden-size": "ffn",
    "num-attention-heads": "heads",
    "num-query-groups": "kv_heads",
    "kv-channels": "head_dim",
    "max-position-embeddings": "positions",
    "vocab-size": "vocab",
    "make-vocab-size-divisible-by": "vocab_divisible_by",
    "num-experts": "experts",
    "moe-router-topk": "topk",
    "moe-ffn-hidden-size": "expert_ffn",
    "moe-shared-expert-intermediate-size": "shared_ffn",
    "q-lora-rank": "q_lora",
    "kv-lora-rank": "kv_lora",
    "qk-head-dim": "qk_nope_dim",
    "qk-pos-emb-head-dim": "qk_rope_dim",
    "v-head-dim": "v_dim",
    "mtp-num-layers": "mtp_layers",
}
_SWITCHES: dict[str, tuple[str, Parser]] = {
    "sequence-parallel": ("layout", _switch("sp")),
    "use-distributed-optimizer": ("layout", _switch("sharding", "zero1", "none")),
    "account-for-embedding-in-pipeline-split": ("layout", _switch("embedding_as_layer")),
    "account-for-loss-in-pipeline-split": ("layout", _switch("loss_as_layer")),
    "recompute-activations": ("layout", _switch("recompute", "selective", "none")),
    "swiglu": ("model", _switch("gated")),
    "untie-embeddings-and-output-weights": ("model", _switch("tied", False, True)),
    "disable-bias-linear": ("model", _switch("bias", False, True)),
    "add-qkv-bias": ("model", _switch("qkv_bias")),
    "qk-layernorm": ("model", _switch("qk_norm")),
    "multi-latent-attention": ("model", _switch("mla")),
    "moe-shared-expert-gate": ("model", _switch("shared_gate")),
    "moe-grouped-gemm": ("options", _switch("grouped_gemm")),
    "cross-entropy-loss-fusion": ("options", _switch("fused_loss")),
    "no-gradient-accumulation-fusion": ("options", _switch("grad_fusion", False, True)),
    "fp8-param-gather": ("options", _switch("fp8_params")),
    "overlap-grad-reduce": ("options", _switch("overlap_grads")),
    "overlap-param-gather": ("options", _switch("overlap_params")),
    "tp-comm-overlap": ("options", _switch("overlap_tp")),
    "moe-enable-deepep": ("options", _switch("deepep")),
    "overlap-moe-expert-parallel-comm": ("options", _switch("overlap_experts")),
    "enable-cuda-graph": ("options", _switch("cuda_graphs")),
    "deterministic-mode": ("options", _switch("deterministic")),
    "bf16": ("job", _switch("precision", "bf16", "fp32")),
    "fp16": ("job", _switch("precision", "fp16", "fp32")),
}
_OTHER_ARGUMENTS: dict[str, tuple[str, Parser]] = {
    "recompute-granularity": ("layout", _choice("recompute", full="full", selective="selective")),
    "recompute-method": ("layout", _choice("recompute_method", uniform="uniform", block="block")),
    "recompute-modules": ("layout", _parse_recompute_modules),
    "pipeline-model-parallel-layout": ("layout", lambda text: {"stages": pipeline_layout.parse(text)}),
    "data-parallel-sharding-strategy": (
        "layout",
        _choice("sharding", no_shard="none", optim="zero1", optim_grads="zero2", optim_grads_params="zero3"),
    ),
    "normalization": ("model", _choice("norm", rmsnorm="rms", layernorm="layer")),
    "position-embedding-type": ("model", lambda text: {} if text == "learned_absolute" else {"positions": 0}),
    "moe-layer-freq": ("model", _parse_moe_frequency),
    "hidden-dropout": ("options", lambda text: {"hidden_dropout": float(text)}),
    "attention-dropout": ("options", lambda text: {"attention_dropout": float(text)}),
    "attention-backend": (
        "options",
        _choice("attention", flash="flash", fused="fused", unfused="unfused", local="local", auto="flash"),
    ),
    "transformer-impl": ("options", _choice("impl", transformer_engine="te", local="local", inference_optimized="te")),
    "cross-entropy-fusion-impl": ("options", _choice("loss_impl", te="te", native="native")),
    "cp-comm-type": ("options", _choice("cp_comm", p2p="p2p", a2a="a2a", all_gather="all_gather")),
    "moe-expert-capacity-factor": ("options", lambda text: {"capacity": float(text)}),
    "optimizer-offload-fraction": ("options", lambda text: {"offload": float(text)}),
    "exp-avg-dtype": ("options", _choice("moments", fp32="fp32", bf16="bf16", fp16="bf16", fp8="fp8")),
    "main-grads-dtype": ("options", _choice("grads", fp32="fp32", bf16="bf16")),
    "num-distributed-optimizer-instances": ("options", _integer("optimizer_instances")),
    "microbatch-group-size-per-virtual-pipeline-stage": ("options", _integer("microbatch_group")),
    "seq-length": ("job", _integer("seq")),
    "fp8-format": ("job", lambda text: {"precision": "fp8"}),
    "fp8-recipe": (
        "job",
        _choice("precision", tensorwise="fp8cs", delayed="fp8ds", mxfp8="mxfp8", blockwise="fp8bw"),
    ),
    "fp4-format": ("job", lambda text: {"precision": "nvfp4"}),
}
TABLE: dict[str, tuple[str, Parser]] = {
    **{name: ("layout", _integer(key)) for name, key in _LAYOUT_NUMBERS.items()},
    **{name: ("model", _integer(key)) for name, key in _MODEL_NUMBERS.items()},
    **_SWITCHES,
    **_OTHER_ARGUMENTS,
}
"""Argument -> (field of `Changes`, parser of its value)."""
IGNORED_ARGUMENTS = (
    *("tokenizer-type", "use-megatron-fsdp", "group-query-attention", "use-mcore-models", "use-flash-attn"),
)
"""Arguments that do not affect a plan, or that repeat another argument."""
