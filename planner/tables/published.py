"""Rows of published or measured runs as jobs: spellings, blanks, contradictions. Columns: `SHARED`, `LAYOUT` and gbs.

A row gives `tp, pp, ...` and leaves blank what its source does not print. This module and `spellings.py` fill those
blanks with what is usual for its framework and release; neither looks at a row's id or its measured figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

from superpod.errors import UserError
from superpod.planner import hardware, legality, megatron_args, models
from superpod.planner.layout import ENDS, MODULES, Layout
from superpod.planner.models import ModelShape
from superpod.planner.models.stages import near_even
from superpod.planner.planned_job import Options, PlannedJob
from superpod.planner.predict import Run
from superpod.planner.tables import spellings

Row = Mapping[str, str]

SEQ = 4096
"""Of a row that does not print one."""


class Unsupported(UserError):
    """A row that the planner has no model for: the verdict is `unsupported`."""


class Contradiction(UserError):
    """A row whose own numbers cannot be: the verdict is `illegal`."""


def label(row: Row) -> str:
    """A row in words that a reader can look up: model, GPUs, and the end of its source's path."""
    source = "/".join(re.sub(r"@[0-9a-f]*", "", row.get("source") or "").split("/")[-2:])
    return f"{row.get('model')} on {row.get('gpus') or '?'} {row.get('gpu') or 'unnamed GPUs'}, {source}"


def job(row: Row) -> PlannedJob:
    """The run that a row describes. Raises as `run`."""
    return run(row).job


def run(row: Row) -> Run:
    """The run that a row describes; what most rows of a table have in common is read once.

    Raises:
        Unsupported: no such model, GPU or precision here.
        Contradiction: a number that is none, or degrees that cannot be.
    """
    shared = _shared(*map(row.get, SHARED))
    if isinstance(shared, UserError):
        raise shared.with_traceback(None)
    if shared.blanks:
        row = {**row, **{key: row.get(key) or str(size) for key, size in shared.blanks.items()}}
    laid = _layout(shared.setting.model.layers, shared.fsdp2, shared.gpus, *map(row.get, LAYOUT))
    if isinstance(laid, UserError):
        raise laid.with_traceback(None)
    setting = _unpadded(shared.setting, laid.layout.tp) if shared.unpadded else shared.setting
    described = Run(setting, laid.layout, laid.gpus, number(row, "gbs") or laid.gbs, laid.note)
    tuned = shared.tuned and not (row.get("recompute") or "").strip()
    if not shared.arguments and not tuned:
        return described
    whole = described.job
    if shared.arguments:
        whole = megatron_args.apply(whole, shared.arguments)[0]
    if tuned:
        whole = _recompute_as_needed(whole)
    return Run.of(whole)._replace(note=described.note, **({} if shared.arguments else {"setting": setting}))


SETTING = (
    *("release", "framework", "source", "unit", "task", "case", "notes", "flags"),
    *("model", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "gpu", "precision", "seq"),
)
"""Columns that make a run's setting."""
SHARED = (*SETTING, "schedule", "pp", "gpus")
"""Those, and columns that a source's habits go by."""
LAYOUT = (
    *("tp", "pp", "vp", "cp", "ep", "etp", "dp", "mbs", "num_microbatches", "gpus"),
    *("fsdp", "recompute", "release"),
)
"""Columns that make a layout, but for gbs."""
KEPT = 2**14
"""Settings and layouts remembered."""


class Shared(NamedTuple):
    """What rows have in common that differ in their layout only."""

    setting: PlannedJob
    blanks: Mapping[str, int | str]
    """What the source leaves blank, and means."""
    arguments: Mapping[str, str]
    """Of Megatron-LM."""
    tuned: bool
    """Whether its runs recompute what they need to, and do not say so."""
    fsdp2: bool
    gpus: int | None
    """Where a row gives no number of GPUs."""
    unpadded: bool
    """Whether its runs cut the vocabulary over TP as it is."""


@lru_cache(KEPT)
def _shared(*values: str | None) -> Shared | UserError:
    """Of the columns `SHARED`; a mistake is remembered too."""
    row = {key: value or "" for key, value in zip(SHARED, values, strict=True)}
    try:
        blanks = spellings.blanks(row)
        filled = {**row, **{key: row.get(key) or str(size) for key, size in blanks.items()}}
        setting = _setting(*(filled[key] for key in SETTING))
    except Contradiction as cannot_be:
        return cannot_be
    except UserError as unknown:
        return Unsupported(*unknown.args)
    fsdp2 = spellings.is_fsdp2(row)
    tuned = bool(row["release"].strip()) or fsdp2
    unpadded = spellings.is_vtrain_node(row)
    return Shared(setting, blanks, spellings.arguments(row), tuned, fsdp2, spellings.gpus(row), unpadded)


@lru_cache(KEPT)
def _setting(*values: str) -> PlannedJob:
    row = dict(zip(SETTING, values, strict=True))
    model = _model(row)
    node = spellings.node(row)
    precision = hardware.precision(row["precision"] or "bf16")
    if precision == "fp8" and node.gpu.fp8_tflops:
        precision = spellings.fp8_kind(row, "mxfp8" in node.gpu.precisions)
    job = PlannedJob(
        model=model,
        node=node,
        fabric=hardware.builtin().fabric_of(node),
        gpus=1,
        seq=number(row, "seq") or SEQ,
        precision=precision,
        layout=Layout(),
        task=_task(row),
        options=_options(row),
    )
    if job.options.fp8_params and precision in hardware.PLAIN:  # a source's habit, where there is FP8
        job = job.replace(options=replace(job.options, fp8_params=False))
    return job


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


def _model(row: Row) -> ModelShape:
    """A model by name, cut to `layers` where the row says so; `gpt` and `moe` by the row's own shape."""
    name = (row.get("model") or "").strip()
    layers = number(row, "layers")
    if name in ("gpt", "moe"):
        return _shape(row, layers)
    model = spellings.variant(row, models.find(name))
    return model.replace(layers=layers) if layers and layers != model.layers else model


def _shape(row: Row, layers: int | None) -> ModelShape:
    given = {key: number(row, key) for key in ("hidden", "ffn", "heads", "kv_heads")}
    shape: dict[str, Any] = {key: value for key, value in given.items() if value}
    row = {**row, "vocab": re.sub(r"k$", "000", (row.get("vocab") or "50257").strip().lower())}
    return ModelShape.from_shape(
        name=row["model"], style="gpt", layers=layers or 0, vocab=number(row, "vocab") or 0, positions=1024, **shape
    )


@lru_cache(KEPT)
def _unpadded(setting: PlannedJob, tp: int) -> PlannedJob:
    """The setting with a vocabulary of 50,257 in equal parts, the rest of the division left out."""
    return setting.replace(model=setting.model.replace(vocab=50257 // tp * tp, vocab_divisible_by=1))


class Laid(NamedTuple):
    """A layout without its batch."""

    layout: Layout
    gpus: int
    gbs: int
    """Where a row gives none."""
    note: str


@lru_cache(KEPT)
def _layout(layers: int, fsdp2: bool, usual: int | None, *values: str | None) -> Laid | UserError:
    """Of the columns `LAYOUT`. A blank degree is 1; a blank batch follows from the others. A mistake is remembered."""
    row = {key: value or "" for key, value in zip(LAYOUT, values, strict=True)}
    try:
        tp, pp, cp, ep, mbs = (number(row, key, 1) or 1 for key in ("tp", "pp", "cp", "ep", "mbs"))
        vp, etp, dp = (number(row, key) for key in ("vp", "etp", "dp"))
        unit = tp * pp * cp
        gpus = number(row, "gpus") or usual or (unit * dp if dp else math.lcm(unit, ep * (etp or tp) * pp))
        batches = number(row, "num_microbatches") or (4 * pp if pp > 1 else 1)
        if dp and gpus not in (unit * dp, unit * dp * ep):  # some count the experts' data parallelism
            whole = f"tp {tp} x pp {pp} x cp {cp} x dp {dp} = {unit * dp}"
            raise Contradiction(f"{whole}, and gpus is {gpus}", "leave dp blank: it is what the GPUs leave over")
        vp = vp if vp and vp > 1 else None
        stages, note = _stages(pp * (vp or 1), layers)
        layout = Layout(
            **{"tp": tp, "pp": pp, "cp": cp, "ep": ep, "mbs": mbs},
            **stages,
            **_recompute(row),
            vp=vp if pp > 1 else None,
            etp=etp,
            sp=tp > 1 and "no SP" not in row["recompute"] and row["release"] != "vTrain",
            sharding="zero3" if row["fsdp"].strip() or fsdp2 else "zero1",
        )
    except UserError as mistake:
        return mistake
    return Laid(layout, gpus, mbs * max(1, gpus // unit) * batches, note)


def _stages(count: int, layers: int) -> tuple[Mapping[str, Any], str]:
    """The stages that Megatron users give when layers do not divide into so many chunks: no source prints them.

    The embedding and the loss count as layers where that makes the rest even; else the first and last chunks get less.
    With them, a sentence that says so.
    """
    if count > layers + 2:
        return {}, ""
    uneven = f"{layers} layers do not divide into {count} chunks; counted with "
    for ends in ENDS:
        if (layers + sum(ends)) % count == 0:
            names = [key for key, counts in zip(("embedding_as_layer", "loss_as_layer"), ends, strict=True) if counts]
            return dict.fromkeys(names, True), (uneven + " and ".join(names)) * bool(names)
    return {"chunks": near_even(layers, count)}, uneven + "chunks that differ by a layer"


def _recompute(row: Row) -> Mapping[str, Any]:
    """`full`, `selective mlp+core_attn`, `['mla_up_proj']`: granularity and modules."""
    text = (row.get("recompute") or "").lower()
    if "full" in text:
        return {"recompute": "full"}
    named = tuple(module for module in MODULES if re.search(rf"\b{module}\b", text)) if text else ()
    if named or "selective" in text:
        return {"recompute": "selective", "recompute_modules": named or ("core_attn",)}
    return {}


STEPS = (("mla_up_proj",), ("mla_up_proj", "mlp"), ("mla_up_proj", "mlp", "moe_act", "layernorm", "shared_experts"))
"""Recomputation of Megatron-Bridge's tuned recipes, by what it costs."""


def _recompute_as_needed(job: PlannedJob) -> PlannedJob:
    """The job with the cheapest recomputation under which it runs at all, where its table of releases prints none.

    Tuned recipes recompute what does not fit, and their tables do not say it. A run that fits as it is, or never,
    stays as it is.
    """
    from superpod.planner import memory

    try:
        return next((option for option in _with_recomputation(job) if memory.verdict(option) == "ok"), job)
    except UserError:
        return job  # its layout is illegal: legality says why


def _with_recomputation(job: PlannedJob) -> Iterator[PlannedJob]:
    """The job as it is, then with each of `STEPS` as far as the model and precision allow them, then with all of it."""
    yield job
    before = len(legality.violations(job))
    for step in STEPS:
        allowed = tuple(name for name in step if len(legality.violations(_selective(job, (name,)))) == before)
        if allowed:
            yield _selective(job, allowed)
    yield job.replace(layout=job.layout.replace(recompute="full"))


def _selective(job: PlannedJob, modules: tuple[str, ...]) -> PlannedJob:
    return job.replace(layout=job.layout.replace(recompute="selective", recompute_modules=modules))


def _task(row: Row) -> Any:
    task = (row.get("task") or "pretrain").strip().lower()
    if task not in ("pretrain", "sft", "lora"):
        raise Unsupported(f"no task is called {task!r}", "it is pretrain, sft or lora")
    return task


def _options(row: Row) -> Options:
    return _options_of(*(row.get(key) or "" for key in OPTIONS))


OPTIONS = ("release", "framework", "source", "unit", "task")
"""Columns that make a run's options."""


@cache
def _options_of(*values: str) -> Options:
    row: Row = dict(zip(OPTIONS, values, strict=True))
    if row["release"] == "vTrain":
        return Options(
            framework="deepspeed",
            hidden_dropout=0.1,
            attention_dropout=0.1,
            attention="unfused",
            impl="local",
            fused_loss=False,
            overlap_grads=False,
            overlap_params=False,
            overlap_tp=False,
        )
    release = spellings.release(row)
    if spellings.is_fsdp2(row):
        kind: dict[str, Any] = {"grads": "bf16", "moments": "bf16"} if "Automodel" in row["source"] else {}
        return Options(framework="fsdp2", release=release, fused_loss=False, **kind)
    own: dict[str, Any] = {"release": release, **spellings.options(row)}
    return Options(**own)
