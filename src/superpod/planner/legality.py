"""Check whether a job is legal: `violations` for one job, `legal_mask` for many layouts at once.

`rules.py` has the rules for a layout on a number of GPUs and for the partition of a model, `job_rules.py` those for
sequence, precision, recomputation and sharding. `warnings` are rules of thumb for legal jobs that are slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError, did_you_mean
from superpod.planner.layout import Layout
from superpod.planner.models.stages import Split, even_chunks
from superpod.planner.rules import job_rules, rules
from superpod.planner.rules.rules import JobInputs, Violation

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from superpod.planner.arrays import Column, Flags
    from superpod.planner.planned_job import PlannedJob


def violations(job: PlannedJob) -> list[Violation]:
    """Return a violation (message, nearest legal change) of each rule that the job violates; [] = legal."""
    if broken_sizes := job.layout.below_one():
        return broken_sizes
    inputs = _inputs(job)
    return [*rules.check_layout(inputs), *rules.check((*rules.MODEL, *job_rules.applicable_rules(job)), inputs)]


def warnings(job: PlannedJob) -> list[Violation]:
    """Return warnings about a legal job: slow GEMMs, bubbles, traffic outside NVLink, settings without effect."""
    from superpod.planner.rules.advice import ADVICE

    return [] if job.layout.below_one() else rules.check(ADVICE, _inputs(job))


def require(job: PlannedJob) -> None:
    """Check that the job is legal.

    Raises:
        UserError: the job is illegal; the message has one line per violated rule.
    """
    if broken_rules := violations(job):
        fixes = [broken.fix for broken in broken_rules if broken.fix]
        raise UserError("\n".join(broken.message for broken in broken_rules), "; ".join(dict.fromkeys(fixes)))


_LAYOUT_INDEPENDENT_RULES = (
    *("precision", "memory_cap", "attention_backend", "fp8_weights", "capped_window", "mla_attention"),
)


def layout_independent_violation(job: PlannedJob) -> Violation | None:
    """Return a violation that no other layout can fix, or None; the check uses the simplest layout, on one GPU."""
    simplest_job = job.replace(gpus=1, layout=Layout(gbs=1))
    broken_rules = {rule.rule: rule for rule in violations(simplest_job)}
    names = _LAYOUT_INDEPENDENT_RULES
    if not job.model.is_moe:  # dense models have no experts in any layout
        names = (*names, "overlap_experts")
    return next((broken_rules[name] for name in names if name in broken_rules), None)


FIELDS = (
    *("gpus", "dp", "tp", "pp", "vp", "cp", "ep", "etp", "sp", "mbs", "gbs"),
    *("recompute", "recompute_block", "recompute_layers", "modules", "sharding"),
    *("embedding_as_layer", "loss_as_layer"),
)
"""Columns that `legal_mask` accepts, as in `Columns`."""


def legal_mask(job: PlannedJob, fields: Mapping[str, ArrayLike], given_chunks: ArrayLike = False) -> Flags:
    """Return a mask of the legal layouts of a job, by the rules of `violations` applied to arrays.

    Args:
        job: the model, sequence, precision, hardware and options. Its layout provides the fields that are not in
            `fields`, except uneven stages and chunks: layers are partitioned evenly here.
        fields: columns in `FIELDS`, coded as in `Columns` (vp 1 = none; recompute 0 none, 1 selective, 2 full; modules
            a bit mask); arrays that broadcast, with sizes of at least 1. A column `dp` determines the number of GPUs.
        given_chunks: mask of the layouts with an explicit partition of the layers (`Layout.chunks`).

    Raises:
        UserError: `fields` contains an unknown column.
    """
    import numpy as np

    for name in fields:
        if name not in FIELDS:
            raise UserError(f"there is no column {name!r}", did_you_mean(name, list(FIELDS)))
    inputs = _inputs_of_many(job, {name: np.asarray(value) for name, value in fields.items()}, np.asarray(given_chunks))
    shape = np.broadcast_shapes(*(np.shape(value) for value in fields.values()))
    is_broken = np.zeros(shape, dtype=bool)
    for rule in (*rules.LAYOUT, *rules.MODEL, *job_rules.applicable_rules(job)):
        is_broken |= np.asarray(rule.is_broken(inputs), dtype=bool)
    return ~is_broken


def _inputs(job: PlannedJob) -> JobInputs:
    """Return the values that the rules check, for one job; its layers are partitioned if possible."""
    layout, chunks, why = job.layout, list[range](), ("", "")
    try:
        chunks = Split.from_layout(layout).chunk_layers(job.model.layers)
    except UserError as refused:
        why = (str(refused), refused.hint)
    degrees: dict[str, Any] = {**vars(layout.rule_inputs(job.gpus))}
    degrees["microbatch_group"] = job.options.microbatch_group
    return JobInputs(
        **degrees,
        both_ends=layout.first_layers is not None and layout.last_layers is not None,
        uneven=layout.is_uneven,
        unpartitionable=not chunks,
        last_empty=bool(chunks) and not chunks[-1],
        chunk_sizes=tuple({len(chunk) for chunk in chunks}),
        why_unpartitionable=why,
        model=job.model,
        job=job,
    )


def _inputs_of_many(job: PlannedJob, fields: dict[str, Column], given_chunks: Flags) -> JobInputs:
    """Return the arrays that the rules check, for many layouts; without chunks, layers are partitioned evenly."""
    import numpy as np

    layout_inputs = job.layout.rule_inputs(job.gpus)
    ends_count = {key: getattr(job.layout, key) for key in ("embedding_as_layer", "loss_as_layer")}
    layout_columns = {**vars(layout_inputs), **ends_count}
    get: dict[str, Any] = {name: fields.get(name, np.asarray(layout_columns.get(name, 1))) for name in FIELDS}
    if "dp" in fields:
        get["gpus"] = get["dp"] * get["tp"] * get["pp"] * get["cp"]
    if "etp" not in fields and job.layout.etp is None:
        get["etp"] = get["tp"]
    ends = [get.pop(name).astype(np.int64) for name in ("embedding_as_layer", "loss_as_layer")]
    evenly, sizes = even_chunks(job.model.layers, get["pp"], get["vp"], *ends)
    # Modules have no effect with full recomputation; in arrays, vp 1 stands for no interleaving.
    get["modules"] = np.where(get["recompute"] == 1, get["modules"], 0)
    get["interleaved"] = get["vp"] > 1
    del get["dp"]
    return JobInputs(
        **get,
        microbatch_group=job.options.microbatch_group,
        uneven=((ends[0] | ends[1]) == 1) | given_chunks,
        unpartitionable=~(evenly | given_chunks),
        last_empty=(ends[1] == 1) & (get["pp"] * get["vp"] == job.model.layers + ends[0] + 1) & ~given_chunks,
        chunk_sizes=sizes,
        model=job.model,
        job=job,
    )
