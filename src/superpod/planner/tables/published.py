"""Convert the rows of a table of runs to jobs. docs/planner.md lists the columns.

A blank cell means the usual value for the row's release (`releases.py`), else the planner's default. The row's id,
source and measured values are not used here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from superpod.errors import UserError, did_you_mean
from superpod.planner import hardware, legality, models
from superpod.planner.calibration import releases
from superpod.planner.formats import megatron_args, option_syntax
from superpod.planner.hardware import Hardware
from superpod.planner.layout import MAX_SIZE, MODULES, RECOMPUTES, Layout
from superpod.planner.models import ModelShape, named_model
from superpod.planner.models.stages import default_partition, partition_by_cost
from superpod.planner.planned_job import Options, PlannedJob
from superpod.planner.predict import Run

Row = Mapping[str, str]

DEFAULT_SEQ, DEFAULT_GPU = 4096, "h100"
"""Values of blank cells in the columns `seq` and `gpu`."""


class Unsupported(UserError):
    """The planner does not support the run that a row describes; the verdict is `unsupported`."""


class InconsistentRow(UserError):
    """The numbers in a row are invalid or inconsistent; the verdict is `illegal`."""


@dataclass(frozen=True, eq=False)
class Facts:
    """The hardware and model names that rows can use. A table uses one object, which is part of the cache keys."""

    hardware: Hardware
    translate: Callable[[str], str] = str
    """Returns the name of the model that a text means, such as `llama3_8b` for `Llama-3-8B`."""


@lru_cache(1)
def builtin() -> Facts:
    """Return the facts of the built-in hardware, without translation of model names."""
    return Facts(hardware.builtin())


def label(row: Row) -> str:
    """Describe a row for messages: model, GPUs, and the end of the path of its source."""
    source = "/".join(re.sub(r"@[0-9a-f]*", "", row.get("source") or "").split("/")[-2:])
    return f"{row.get('model')} on {row.get('gpus') or '?'} {row.get('gpu') or 'unnamed GPUs'}, {source}"


def job(row: Row, facts: Facts | None = None) -> PlannedJob:
    """Return the job that a row describes. Raises UserError if the row is invalid; see `run`."""
    return run(row, facts).job


def run(row: Row, facts: Facts | None = None) -> Run:
    """Return the run that a row describes; values that many rows share are parsed once.

    Raises:
        Unsupported: the planner does not support the model, GPU or precision.
        InconsistentRow: a number is invalid, or parallel degrees or batch sizes are inconsistent.
        UserError: an option, a layout or a Megatron-LM argument is invalid.
    """
    parsed_run = _parse_run(row, facts)
    _check_micro_batches(row, parsed_run)
    if parsed_run.gbs > MAX_SIZE:  # `Layout` checks the other sizes
        hint = "correct gbs, or mbs and num_microbatches if gbs is blank"
        raise InconsistentRow(f"gbs must be at most {MAX_SIZE:,}, not {parsed_run.gbs:,}", hint)
    return parsed_run


def _parse_run(row: Row, facts: Facts | None) -> Run:
    # Most tables have no such column.
    shape = () if _SHAPE.isdisjoint(row) else tuple([(key, row[key]) for key in SHAPE if row.get(key)])
    shared = _cached_shared(facts or builtin(), shape, *map(row.get, SHARED))
    if isinstance(shared, UserError):
        raise shared.with_traceback(None)
    parsed_layout = _cached_layout(shared.setting.model.layers, *map(row.get, LAYOUT))
    if isinstance(parsed_layout, UserError):
        raise parsed_layout.with_traceback(None)
    gbs = whole_number(row, "gbs")
    layout, gpus, default_gbs, note, as_needed = parsed_layout
    if shared.by_cost and layout.pp > 1 and layout.vp is None and "chunks" not in (row.get("layout") or ""):
        layout, note = _partition_by_cost(shared.setting.model, layout), ""
    parsed_run = Run(shared.setting, layout, gpus, gbs or default_gbs, note)
    recomputes_as_needed = as_needed or (shared.tuned and not (row.get("recompute") or "").strip())
    if not shared.arguments and not recomputes_as_needed:
        return parsed_run
    job = parsed_run.job
    if shared.arguments:
        job = megatron_args.apply(job, shared.arguments)[0]
    if recomputes_as_needed:
        job = _recompute_as_needed(job)
    if _partition_fields(job.layout) != _partition_fields(layout):
        note = ""
    return Run.from_job(job)._replace(note=note, **({} if shared.arguments else {"setting": shared.setting}))


def _check_micro_batches(row: Row, parsed_run: Run) -> None:
    """Raise InconsistentRow unless num_microbatches x mbs x dp of the row is its global batch size."""
    micro_batches, layout = whole_number(row, "num_microbatches"), parsed_run.layout
    if not micro_batches or layout.below_one() or parsed_run.gpus % layout.model_parallel:
        return  # `legality` reports degrees that do not match the GPUs
    dp = parsed_run.gpus // layout.model_parallel
    samples = micro_batches * layout.mbs * dp
    if samples != parsed_run.gbs:
        product = f"num_microbatches {micro_batches} x mbs {layout.mbs} x dp {dp} = {samples:,}"
        hint = "correct gbs, or leave num_microbatches blank"
        raise InconsistentRow(f"{product}, but gbs is {parsed_run.gbs:,}", hint)


def _partition_fields(x: Layout) -> tuple[object, ...]:
    """Return the fields that partition the layers into stages."""
    return (x.pp, x.vp, x.chunks, x.embedding_as_layer, x.loss_as_layer, x.first_layers, x.last_layers)


SHARED = ("release", "framework", "task", "flags", "options", "model", "gpu", "precision", "seq")
"""Columns that determine the setting of a run, in addition to those in `SHAPE`."""
SHAPE = tuple(f.name for f in fields(ModelShape) if f.name not in ("name", "approximate", "source"))
"""Columns that define a model, or change a named model."""
_SHAPE = frozenset(SHAPE)
LAYOUT = (
    *("tp", "pp", "vp", "cp", "ep", "etp", "dp", "mbs", "num_microbatches", "gpus"),
    *("fsdp", "recompute", "layout", "framework", "release"),
)
"""Columns that determine a layout, except gbs."""
COLUMNS = ("id", *SHARED, *SHAPE, *LAYOUT, "gbs")
"""All known columns."""
CACHE_SIZE = 2**14
"""Maximum number of cached settings and layouts."""


class Shared(NamedTuple):
    """The values that rows share if they differ only in their layout."""

    setting: PlannedJob
    arguments: Mapping[str, str]
    """Megatron-LM arguments."""
    tuned: bool
    """Whether the runs recompute as much as they need to fit if the column `recompute` is blank."""
    by_cost: bool
    """Whether layers are partitioned by parameters (`stages.partition_by_cost`)."""


@lru_cache(CACHE_SIZE)
def _cached_shared(facts: Facts, shape: tuple[tuple[str, str], ...], *values: str | None) -> Shared | UserError:
    """Parse the columns in `SHAPE` and `SHARED`. Errors are returned instead of raised, so that they are cached."""
    row = {key: (value or "").strip() for key, value in zip(SHARED, values, strict=True)} | dict(shape)
    try:
        options = _parse_options(row)
        arguments = megatron_args.parse(row["flags"])
        model = _find_model(row, facts.translate)
        setting = _build_setting(row, model, options, facts.hardware)
    except InconsistentRow as inconsistent:
        return inconsistent
    except CellSyntaxError as wrong:
        return UserError(str(wrong), wrong.hint)
    except UserError as unknown:
        return Unsupported(str(unknown), unknown.hint)
    release = releases.find(row["framework"], row["release"])
    return Shared(setting, arguments, release.tuned, release.by_cost)


class CellSyntaxError(UserError):
    """A cell with its own syntax (`options`, `layout`, `flags`) cannot be parsed."""


def _build_setting(row: Row, model: ModelShape, options: Options, facts: Hardware) -> PlannedJob:
    """Return the job that a row describes, without its layout and GPUs."""
    node = hardware.pick(facts.nodes, facts.gpu_name(row["gpu"] or DEFAULT_GPU), "GPU")
    precision = hardware.precision(row["precision"] or "bf16")
    if precision == "fp8" and node.gpu.fp8_tflops:
        precision = releases.fp8_kind(row["release"])
    if options.fp8_params and precision in hardware.PLAIN and "fp8_params" not in row["options"]:
        options = replace(options, fp8_params=False)  # the release's default applies only to FP8
    return PlannedJob(
        model=model,
        node=node,
        fabric=facts.fabric_of(node),
        gpus=1,
        seq=whole_number(row, "seq") or DEFAULT_SEQ,
        precision=precision,
        layout=Layout(),
        task=_parse_task(row),
        options=options,
    )


def one_line(wrong: UserError) -> str:
    """Return the message and the hint of an error as one line, for a cell of a table."""
    return f"{wrong}; {wrong.hint}" if wrong.hint else str(wrong)


def strip_thousands_separators(text: str) -> str:
    """Remove the commas from `1,024.5`. Other commas stay, so that `6,0`, which may mean 6.0, is invalid."""
    return text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", text) else text


def whole_number(row: Row, key: str, default: int | None = None) -> int | None:
    """Return a positive integer from a row, or `default` if the cell is blank; `128k` is 131,072.

    Raises:
        InconsistentRow: the cell is not a positive integer.
    """
    text = strip_thousands_separators((row.get(key) or "").strip())
    if not text:
        return default
    if text.isascii() and text.isdigit() and len(text) < 12 and (number := int(text)):
        return number
    if match := re.fullmatch(r"(\d{1,9})k", text.lower()):
        return int(match[1]) * 1024
    try:
        value = float(text)
    except ValueError:
        raise InconsistentRow(f"{key} must be an integer, not {text!r}") from None
    if value != value or value in (float("inf"), float("-inf")) or value != int(value) or not 0 < value < 2**40:
        raise InconsistentRow(f"{key} must be an integer of at least 1, not {text}")
    return int(value)


def _find_model(row: Row, translate: Callable[[str], str]) -> ModelShape:
    """Return the model of a row, changed by its shape columns; the models `gpt` and `moe` have only these."""
    name = row["model"]
    shape = {key: _parse_shape_value(row, key) for key in SHAPE if row.get(key, "").strip()}
    if name in ("gpt", "moe"):
        shape_fields = {"layers": 0, "vocab": 50257, "positions": 1024, **shape}
        return ModelShape.from_shape(name=name, style="gpt", **shape_fields)
    model = models.find(name) if name in models.names() else named_model.find(translate(name))
    changes = {key: value for key, value in shape.items() if value != getattr(model, key)}
    return model.replace(**changes) if changes else model


def _parse_shape_value(row: Row, key: str) -> Any:
    """Return the value of a shape column in the type of its field; sizes are integers of at least 0."""
    default = DEFAULTS.get(key, 0)
    text = row[key].strip()
    if isinstance(default, bool):
        if text.lower() not in ("true", "false", "1", "0"):
            raise InconsistentRow(f"{key} must be true or false, not {text!r}")
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
    """The layout of a row; its global batch size is not set."""

    layout: Layout
    gpus: int
    gbs: int
    """Global batch size if the row has none."""
    note: str
    as_needed: bool
    """Whether the run recomputes as much as it needs to fit in memory."""


@lru_cache(CACHE_SIZE)
def _cached_layout(layers: int, *values: str | None) -> ParsedLayout | UserError:
    """Parse the columns in `LAYOUT`. Errors are returned instead of raised, so that they are cached."""
    row = {key: (value or "").strip() for key, value in zip(LAYOUT, values, strict=True)}
    try:
        return _parse_layout(layers, row)
    except UserError as mistake:
        return mistake


def _parse_layout(layers: int, row: Row) -> ParsedLayout:
    """Parse the columns in `LAYOUT`. A blank degree is 1; the batch size follows from the other columns."""
    tp, pp, cp, ep, mbs = (whole_number(row, key, 1) or 1 for key in ("tp", "pp", "cp", "ep", "mbs"))
    vp, etp, dp = (whole_number(row, key) for key in ("vp", "etp", "dp"))
    usual_layout = releases.find(row["framework"], row["release"]).layout
    etp = etp or usual_layout.get("etp")
    unit = tp * pp * cp
    gpus = whole_number(row, "gpus") or (unit * dp if dp else math.lcm(unit, ep * (etp or tp) * pp))
    batches = whole_number(row, "num_microbatches") or (4 * pp if pp > 1 else 1)
    if dp and gpus not in (unit * dp, unit * dp * ep):  # in some tables, dp is the expert data-parallel size
        product = f"tp {tp} x pp {pp} x cp {cp} x dp {dp} = {unit * dp}"
        raise InconsistentRow(f"{product}, but gpus is {gpus}", "correct gpus, or leave dp blank")
    # A row with a framework or release was trained: NeMo ignores vp if pp is 1, and recipes may have uneven stages
    # that their tables do not show. All other rows are planned exactly as specified.
    has_trained = bool(row["framework"] or row["release"])
    vp = vp if vp and vp > 1 and not (has_trained and pp == 1) else None
    stages, note = default_partition(layers, pp, vp or 1, has_trained=has_trained)
    layout = Layout(
        **{"tp": tp, "pp": pp, "cp": cp, "ep": ep, "mbs": mbs},
        **stages,
        **_parse_recompute(row),
        vp=vp,
        etp=etp,
        sp=tp > 1 and usual_layout.get("sp", True),
        sharding="zero3" if _parse_fsdp(row) else usual_layout.get("sharding", "zero1"),
    )
    if row["layout"]:
        layout, note = _apply_layout_column(layout, row["layout"]), ""
    gbs = layout.mbs * max(1, gpus // layout.model_parallel) * batches
    return ParsedLayout(layout, gpus, gbs, note, row["recompute"].lower() == "auto")


@lru_cache(CACHE_SIZE)
def _partition_by_cost(model: ModelShape, layout: Layout) -> Layout:
    """Return the layout with the stages of a framework that partitions layers by parameters (`releases.py`)."""
    layer_cost = 4 * model.heads * model.channels * model.hidden + 3 * model.ffn * model.hidden
    chunks = partition_by_cost(model.layers, layout.pp, model.vocab * model.hidden / layer_cost)
    return layout.replace(chunks=chunks, embedding_as_layer=False, loss_as_layer=False)


def _apply_layout_column(layout: Layout, text: str) -> Layout:
    """Return the layout with the `layout` column (syntax of `--layout`) applied; its stages replace default ones."""
    given_fields = option_syntax.parse_layout(text, "layout")
    if "chunks" in given_fields or {"first_layers", "last_layers"} & set(given_fields):
        layout = layout.replace(chunks=None, embedding_as_layer=False, loss_as_layer=False)
    if {"embedding_as_layer", "loss_as_layer"} & set(given_fields):
        layout = layout.replace(chunks=None)
    return option_syntax.change_layout(layout, text, "layout")


def _parse_fsdp(row: Row) -> bool:
    """Return whether the column `fsdp` is true or a number of GPUs."""
    text = row["fsdp"].lower()
    if text in ("", "0", "false"):
        return False
    if text == "true" or whole_number(row, "fsdp"):
        return True
    raise InconsistentRow(f"fsdp must be true, false or a number of GPUs, not {text!r}")


RECOMPUTE_IN_PUBLISHED_TABLES = {
    **{"selective ac": "selective", "selective + sequence parallel": "selective", "full ac": "full"},
    **{"default": "none", "baseline": "none"},
    **{"sequence_parallel_input_regather": "none", "lora sp input re-gather": "none"},
}
"""Text in published tables -> value of the column `recompute`."""


def _parse_recompute(row: Row) -> Mapping[str, Any]:
    """Parse the column `recompute` (`full`, `selective mlp+core_attn`, `['mla_up_proj']`) to fields of `Layout`.

    Raises:
        InconsistentRow: a word is unknown, or modules are not combined with `selective`.
    """
    text = row["recompute"].lower()
    words = re.findall(r"[^\s+,;\[\]()'\"]+", RECOMPUTE_IN_PUBLISHED_TABLES.get(text, text))
    granularities = [word for word in words if word not in MODULES]
    for word in granularities:
        if word not in RECOMPUTE_WORDS:
            hint = did_you_mean(word, [*RECOMPUTE_WORDS, *MODULES]) or f"the modules are {', '.join(MODULES)}"
            rule = f"recompute must be {', '.join(RECOMPUTE_WORDS)}, or modules such as mlp+core_attn"
            raise InconsistentRow(f"{rule}, not {word!r}", hint)
    named_modules = tuple(module for module in MODULES if module in words)
    if len(granularities) > 1 or (named_modules and granularities not in ([], ["selective"])):
        rule = f"recompute must be one of {', '.join(RECOMPUTE_WORDS)}, and only selective has modules"
        raise InconsistentRow(f"{rule}, not {row['recompute']!r}")
    if named_modules or granularities == ["selective"]:
        return {"recompute": "selective", "recompute_modules": named_modules or ("core_attn",)}
    return {"recompute": "full"} if granularities == ["full"] else {}


RECOMPUTE_WORDS = (*RECOMPUTES, "auto")


STEPS = (("mla_up_proj",), ("mla_up_proj", "mlp"), ("mla_up_proj", "mlp", "moe_act", "layernorm", "shared_experts"))
"""Recomputed modules in Megatron-Bridge's tuned recipes, the cheapest first."""


def _recompute_as_needed(job: PlannedJob) -> PlannedJob:
    """Return the job with the cheapest recomputation with which it fits; unchanged if it fits without, or never.

    It is used if `recompute` is auto, or blank for a release whose tuned recipes recompute.
    """
    from superpod.planner import memory

    try:
        return next((option for option in _with_recomputation(job) if memory.fit(option) != "does not fit"), job)
    except UserError:
        return job  # the layout is illegal; `legality` explains why


def _with_recomputation(job: PlannedJob) -> Iterator[PlannedJob]:
    """Yield the job without changes, with the supported modules of each of `STEPS`, and with full recomputation."""
    yield job
    before = len(legality.violations(job))
    for step in STEPS:
        allowed = tuple(name for name in step if len(legality.violations(_with_selective(job, (name,)))) == before)
        if allowed:
            yield _with_selective(job, allowed)
    yield job.replace(layout=job.layout.replace(recompute="full"))


def _with_selective(job: PlannedJob, modules: tuple[str, ...]) -> PlannedJob:
    return job.replace(layout=job.layout.replace(recompute="selective", recompute_modules=modules))


def _parse_task(row: Row) -> Any:
    """Return the task of a row; blank = pretrain."""
    task = (row["task"] or "pretrain").lower()
    if task not in ("pretrain", "sft", "lora"):
        raise Unsupported(f"there is no task {task!r}", "use pretrain, sft or lora")
    return task


def _parse_options(row: Row) -> Options:
    """Return the usual options of the row's release, changed by its `options` column (syntax of `--option`)."""
    usual: dict[str, Any] = dict(releases.find(row["framework"], row["release"]).options)
    options = Options(release=releases.normalize(row["release"]), **usual)
    try:
        return option_syntax.change_options(options, [row["options"]], "options") if row["options"] else options
    except UserError as wrong:
        raise CellSyntaxError(str(wrong), wrong.hint) from wrong
