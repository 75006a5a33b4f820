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
        return {_name(name): value.strip() for name, _, value in pairs}
    values: dict[str, str] = {}
    last = ""
    for word in _words(text):
        if re.match(r"--[a-z]", word):
            last, _, value = _name(word).partition("=")
            values[last] = value
        elif last:
            values[last] = f"{values[last]} {word}".strip()
    return values


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as broken:
        raise UserError(f"the arguments cannot be parsed: {broken}", "look for an unclosed quote") from broken


def _name(text: str) -> str:
    return text.strip().removeprefix("--").replace("_", "-") if "=" not in text else _to_pair(text)


def _to_pair(text: str) -> str:
    name, _, value = text.strip().removeprefix("--").partition("=")
    return f"{name.replace('_', '-')}={value}"


def apply(job: PlannedJob, args: Args, *, defaults: bool = True) -> tuple[PlannedJob, list[str]]:
    """Return the job changed by the arguments, and the arguments without an equivalent.

    Args:
        job: job that provides all values that the arguments do not set.
        args: result of `parse`.
        defaults: whether missing arguments have Megatron-LM's defaults instead of the job's values.

    Raises:
        UserError: an argument has an invalid value.
    """
    changes = read_changes(({**MEGATRON_DEFAULTS, **args}) if defaults else args)
    model = job.model.replace(**_model(changes.model, job)) if changes.model else job.model
    options = {**vars(job.options), **changes.options}
    if "fp8-format" in args and job.precision in ("fp32", "tf32"):
        options["unquantised"] = "fp32"
    new_job = job.replace(
        model=model,
        layout=job.layout.replace(**_layout(changes.layout, job, model)),
        options=type(job.options)(**options),
        **changes.job,
    )
    return new_job, changes.unknown


def _shorten(text: str) -> str:
    return text if len(text) <= 100 else cut(text)


def read_changes(args: Args) -> Changes:
    """Return the fields that the arguments set.

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
        where, read = TABLE[name]
        try:
            getattr(changes, where).update(read(text.strip()))
        except UserError as wrong:
            raise UserError(f"--{name} {_shorten(text)}: invalid value: {wrong}", wrong.hint) from wrong
        except (ValueError, KeyError, IndexError, OverflowError) as wrong:
            raise UserError(f"--{name} {_shorten(text)}: invalid value", "see Megatron-LM's --help") from wrong
    return changes


def _model(changes: dict[str, Any], job: PlannedJob) -> dict[str, Any]:
    """Return the model fields, including those that Megatron derives from several arguments."""
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


def _layout(changes: dict[str, Any], job: PlannedJob, model: ModelShape) -> dict[str, Any]:
    """Return the layout fields, including those that Megatron derives, such as vp from layers per virtual stage."""
    fields = dict(changes)
    tp, pp = fields.get("tp", job.layout.tp), fields.get("pp", job.layout.pp)
    if (layers_per_chunk := fields.pop("layers_per_virtual", 0)) and pp > 0:
        fields |= {"vp": model.layers // (pp * layers_per_chunk), "chunks": None}
    if stages := fields.pop("stages", ()):
        fields |= _given_stages(stages, fields, job, model)
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


def _given_stages(
    stages: tuple[str, ...], fields: dict[str, Any], job: PlannedJob, model: ModelShape
) -> dict[str, Any]:
    """Return the fields of `Layout` for explicitly listed stages, which replace stages that were only assumed.

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
    if (vp or len(stages) // pp) != len(stages) // pp:
        raise UserError(
            f"the pipeline layout has {len(stages)} stages, but pp {pp} x vp {vp} is {pp * vp}",
            f"omit vp: with pp {pp} it is {len(stages) // pp}",
        )
    assumed_fields = {"first_layers": None, "last_layers": None, "embedding_as_layer": False, "loss_as_layer": False}
    return {**assumed_fields, "chunks": pipeline_layout.count_layers(stages), "vp": len(stages) // pp}


MLA_DEFAULTS = {"kv_lora": 32, "qk_nope_dim": 128, "qk_rope_dim": 64, "v_dim": 128}

Read = Callable[[str], dict[str, Any]]


def _flag(text: str) -> bool:
    low = text.lower()
    if low not in TRUE + FALSE:
        raise ValueError(text)
    return low in TRUE


def _integer(key: str) -> Read:
    return lambda text: {key: int(text)}


def _switch(key: str, value: Any = True, off: Any = False) -> Read:
    return lambda text: {key: value if _flag(text) else off}


def _choice(key: str, **values: Any) -> Read:
    return lambda text: {key: values[text.lower()]}


def _rope(text: str) -> dict[str, Any]:
    return {} if text == "learned_absolute" else {"positions": 0}


def _modules(text: str) -> dict[str, Any]:
    named_modules = tuple(word for word in MODULES if re.search(rf"\b{word}\b", text))
    return {"recompute": "selective", "recompute_modules": named_modules or ("core_attn",)}


def _frequency(text: str) -> dict[str, Any]:
    """Parse moe-layer-freq: `2`, or `([0]*1+[1]*15)`, which means one dense layer first."""
    if text.isdigit():
        return {"moe_every": int(text)}
    match = re.match(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", text.replace(" ", ""))
    if not match:
        raise ValueError(text)
    return {"dense_first": int(match[1])}


def _sharding(text: str) -> dict[str, Any]:
    names = {"no_shard": "none", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}
    return {"sharding": names[text]}


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
_SWITCHES: dict[str, tuple[str, Read]] = {
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
_WORDS: dict[str, tuple[str, Read]] = {
    "recompute-granularity": ("layout", lambda text: {"recompute": {"full": "full", "selective": "selective"}[text]}),
    "recompute-method": ("layout", lambda text: {"recompute_method": {"uniform": text, "block": text}[text]}),
    "recompute-modules": ("layout", _modules),
    "pipeline-model-parallel-layout": ("layout", lambda text: {"stages": pipeline_layout.parse(text)}),
    "data-parallel-sharding-strategy": ("layout", _sharding),
    "normalization": ("model", _choice("norm", rmsnorm="rms", layernorm="layer")),
    "position-embedding-type": ("model", _rope),
    "moe-layer-freq": ("model", _frequency),
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
TABLE: dict[str, tuple[str, Read]] = {
    **{name: ("layout", _integer(key)) for name, key in _LAYOUT_NUMBERS.items()},
    **{name: ("model", _integer(key)) for name, key in _MODEL_NUMBERS.items()},
    **_SWITCHES,
    **_WORDS,
}
"""Argument -> (the part of the job that it changes, the function that parses its value)."""
IGNORED_ARGUMENTS = (
    "tokenizer-type",
    "use-megatron-fsdp",
    "group-query-attention",
    "use-mcore-models",
    "use-flash-attn",
)
"""Arguments that do not affect a plan, or that repeat another argument."""
