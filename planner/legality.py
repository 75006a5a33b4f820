"""Whether a job is legal, and every rule it breaks: `violations` of one job, `legal_mask` of many layouts at once.

The tables of `rules.py` say what a layout must keep on so many GPUs and how a model divides; the tables here what
sequence, precision, recomputation and sharding ask for besides. `warnings` are rules of thumb: legal, but slow or idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from superpod.planner import rules
from superpod.planner.errors import UserError, did_you_mean
from superpod.planner.models.stages import Split, even_chunks
from superpod.planner.rules import Broken, Facts, Rule, near_multiples

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from superpod.planner.job import Job

FP8 = ("fp8", "fp8ds", "fp8cs", "fp8bw", "mxfp8")


def violations(job: Job) -> list[Broken]:
    """Every rule that the job breaks, with the numbers and the nearest legal change; [] = legal."""
    if found := job.layout.below_one():
        return found
    facts = _facts(job)
    return [*rules.layout(facts), *rules.check((*rules.MODEL, *_job_rules(job)), facts)]


def warnings(job: Job) -> list[Broken]:
    """What a legal job does badly: slow products, bubbles, traffic that leaves NVLink, settings without effect."""
    from superpod.planner.advice import ADVICE

    return [] if job.layout.below_one() else rules.check(ADVICE, _facts(job))


def require(job: Job) -> None:
    """Do nothing when the job is legal.

    Raises:
        UserError: with every broken rule, a line each.
    """
    if found := violations(job):
        moves = [broken.fix for broken in found if broken.fix]
        raise UserError("\n".join(broken.message for broken in found), "; ".join(dict.fromkeys(moves)))


FIELDS = (
    *("gpus", "dp", "tp", "pp", "vp", "cp", "ep", "etp", "sp", "mbs", "gbs"),
    *("recompute", "recompute_block", "recompute_layers", "modules", "sharding"),
    *("embedding_as_layer", "loss_as_layer"),
)
"""Columns that `legal_mask` takes, as in `Columns`."""


def legal_mask(job: Job, fields: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Which of many layouts of one job are legal: the same rules as `violations`, over arrays.

    Args:
        job: the model, sequence, precision, hardware and options; its layout gives what `fields` leaves out, but for
            uneven stages and chunks: layers are dealt evenly here.
        fields: columns of `FIELDS`, coded as in `Columns` (vp 1 = none; recompute 0 none, 1 selective, 2 full; modules
            a bit mask), arrays that broadcast, every number 1 or more. With `dp` the GPUs follow from it.

    Raises:
        UserError: on an unknown column.
    """
    import numpy as np

    for name in fields:
        if name not in FIELDS:
            raise UserError(f"no column is called {name!r}", did_you_mean(name, list(FIELDS)))
    facts = _many(job, {name: np.asarray(value) for name, value in fields.items()})
    shape = np.broadcast_shapes(*(np.shape(value) for value in fields.values()))
    broken = np.zeros(shape, dtype=bool)
    for rule in (*rules.LAYOUT, *rules.MODEL, *_job_rules(job)):
        broken |= np.asarray(rule.broken(facts), dtype=bool)
    return ~broken


def _facts(job: Job) -> Facts:
    """The job as the rules ask about it, its layers dealt out if they can be."""
    layout, sizes, why = job.layout, (), ("", "")
    uneven = layout.embedding_as_layer or layout.loss_as_layer or layout.chunks is not None
    uneven = uneven or layout.first_layers is not None or layout.last_layers is not None
    try:
        sizes = tuple({len(chunk) for chunk in Split.of(layout).chunk_layers(job.model.layers)})
    except UserError as refused:
        why = (str(refused), refused.hint)
    dealt = {"uneven": uneven, "undealt": not sizes, "chunk_sizes": sizes, "why_undealt": why}
    return layout.facts(job.gpus, **dealt, model=job.model, job=job)


def _many(job: Job, fields: dict[str, NDArray[Any]]) -> Facts:
    """As `_facts`, of many layouts that deal their layers evenly."""
    import numpy as np

    own = job.layout.facts(job.gpus)
    one = {**vars(own), "embedding_as_layer": job.layout.embedding_as_layer, "loss_as_layer": job.layout.loss_as_layer}
    get = {name: fields.get(name, np.asarray(one.get(name, 1))) for name in FIELDS}
    if "dp" in fields:
        get["gpus"] = get["dp"] * get["tp"] * get["pp"] * get["cp"]
    if "etp" not in fields and job.layout.etp is None:
        get["etp"] = get["tp"]
    ends = [get.pop(name).astype(np.int64) for name in ("embedding_as_layer", "loss_as_layer")]
    evenly, sizes = even_chunks(job.model.layers, get["pp"], get["vp"], *ends)
    get["modules"] = np.where(get["recompute"] == 1, get["modules"], 0)
    get["interleaved"] = get["vp"] > 1
    del get["dp"]
    return Facts(**get, uneven=(ends[0] | ends[1]) == 1, undealt=~evenly, chunk_sizes=sizes, model=job.model, job=job)


def _job_rules(job: Job) -> tuple[Rule, ...]:
    """What holds of every framework, and of Megatron-Core; of its pinned release only where a later one lifted it."""
    if job.options.framework != "megatron":
        return GENERAL
    return (*GENERAL, *MEGATRON) if job.options.release else (*GENERAL, *MEGATRON, *PINNED)


def _split_unevenly(f: Facts) -> Any:
    """Whether uniform recomputation's groups of layers do not fill some model chunk."""
    rest = False
    for size in f.chunk_sizes:
        rest = rest | (size % f.recompute_layers != 0)
    return rest


def _no_precision(f: Facts) -> tuple[str, str]:
    gpu = f.job.node.gpu
    return f"{gpu.name} ({gpu.generation}) has no {f.job.precision}", f"it has {', '.join(gpu.precisions)}"


def _has_precision(job: Job) -> bool:
    gpu = job.node.gpu
    return job.precision in gpu.precisions or (job.precision == "fp8" and gpu.fp8_tflops > 0)


def _splits_groups(f: Facts) -> Any:
    """Mamba under context parallelism: heads by tp x cp, and groups by cp or cp by groups."""
    m = f.model
    if "mamba" not in m.kinds:
        return False
    groups = m.mamba_groups // f.tp
    groups = groups + (groups == 0)
    fits = (groups % f.cp == 0) | ((groups < f.cp) & (f.cp % groups == 0))
    return (f.cp > 1) & ((m.mamba_heads % (f.tp * f.cp) != 0) | ~fits)


GENERAL = (
    Rule("layers", lambda f: f.undealt, lambda f: f.why_undealt),  # get_num_layers_to_build
    Rule("precision", lambda f: not _has_precision(f.job), _no_precision),  # hardware.FP8_KINDS
)
"""Rules of any framework."""

MEGATRON = (
    Rule(
        "seq_cp",  # utils.get_batch_on_this_cp_rank: an early and a late chunk for every rank
        lambda f: (f.cp > 1) & (f.job.seq % (2 * f.cp) != 0),
        lambda f: (
            f"context parallelism cuts the sequence into 2 x cp {f.cp} = {2 * f.cp} chunks, and seq is {f.job.seq}",
            f"nearest: seq {near_multiples(2 * f.cp, f.job.seq)}",
        ),
    ),
    Rule(
        "seq_tp",  # tensor_parallel.mappings._split_along_first_dim
        lambda f: f.sp & (f.job.seq % (f.tp * f.cp) != 0),
        lambda f: (
            f"sequence parallelism cuts the sequence into tp {f.tp} x cp {f.cp} = {f.tp * f.cp} parts, "
            f"and seq is {f.job.seq}",
            f"nearest: seq {near_multiples(f.tp * f.cp, f.job.seq)}, or drop sp",
        ),
    ),
    Rule(
        "experts_sp",  # MoELayer.forward
        lambda f: (f.tp > 1) & (f.sp == 0) & ("moe" in f.model.kinds),
        lambda f: (f"experts with tp {f.tp} need sequence parallelism", "set sp, or tp 1"),
    ),
    Rule(
        "cp_attention",  # DotProductAttention.__init__; of TE's backends, unfused has no context parallelism
        lambda f: (f.cp > 1) & (f.job.options.impl == "local" or f.job.options.attention in ("unfused", "local")),
        lambda f: (
            f"context parallelism (cp {f.cp}) needs Transformer Engine's flash or fused attention, and this is "
            f"{f.job.options.attention} of {f.job.options.impl}",
            "set cp 1, or attention flash",
        ),
    ),
    Rule(
        "vp_p2p",  # wrong gradients without an error: docs/rehearsal.md
        lambda f: f.interleaved & (f.pp == 2) & (not f.job.options.overlap_p2p),
        lambda f: (
            f"vp {f.vp} with pp 2 and without overlapped p2p sends twice between the same two ranks at once, "
            "and the gradients are silently wrong",
            "set overlap_p2p, or pp 4, or drop vp",
        ),
    ),
    Rule(
        "recompute_groups",  # TransformerBlock._checkpointed_forward, uniform: the last group must be whole
        lambda f: (f.recompute == 2) & (f.recompute_block == 0) & (not f.model.pattern) & _split_unevenly(f),
        lambda f: (
            f"uniform recomputation in groups of {f.recompute_layers} layers does not fill model chunks of "
            f"{', '.join(map(str, sorted(f.chunk_sizes)))} layers",
            "set recompute_layers 1, or recompute_method block",
        ),
    ),
    Rule(
        "recompute_mtp",  # MultiTokenPredictionLayer._checkpointed_forward
        lambda f: (f.recompute == 2) & (f.recompute_block == 0) & (f.recompute_layers > 1) & bool(f.model.mtp_layers),
        lambda f: (
            f"uniform recomputation of multi-token prediction takes recompute_layers 1, not {f.recompute_layers}",
            "set recompute_layers 1",
        ),
    ),
    Rule(
        "recompute_mla",  # TransformerConfig.__post_init__
        lambda f: f.recomputes("mla_up_proj") & (not f.model.kv_lora),
        lambda f: (
            "mla_up_proj is recomputed in multi-latent attention only, and this model has none",
            "drop mla_up_proj from recompute_modules",
        ),
    ),
    Rule(
        "recompute_experts",  # TransformerConfig.__post_init__: moe_act needs grouped products
        lambda f: f.recomputes("moe_act") & ("moe" not in f.model.kinds),
        lambda f: (
            "moe_act is recomputed in experts only, and this model has none",
            "drop moe_act from recompute_modules",
        ),
    ),
    Rule(
        "recompute_delayed",  # TransformerConfig.__post_init__
        lambda f: f.recomputes("moe_act", "layernorm") & (f.job.precision == "fp8ds"),
        lambda f: (
            "delayed scaling (fp8ds) does not take recomputation of moe_act or layernorm",
            "drop them from recompute_modules, or set precision fp8cs",
        ),
    ),
    Rule(
        "recompute_graphs",  # TransformerConfig.__post_init__
        lambda f: (f.recompute == 2) & f.job.options.cuda_graphs,
        lambda f: ("CUDA graphs do not take full recomputation", "set recompute selective, or drop cuda_graphs"),
    ),
    Rule(
        "fp8_params",  # TransformerConfig.__post_init__
        lambda f: f.job.options.fp8_params and f.job.precision not in FP8,
        lambda f: (f"fp8_params keeps parameters in FP8, and the precision is {f.job.precision}", "drop fp8_params"),
    ),
    Rule(
        "moments",  # OptimizerConfig.__post_init__: the precision-aware optimizer is a distributed one
        lambda f: (f.sharding == 0) & (f.job.options.moments != "fp32"),
        lambda f: (f"moments in {f.job.options.moments} need the distributed optimizer", "set sharding zero1"),
    ),
    Rule(
        "zero2_overlap",  # MegatronFSDP.__init__; zero3 switches the overlap on by itself
        lambda f: (f.sharding == 2) & (not f.job.options.overlap_grads),
        lambda f: ("zero2 of Megatron-FSDP reduces gradients while it computes", "set overlap_grads, or zero3"),
    ),
    Rule(
        "mamba_cp",  # MambaContextParallel.__init__
        _splits_groups,
        lambda f: (
            f"cp {f.cp} must divide the {f.model.mamba_heads} Mamba heads / tp {f.tp}, and divide or be divided by "
            f"the {f.model.mamba_groups} groups / tp {f.tp}",
            "set cp 1",
        ),
    ),
)
"""Rules of Megatron-Core."""

PINNED = (
    Rule(
        "fsdp_experts",  # mcore_fsdp_adapter._init_dist_index gives no expert group, and MegatronFSDP refuses
        lambda f: (f.sharding >= 2) & (f.ep > 1),
        lambda f: (
            f"Megatron-FSDP (zero2, zero3) of megatron-core 0.15 takes no expert parallelism, and ep is {f.ep}",
            "set sharding zero1, or ep 1",
        ),
    ),
)
"""Rules of the pinned release that later ones lifted."""
