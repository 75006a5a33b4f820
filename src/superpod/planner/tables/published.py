"""Rows of a table of runs as jobs: the columns of docs/planner.md, their spellings, blanks and contradictions.

A blank means what is usual for the row's release (`releases.py`), else the planner's default. Nothing here looks at a
row's id, at where it came from, or at its measured figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from superpod.errors import UserError
from superpod.planner import hardware, legality, models
from superpod.planner.formats import megatron_args, option_syntax
from superpod.planner.hardware import Hardware
from superpod.planner.layout import MODULES, Layout
from superpod.planner.models import ModelShape, named_model
from superpod.planner.models.stages import default_partition, partition_by_cost
from superpod.planner.planned_job import Options, PlannedJob
from superpod.planner.predict import Run
from superpod.planner.tables import releases

Row = Mapping[str, str]

SEQ, GPU = 4096, "h100"
"""Of a row that gives none."""


class Unsupported(UserError):
    """A row that the planner has no model for: the verdict is `unsupported`."""


class Contradiction(UserError):
    """A row whose own numbers cannot be: the verdict is `illegal`."""


@dataclass(frozen=True, eq=False)
class Facts:
    """The hardware that rows name. One object for a table: what its rows have in common is remembered by it."""

    hardware: Hardware


@lru_cache(1)
def builtin() -> Facts:
    """The hardware that is built in."""
    return Facts(hardware.builtin())


def label(row: Row) -> str:
    """A row in words that a reader can look up: model, GPUs, and the end of its source's path."""
    source = "/".join(re.sub(r"@[0-9a-f]*", "", row.get("source") or "").split("/")[-2:])
    return f"{row.get('model')} on {row.get('gpus') or '?'} {row.get('gpu') or 'unnamed GPUs'}, {source}"


def job(row: Row, facts: Facts | None = None) -> PlannedJob:
    """The run that a row describes. Raises as `run`."""
    return run(row, facts).job


def run(row: Row, facts: Facts | None = None) -> Run:
    """The run that a row describes; what most rows of a table have in common is read once.

    Raises:
        Unsupported: no such model, GPU or precision here.
        Contradiction: a number that is none, or degrees that cannot be.
        UserError: an option, a layout or an argument of Megatron-LM that cannot be.
    """
    shape = tuple([(key, row[key]) for key in SHAPE if row.get(key)])
    shared = _shared(facts or builtin(), shape, *map(row.get, SHARED))
    if isinstance(shared, UserError):
        raise shared.with_traceback(None)
    laid = _layout(shared.setting.model.layers, *map(row.get, LAYOUT))
    if isinstance(laid, UserError):
        raise laid.with_traceback(None)
    gbs = whole_number(row, "gbs")
    if shared.by_cost and laid.layout.pp > 1 and laid.layout.vp is None and "chunks" not in (row.get("layout") or ""):
        laid = _by_cost(shared.setting.model, laid)
    described = Run(shared.setting, laid.layout, laid.gpus, gbs or laid.gbs, laid.note)
    tuned = laid.as_needed or (shared.tuned and not (row.get("recompute") or "").strip())
    if not shared.arguments and not tuned:
        return described
    whole = described.job
    if shared.arguments:
        whole = megatron_args.apply(whole, shared.arguments)[0]
    if tuned:
        whole = _recompute_as_needed(whole)
    note = "" if _stages_of(whole.layout) != _stages_of(laid.layout) else laid.note
    return Run.from_job(whole)._replace(note=note, **({} if shared.arguments else {"setting": shared.setting}))


def _stages_of(x: Layout) -> tuple[object, ...]:
    return (x.pp, x.vp, x.chunks, x.embedding_as_layer, x.loss_as_layer, x.first_layers, x.last_layers)


SHARED = ("release", "framework", "task", "flags", "options", "model", "gpu", "precision", "seq")
"""Columns that make a run's setting, beside those of `SHAPE`."""
SHAPE = tuple(f.name for f in fields(ModelShape) if f.name not in ("name", "approximate", "source"))
"""Columns that make a model, or change a named one."""
LAYOUT = (
    *("tp", "pp", "vp", "cp", "ep", "etp", "dp", "mbs", "num_microbatches", "gpus"),
    *("fsdp", "recompute", "layout", "framework", "release"),
)
"""Columns that make a layout, but for gbs."""
COLUMNS = ("id", *SHARED, *SHAPE, *LAYOUT, "gbs")
"""All that is read of a row."""
KEPT = 2**14
"""Settings and layouts remembered."""


class Shared(NamedTuple):
    """What rows have in common that differ in their layout only."""

    setting: PlannedJob
    arguments: Mapping[str, str]
    """Of Megatron-LM."""
    tuned: bool
    """Whether its runs recompute what they need to, and do not say so."""
    by_cost: bool
    """Whether layers are partitioned by their cost."""


@lru_cache(KEPT)
def _shared(facts: Facts, shape: tuple[tuple[str, str], ...], *values: str | None) -> Shared | UserError:
    """Of the columns `SHAPE` and `SHARED`; a mistake is remembered too."""
    row = {key: (value or "").strip() for key, value in zip(SHARED, values, strict=True)} | dict(shape)
    try:
        options = _options(row)
        arguments = megatron_args.parse(row["flags"])
        model = _model(row)
        setting = _setting(row, model, options, facts.hardware)
    except Contradiction as cannot_be:
        return cannot_be
    except WrongText as wrong:
        return UserError(str(wrong), wrong.hint)
    except UserError as unknown:
        return Unsupported(str(unknown), unknown.hint)
    release = releases.find(row["framework"], row["release"])
    return Shared(setting, arguments, release.tuned, release.by_cost)


class WrongText(UserError):
    """A cell in a language of its own (`options`, `layout`, `flags`) that does not say what it means."""


def _setting(row: Row, model: ModelShape, options: Options, facts: Hardware) -> PlannedJob:
    node = hardware.pick(facts.nodes, facts.gpu_name(row["gpu"] or GPU), "GPU")  # the column's word, for messages
    precision = hardware.precision(row["precision"] or "bf16")
    if precision == "fp8" and node.gpu.fp8_tflops:
        precision = releases.fp8_kind(row["release"])
    if options.fp8_params and precision in hardware.PLAIN and "fp8_params" not in row["options"]:
        options = replace(options, fp8_params=False)  # a release's habit, where there is FP8
    return PlannedJob(
        model=model,
        node=node,
        fabric=facts.fabric_of(node),
        gpus=1,
        seq=whole_number(row, "seq") or SEQ,
        precision=precision,
        layout=Layout(),
        task=_task(row),
        options=options,
    )


def one_line(wrong: UserError) -> str:
    """What is wrong with a row and what to write there: a table has one cell, or one line, for both."""
    return f"{wrong}; {wrong.hint}" if wrong.hint else str(wrong)


def strip_thousands_separators(text: str) -> str:
    """`1,024.5` without its commas. Others stay, and make it no number: `6,0` is six where commas are points."""
    return text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", text) else text


def whole_number(row: Row, key: str, default: int | None = None) -> int | None:
    """A whole number of a row, or `default` where it is blank; `128k` is 131,072, or 128,000 for anything but powers.

    Raises:
        Contradiction: when it is something else, or not above 0.
    """
    text = strip_thousands_separators((row.get(key) or "").strip())
    if not text:
        return default
    if text.isascii() and text.isdigit() and len(text) < 12 and (whole := int(text)):
        return whole
    if match := re.fullmatch(r"(\d{1,9})k", text.lower()):
        return int(match[1]) * 1024
    try:
        value = float(text)
    except ValueError:
        raise Contradiction(f"{key} must be a whole number, not {text!r}") from None
    if value != value or value in (float("inf"), float("-inf")) or value != int(value) or not 0 < value < 2**40:
        raise Contradiction(f"{key} must be a whole number of 1 or more, not {text}")
    return int(value)


def _model(row: Row) -> ModelShape:
    """A model as `plan` takes it, changed by the row's shape; `gpt` and `moe` by the row's own shape alone."""
    name = row["model"]
    shape = {key: _shape_value(row, key) for key in SHAPE if row.get(key, "").strip()}
    if name in ("gpt", "moe"):
        whole = {"layers": 0, "vocab": 50257, "positions": 1024, **shape}
        return ModelShape.from_shape(name=name, style="gpt", **whole)
    model = models.find(name) if name in models.names() else named_model.find(name)
    changes = {key: value for key, value in shape.items() if value != getattr(model, key)}
    return model.replace(**changes) if changes else model


def _shape_value(row: Row, key: str) -> Any:
    """A cell of a shape, of its field's type; sizes are numbers above 0, but for those that say `0`."""
    default = DEFAULTS.get(key, 0)
    text = row[key].strip()
    if isinstance(default, bool):
        if text.lower() not in ("true", "false", "1", "0"):
            raise Contradiction(f"{key} must be true or false, not {text!r}")
        return text.lower() in ("true", "1")
    if isinstance(default, str):
        return text
    if text == "0":
        return 0
    if key == "vocab":
        return whole_number({key: re.sub(r"k$", "000", text.lower())}, key)
    return whole_number(row, key)


DEFAULTS = {f.name: f.default for f in fields(ModelShape) if isinstance(f.default, (bool, int, str))}


class ParsedLayout(NamedTuple):
    """A layout without its batch."""

    layout: Layout
    gpus: int
    gbs: int
    """Where a row gives none."""
    note: str
    as_needed: bool
    """Whether it recomputes what it has to."""


@lru_cache(KEPT)
def _layout(layers: int, *values: str | None) -> ParsedLayout | UserError:
    """Of the columns `LAYOUT`. A blank degree is 1; a blank batch follows from the others. A mistake is remembered."""
    row = {key: (value or "").strip() for key, value in zip(LAYOUT, values, strict=True)}
    try:
        return _laid(layers, row)
    except UserError as mistake:
        return mistake


def _laid(layers: int, row: Row) -> ParsedLayout:
    tp, pp, cp, ep, mbs = (whole_number(row, key, 1) or 1 for key in ("tp", "pp", "cp", "ep", "mbs"))
    vp, etp, dp = (whole_number(row, key) for key in ("vp", "etp", "dp"))
    usual = releases.find(row["framework"], row["release"]).layout
    etp = etp or usual.get("etp")
    unit = tp * pp * cp
    gpus = whole_number(row, "gpus") or (unit * dp if dp else math.lcm(unit, ep * (etp or tp) * pp))
    batches = whole_number(row, "num_microbatches") or (4 * pp if pp > 1 else 1)
    if dp and gpus not in (unit * dp, unit * dp * ep):  # some count the experts' data parallelism
        whole = f"tp {tp} x pp {pp} x cp {cp} x dp {dp} = {unit * dp}"
        raise Contradiction(f"{whole}, but gpus is {gpus}", "leave dp blank: it follows from gpus")
    # A row that names its framework or release has trained: NeMo drops vp where pp is 1, and recipes deal layers out
    # unevenly, and their tables do not print it. Any other row is judged as it is written.
    has_trained = bool(row["framework"] or row["release"])
    vp = vp if vp and vp > 1 and not (has_trained and pp == 1) else None
    stages, note = default_partition(layers, pp, vp or 1, has_trained=has_trained)
    layout = Layout(
        **{"tp": tp, "pp": pp, "cp": cp, "ep": ep, "mbs": mbs},
        **stages,
        **_recompute(row),
        vp=vp,
        etp=etp,
        sp=tp > 1 and usual.get("sp", True),
        sharding="zero3" if row["fsdp"] not in ("", "0") else usual.get("sharding", "zero1"),
    )
    if row["layout"]:
        layout, note = _changed(layout, row["layout"]), ""
    return ParsedLayout(layout, gpus, mbs * max(1, gpus // unit) * batches, note, row["recompute"].lower() == "auto")


@lru_cache(KEPT)
def _by_cost(model: ModelShape, laid: ParsedLayout) -> ParsedLayout:
    """The stages of a framework that partitions layers by their parameters (`releases.py`)."""
    own = 4 * model.heads * model.channels * model.hidden + 3 * model.ffn * model.hidden
    chunks = partition_by_cost(model.layers, laid.layout.pp, model.vocab * model.hidden / own)
    return laid._replace(
        layout=laid.layout.replace(chunks=chunks, embedding_as_layer=False, loss_as_layer=False), note=""
    )


def _changed(layout: Layout, text: str) -> Layout:
    """The layout as a row's `layout` column changes it, which `--layout` reads; stages that it gives replace others."""
    given = option_syntax.parse_layout(text, "layout")
    if "chunks" in given or {"first_layers", "last_layers"} & set(given):
        layout = layout.replace(chunks=None, embedding_as_layer=False, loss_as_layer=False)
    if {"embedding_as_layer", "loss_as_layer"} & set(given):
        layout = layout.replace(chunks=None)
    return option_syntax.change_layout(layout, text, "layout")


def _recompute(row: Row) -> Mapping[str, Any]:
    """`full`, `selective mlp+core_attn`, `['mla_up_proj']`: granularity and modules."""
    text = row["recompute"].lower()
    if "full" in text:
        return {"recompute": "full"}
    named = tuple(module for module in MODULES if re.search(rf"\b{module}\b", text)) if text else ()
    if named or "selective" in text:
        return {"recompute": "selective", "recompute_modules": named or ("core_attn",)}
    return {}


STEPS = (("mla_up_proj",), ("mla_up_proj", "mlp"), ("mla_up_proj", "mlp", "moe_act", "layernorm", "shared_experts"))
"""Recomputation of Megatron-Bridge's tuned recipes, by what it costs."""


def _recompute_as_needed(job: PlannedJob) -> PlannedJob:
    """The job with the cheapest recomputation under which it runs at all: `recompute` is auto, or its release's tuned
    recipes recompute what does not fit and their tables do not say it. A run that fits as it is, or never, stays so.
    """
    from superpod.planner import memory

    try:
        return next((option for option in _with_recomputation(job) if memory.fit(option) != "does not fit"), job)
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
    task = (row["task"] or "pretrain").lower()
    if task not in ("pretrain", "sft", "lora"):
        raise Unsupported(f"there is no task {task!r}", "use pretrain, sft or lora")
    return task


def _options(row: Row) -> Options:
    """What is usual for the row's release, changed by its `options`, which `--option` reads."""
    fine_tunes = row["task"].lower() not in ("", "pretrain")
    usual: dict[str, Any] = dict(releases.find(row["framework"], row["release"]).options)
    options = Options(release=releases.normalize(row["release"], fine_tunes), **usual)
    try:
        return option_syntax.change_options(options, [row["options"]], "options") if row["options"] else options
    except UserError as wrong:
        raise WrongText(str(wrong), wrong.hint) from wrong
