"""Rows of published or measured runs (CSV, columns of `contracts.md`) as jobs: spellings, blanks, contradictions.

A row says `tp, pp, ...` and leaves blank what its source does not print. What is filled in then is the usual of its
framework and release, decided here and nowhere else; nothing is decided by a row's id or by its measured figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from superpod.planner import hardware, legality, megatron_args, models, vocabulary
from superpod.planner.errors import UserError
from superpod.planner.job import Job, Options
from superpod.planner.layout import MODULES, Layout
from superpod.planner.models import Model
from superpod.planner.models.stages import near_even

Row = Mapping[str, str]

FREE_TEXT = {"fp8": "fp8", "": "bf16"}
PLAIN = ("fp32", "tf32", "bf16", "fp16")
SEQ = 4096
"""Of a row that does not print one."""


class Unsupported(UserError):
    """A row that the planner has no model for: the verdict is `unsupported`."""


class Contradiction(UserError):
    """A row whose own numbers cannot be: the verdict is `illegal`."""


def job(row: Row) -> Job:
    """The run that a row describes.

    Raises:
        Unsupported: no such model, GPU or precision here.
        Contradiction: a number that is none, or degrees that cannot be.
    """
    try:
        row = {**row, **{key: row.get(key) or str(size) for key, size in vocabulary.blanks(row).items()}}
        model = _model(row)
        node = vocabulary.node(row)
        fabric = hardware.builtin().fabric_of(node)
        precision = hardware.precision(row.get("precision") or "bf16")
        if precision == "fp8" and node.gpu.fp8_tflops:
            precision = vocabulary.fp8_kind(row, node.gpu.generation == "blackwell")
    except Contradiction:
        raise
    except UserError as unknown:
        raise Unsupported(*unknown.args) from unknown
    layout, gpus = _layout(row, model.layers)
    found = Job(
        model=model,
        node=node,
        fabric=fabric,
        gpus=gpus,
        seq=number(row, "seq") or SEQ,
        precision=precision,
        layout=layout,
        task=_task(row),
        options=_options(row),
    )
    if found.options.fp8_params and precision in PLAIN:  # a source's habit, where there is FP8
        found = found.replace(options=replace(found.options, fp8_params=False))
    args = vocabulary.arguments(row)
    found = megatron_args.apply(found, args)[0] if args else found
    blank = not (row.get("recompute") or "").strip()
    tuned = (row.get("release") or "").strip() or vocabulary.is_fsdp2(row)
    return _recompute_as_needed(found) if blank and tuned else found


def number(row: Row, key: str, default: int | None = None) -> int | None:
    """A whole number of a row, or `default` where it is blank; `128k` is 131,072, or 128,000 for anything but powers.

    Raises:
        Contradiction: when it is something else, or not above 0.
    """
    text = (row.get(key) or "").strip().replace(",", "")
    if not text:
        return default
    if text.isascii() and text.isdigit() and len(text) < 12 and (whole := int(text)):
        return whole
    if match := re.fullmatch(r"(\d+)k", text.lower()):
        return int(match[1]) * 1024
    try:
        value = float(text)
    except ValueError:
        raise Contradiction(f"{key} is {text!r}; it is a whole number") from None
    if value != value or value in (float("inf"), float("-inf")) or value != int(value) or not 0 < value < 2**40:
        raise Contradiction(f"{key} is {text}; it is a whole number, 1 or more")
    return int(value)


def _model(row: Row) -> Model:
    """A model by name, cut to `layers` where the row says so; `gpt` and `moe` by the row's own shape."""
    name = (row.get("model") or "").strip()
    layers = number(row, "layers")
    if name in ("gpt", "moe"):
        return _shape(row, layers)
    model = vocabulary.variant(row, models.find(name))
    return model.replace(layers=layers) if layers and layers != model.layers else model


def _shape(row: Row, layers: int | None) -> Model:
    given = {key: number(row, key) for key in ("hidden", "ffn", "heads", "kv_heads")}
    shape: dict[str, Any] = {key: value for key, value in given.items() if value}
    row = {**row, "vocab": re.sub(r"k$", "000", (row.get("vocab") or "50257").strip().lower())}
    return Model.from_shape(
        name=row["model"], style="gpt", layers=layers or 0, vocab=number(row, "vocab") or 0, positions=1024, **shape
    )


def _layout(row: Row, layers: int) -> tuple[Layout, int]:
    """The layout and the number of GPUs. A blank degree is 1; a blank batch follows from the others."""
    degree = {key: number(row, key, 1) or 1 for key in ("tp", "pp", "cp", "ep", "mbs")}
    vp, etp = number(row, "vp"), number(row, "etp")
    unit = degree["tp"] * degree["pp"] * degree["cp"]
    dp, experts = number(row, "dp"), degree["ep"] * (etp or degree["tp"]) * degree["pp"]
    gpus = number(row, "gpus") or vocabulary.gpus(row) or (unit * dp if dp else math.lcm(unit, experts))
    dp = max(1, gpus // unit)
    batches = number(row, "num_microbatches") or (4 * degree["pp"] if degree["pp"] > 1 else 1)
    gbs = number(row, "gbs") or degree["mbs"] * dp * batches
    vp = vp if vp and vp > 1 else None
    layout = Layout(
        **degree,
        **_stages(degree["pp"] * (vp or 1), layers),
        **_recompute(row),
        vp=vp if degree["pp"] > 1 else None,
        etp=etp,
        gbs=gbs,
        sp=degree["tp"] > 1 and "no SP" not in (row.get("recompute") or "") and row.get("release") != "vTrain",
        sharding="zero3" if (row.get("fsdp") or "").strip() or vocabulary.is_fsdp2(row) else "zero1",
    )
    return layout, gpus


def _stages(count: int, layers: int) -> dict[str, Any]:
    """The stages that Megatron users give when layers do not divide into so many chunks: no source prints them.

    The embedding and the loss count as layers where that makes the rest even; else the first and last chunks get less.
    """
    if count > layers + 2:
        return {}
    for embedding, loss in ((False, False), (True, True), (False, True), (True, False)):
        if (layers + embedding + loss) % count == 0:
            return {"embedding_as_layer": embedding, "loss_as_layer": loss}
    return {"chunks": near_even(layers, count)}


def _recompute(row: Row) -> dict[str, Any]:
    """`full`, `selective mlp+core_attn`, `['mla_up_proj']`: granularity and modules. vTrain's recompute all."""
    text = (row.get("recompute") or "").lower()
    if "full" in text or row.get("release") == "vTrain":
        return {"recompute": "full"}
    named = tuple(module for module in MODULES if re.search(rf"\b{module}\b", text)) if text else ()
    if named or "selective" in text:
        return {"recompute": "selective", "recompute_modules": named or ("core_attn",)}
    return {}


STEPS = (("mla_up_proj",), ("mla_up_proj", "mlp"), ("mla_up_proj", "mlp", "moe_act", "layernorm", "shared_experts"))
"""Recomputation of Megatron-Bridge's tuned recipes, by what it costs."""


def _recompute_as_needed(found: Job) -> Job:
    """The job with the cheapest recomputation under which it runs at all, where its table of releases prints none.

    Tuned recipes recompute what does not fit, and their tables do not say it. A run that fits as it is, or never,
    stays as it is.
    """
    from superpod.planner import memory

    try:
        return next((job for job in _with_recomputation(found) if memory.verdict(job) == "ok"), found)
    except UserError:
        return found  # its layout is illegal: legality says why


def _with_recomputation(found: Job) -> Iterator[Job]:
    """The job as it is, then with each of `STEPS` as far as the model and precision allow them, then with all of it."""
    yield found
    before = len(legality.violations(found))
    for step in STEPS:
        allowed = tuple(name for name in step if len(legality.violations(_selective(found, (name,)))) == before)
        if allowed:
            yield _selective(found, allowed)
    yield found.replace(layout=found.layout.replace(recompute="full"))


def _selective(found: Job, modules: tuple[str, ...]) -> Job:
    return found.replace(layout=found.layout.replace(recompute="selective", recompute_modules=modules))


def _task(row: Row) -> Any:
    task = (row.get("task") or "pretrain").strip().lower()
    if task not in ("pretrain", "sft", "lora"):
        raise Unsupported(f"no task is called {task!r}", "it is pretrain, sft or lora")
    return task


def _options(row: Row) -> Options:
    return _options_of(*(row.get(key) or "" for key in ("release", "framework", "source", "unit")))


@cache
def _options_of(release: str, framework: str, source: str, unit: str) -> Options:
    row = {"release": release, "framework": framework, "source": source, "unit": unit}
    if row.get("release") == "vTrain":
        return Options(
            framework="deepspeed",
            release="vTrain",
            hidden_dropout=0.1,
            attention_dropout=0.1,
            attention="unfused",
            impl="local",
            fused_loss=False,
            overlap_grads=False,
            overlap_params=False,
            overlap_tp=False,
        )
    if vocabulary.is_fsdp2(row):
        kind = {"grads": "bf16", "moments": "bf16"} if "Automodel" in (row.get("source") or "") else {}
        return Options(framework="fsdp2", release=row.get("release") or "", fused_loss=False, **kind)
    return Options(**{"release": row.get("release") or "", **vocabulary.options(row)})
