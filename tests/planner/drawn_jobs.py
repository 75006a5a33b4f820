"""Random tiny jobs for the comparison with Megatron: about half are legal, and every rule is broken often enough."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from superpod.planner import hardware
from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import Options, PlannedJob

WORLDS = (1, 2, 4, 6, 8, 8, 12, 16, 24, 32, 48, 64)
KINDS = ("llama", "llama", "gpt", "moe", "moe", "mla")
NODES = {name: hardware.node(name) for name in ("a100", "h100", "b200")}
Draft = dict[str, dict[str, Any]]


def draw(rng: random.Random) -> PlannedJob:
    """One job: legal by construction, then with as many changes as chance has it, most often none or one."""
    draft = _legal(rng)
    for _ in range(rng.choice((0, 0, 0, 1, 1, 1, 1, 2))):
        rng.choice(CHANGES)(rng, draft)
    return build(draft)


def build(draft: Draft) -> PlannedJob:
    """A draft's tables as a job."""
    job, node = draft["job"], NODES[draft["job"]["node"]]
    fabric = hardware.builtin().fabric_of(node)
    model, layout = ModelShape.from_shape(**draft["model"]), Layout(**draft["layout"])
    return PlannedJob(
        model, node, fabric, job["gpus"], job["seq"], job["precision"], layout, options=Options(**draft["options"])
    )


def _divisor(rng: random.Random, size: int, most: int) -> int:
    return rng.choice([d for d in range(1, min(size, most) + 1) if size % d == 0])


def _legal(rng: random.Random) -> Draft:
    gpus = rng.choice(WORLDS)
    pp = _divisor(rng, gpus, rng.choice((1, 1, 4)))
    tp = _divisor(rng, gpus // pp, rng.choice((1, 4, 8)))
    cp = _divisor(rng, gpus // pp // tp, rng.choice((1, 1, 4)))
    dp = gpus // (tp * pp * cp)
    kind = rng.choice(KINDS)
    moe = kind == "moe" or (kind == "mla" and rng.random() < 0.5)
    vp = rng.choice((None, 2, 2, 3)) if pp > 1 else None
    etp = rng.choice((None, _divisor(rng, tp * cp * dp, 4))) if moe else None
    ep = _divisor(rng, tp * cp * dp // (etp or tp), 8) if moe and tp * cp * dp % (etp or tp) == 0 else 1
    mbs, micro = rng.choice((1, 1, 2)), pp if vp else rng.choice((1, 2))
    layout: dict[str, Any] = {"tp": tp, "pp": pp, "vp": vp, "cp": cp, "ep": ep, "etp": etp, "mbs": mbs}
    layout |= {"gbs": mbs * dp * micro, "sp": tp > 1 and (moe or rng.random() < 0.7)}
    model = _model(rng, kind, moe, layout)
    model["layers"] = _stages(rng, layout)
    options = {"attention": "flash"} if cp > 1 else {"attention": rng.choice(("flash", "local"))}
    draft = {
        "model": model,
        "layout": layout,
        "options": options,
        "job": {
            "gpus": gpus,
            "seq": math.lcm(2 * cp, tp * cp) * rng.choice((1, 2)),
            "node": "h100",
            "precision": rng.choice(("bf16", "bf16", "fp8ds", "fp8cs")),
        },
    }
    if rng.random() < 0.3:
        _recompute(rng, draft)
    if rng.random() < 0.2:
        layout["sharding"] = rng.choice(("none", "zero1", "zero2", "zero3") if ep == 1 else ("none", "zero1"))
    return draft


def _model(rng: random.Random, kind: str, moe: bool, layout: dict[str, Any]) -> dict[str, Any]:
    """A shape that divides over the layout; its layers come later."""
    tp, etp = layout["tp"], layout["etp"] or layout["tp"]
    groups = tp * rng.choice((1, 2))
    shape: dict[str, Any] = {
        "style": "gpt" if kind == "gpt" else "llama",
        "hidden": tp * rng.choice((8, 16)),
        "heads": groups * rng.choice((1, 2)),
        "kv_heads": groups,
        "head_dim": 8,
        "ffn": tp * 8,
        "vocab": tp * 24,
        "vocab_divisible_by": rng.choice((1, 16)),
    }
    if kind == "gpt":
        shape["positions"] = 256
    if moe:
        experts = layout["ep"] * rng.choice((2, 4))
        shape |= {"experts": experts, "topk": 2, "expert_ffn": etp * 8}
        shape |= {"shared_ffn": rng.choice((0, tp * 8)), "dense_first": rng.choice((0, 0, 1))}
        shape["bias"] = etp == 1 and not shape["shared_ffn"] and rng.random() < 0.3
    if kind == "mla":
        shape |= {"kv_lora": 32, "qk_rope_dim": 16, "qk_nope_dim": 8, "v_dim": 8, "q_lora": rng.choice((0, 48))}
        shape["kv_heads"] = 0
    if kind != "gpt" and rng.random() < 0.25:
        shape["mtp_layers"] = 1
    return shape


def _stages(rng: random.Random, layout: dict[str, Any]) -> int:
    """How the layers are dealt; returns how many there are."""
    pp, vp = layout["pp"], layout["vp"] or 1
    per_stage = vp * rng.choice((1, 1, 2))
    total = pp * per_stage
    how = rng.choice(("even", "even", "ends", "given", "chunks"))
    if how == "ends" and total > 2:
        layout["embedding_as_layer"], layout["loss_as_layer"] = rng.choice(((1, 1), (1, 0), (0, 1)))
        layout |= {key: bool(layout[key]) for key in ("embedding_as_layer", "loss_as_layer")}
        return total - layout["embedding_as_layer"] - layout["loss_as_layer"]
    if how == "given" and pp > 1:
        first, last = vp * rng.choice((1, 2)), vp * rng.choice((1, 2))
        layout |= rng.choice(
            ({"first_layers": first}, {"last_layers": last}, {"first_layers": first, "last_layers": last})
        )
        given = [layout[key] for key in ("first_layers", "last_layers") if key in layout]
        return sum(given) + (pp - len(given)) * per_stage
    if how == "chunks" and pp > 1:
        layout["chunks"] = tuple(rng.choice((1, 1, 2)) for _ in range(pp * vp))
        return sum(layout["chunks"])
    return total


def _recompute(rng: random.Random, draft: Draft) -> None:
    """Legal recomputation: full in groups of one, or modules that the model has."""
    layout, model = draft["layout"], draft["model"]
    layout["recompute"] = rng.choice(("full", "selective"))
    layout["recompute_method"] = rng.choice(("uniform", "block"))
    if layout["recompute_method"] == "block" and not model.get("mtp_layers"):
        layout["recompute_layers"] = rng.choice((1, 2, 5))
    modules = ["core_attn", "mlp", "moe", "shared_experts"]
    modules += ["mla_up_proj"] * bool(model.get("kv_lora")) + ["moe_act"] * bool(model.get("experts"))
    modules += ["layernorm"]
    if draft["job"]["precision"] == "fp8ds":
        modules = [name for name in modules if name not in ("moe_act", "layernorm")]
    layout["recompute_modules"] = tuple(rng.sample(modules, rng.randint(1, 3)))


def _sets(table: str, key: str, *values: Any) -> Callable[[random.Random, Draft], None]:
    def change(rng: random.Random, draft: Draft) -> None:
        draft[table][key] = rng.choice(values)

    return change


def _makes(**tables: dict[str, Any]) -> Callable[[random.Random, Draft], None]:
    """Several fields at once: what it takes to reach a rule."""

    def change(rng: random.Random, draft: Draft) -> None:
        for table, values in tables.items():
            draft[table] |= values

    return change


def _layers_off(rng: random.Random, draft: Draft) -> None:
    draft["model"]["layers"] = max(1, draft["model"]["layers"] + rng.choice((-2, -1, 1, 2)))


def _batch_off(rng: random.Random, draft: Draft) -> None:
    draft["layout"]["gbs"] = max(1, draft["layout"]["gbs"] + rng.choice((-1, 1, 2, 3)))


def _odd_micro_batches(rng: random.Random, draft: Draft) -> None:
    """A batch that divides, and micro-batches that may not fill the interleaved pipeline."""
    job, layout = draft["job"], draft["layout"]
    layout |= {"pp": rng.choice((2, 3, 4)), "vp": 2}
    job["gpus"] *= layout["pp"]
    draft["model"]["layers"] = 2 * layout["pp"]
    dp = max(1, job["gpus"] // math.prod(layout.get(key, 1) for key in ("tp", "pp", "cp")))
    layout["gbs"] = layout.get("mbs", 1) * dp * rng.choice((1, 2, 3))


def _interleave(rng: random.Random, draft: Draft) -> None:
    """PP 2 with chunks, with or without overlapped sends."""
    gpus = 2 * rng.choice((1, 2, 4))
    draft["job"]["gpus"] = gpus
    draft["layout"] = {"pp": 2, "vp": 2, "gbs": gpus, "sp": False}
    draft["model"] |= {"layers": 4}
    draft["options"] |= {"overlap_p2p": rng.random() < 0.2}


def _local_attention(rng: random.Random, draft: Draft) -> None:
    """Attention of Megatron's own under context parallelism."""
    draft["options"] |= rng.choice(({"attention": "local"}, {"impl": "local"}))
    draft["layout"]["cp"] = rng.choice((1, 2, 2))
    draft["job"]["gpus"] *= draft["layout"]["cp"]
    draft["job"]["seq"] *= 2


GIVEN = {"first_layers": 2, "last_layers": 2, "chunks": None, "embedding_as_layer": False, "loss_as_layer": False}
MOE = {"experts": 8, "topk": 2, "expert_ffn": 24, "mtp_layers": 0}
CHANGES: tuple[Callable[[random.Random, Draft], None], ...] = (
    _sets("job", "gpus", 1, 2, 3, 4, 6, 8, 16, 24, 32, 64),
    _sets("job", "seq", 8, 10, 12, 16, 20, 24, 30),
    _sets("job", "seq", 6, 9, 14, 18),
    _makes(job={"seq": 14}, layout={"cp": 2}),
    _sets("job", "precision", "bf16", "fp8ds", "mxfp8", "nvfp4", "fp8bw"),
    _sets("job", "node", "a100", "b200"),
    _sets("layout", "tp", 1, 2, 3, 4, 8),
    _sets("layout", "pp", 1, 2, 3, 4),
    _sets("layout", "cp", 1, 2, 3, 4),
    _sets("layout", "vp", None, 1, 2, 3),
    _sets("layout", "vp", 1, 2),
    _sets("layout", "ep", 2, 3, 4, 8),
    _sets("layout", "etp", None, 1, 2, 3, 4),
    _sets("layout", "sp", True, False),
    _sets("layout", "sp", True, False),
    _sets("layout", "mbs", 1, 2, 3),
    _sets("layout", "first_layers", None, 1, 2, 3),
    _sets("layout", "last_layers", None, 1, 2, 3),
    _sets("layout", "embedding_as_layer", True, False),
    _sets("layout", "loss_as_layer", True, False),
    _sets("layout", "chunks", None, (1, 1), (1, 2, 1, 1), (2, 1)),
    _sets("layout", "sharding", "none", "zero1", "zero2", "zero3"),
    _sets("model", "heads", 4, 6, 8, 12),
    _sets("model", "kv_heads", 1, 2, 3),
    _makes(model={"ffn": 18}, layout={"tp": 4}),
    _makes(model={"ffn": 20}, layout={"tp": 8}),
    _sets("model", "vocab", 50, 66, 100),
    _makes(model={"vocab_divisible_by": 1, "vocab": 101}),
    _makes(model={"vocab_divisible_by": 1, "vocab": 102}, layout={"tp": 4}),
    _makes(model={"mtp_layers": 1, "hidden": 20}),
    _makes(model={"mtp_layers": 1, "hidden": 18}, layout={"tp": 4}),
    _makes(model=MOE | {"expert_ffn": 18}, layout={"etp": 4}),
    _makes(model=MOE | {"expert_ffn": 20}, layout={"etp": 3}),
    _makes(model=MOE | {"shared_ffn": 18, "bias": False}, layout={"sp": True, "tp": 4}),
    _makes(model=MOE | {"experts": 6}, layout={"ep": 4, "etp": 1}),
    _makes(model=MOE | {"bias": True, "shared_ffn": 0}, layout={"etp": 2}),
    _makes(model=MOE, layout={"sp": False}),
    _makes(model={"mtp_layers": 1}, layout={"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2}),
    _makes(layout={"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2}),
    _makes(layout={"recompute": "full", "recompute_method": "uniform", "recompute_layers": 3}),
    _makes(layout={"recompute": "selective", "recompute_modules": ("mla_up_proj",)}),
    _makes(model={"kv_lora": 0}, layout={"recompute": "selective", "recompute_modules": ("mla_up_proj",)}),
    _makes(layout={"recompute": "selective", "recompute_modules": ("moe_act", "mlp")}),
    _makes(layout={"recompute": "selective", "recompute_modules": ("layernorm",)}, job={"precision": "fp8ds"}),
    _makes(layout={"recompute": "full"}, options={"cuda_graphs": True}),
    _makes(layout={"recompute": "full"}, options={"cuda_graphs": True}),
    _makes(options={"cuda_graphs": True}, layout={"recompute": "none"}),
    _makes(model=MOE, options={"overlap_experts": True}, layout={"ep": 2, "etp": 1}),
    _makes(model=MOE, options={"overlap_experts": True}),
    _makes(options={"overlap_experts": True}),
    _makes(options={"fp8_params": True}),
    _makes(options={"fp8_params": True}, job={"precision": "bf16"}),
    _makes(model={"experts": 0, "topk": 0}, layout={"ep": 2}),
    _makes(model={"experts": 0, "topk": 0}, layout={"recompute": "selective", "recompute_modules": ("moe_act",)}),
    _makes(model={"bias": True, "shared_ffn": 0}, layout={"recompute": "selective", "recompute_modules": ("mlp",)}),
    _makes(model={"mtp_layers": 1}, layout={"recompute": "full", "recompute_method": "block"}),
    _makes(
        model={"mtp_layers": 1, "layers": 4},
        layout={"pp": 2, **GIVEN, "first_layers": None, "last_layers": None, "chunks": (4, 0)},
    ),
    _makes(
        model={"mtp_layers": 1, "layers": 4},
        layout={"pp": 2, **GIVEN, "first_layers": None, "last_layers": None, "chunks": (3, 1)},
    ),
    _makes(layout={"pp": 2, "vp": 1}),
    _makes(layout={"pp": 3, "vp": 1}),
    _makes(layout={"pp": 2, "vp": 2, **GIVEN}, model={"layers": 4}),
    _makes(layout={"tp": 1, "sp": True}),
    _makes(job={"node": "a100", "precision": "fp8cs"}),
    _makes(options={"moments": "bf16"}, layout={"sharding": "none"}),
    _makes(options={"moments": "bf16"}, layout={"sharding": "none"}),
    _makes(options={"moments": "bf16"}),
    _makes(options={"overlap_grads": False}, layout={"sharding": "zero2"}),
    _makes(options={"overlap_grads": False}, layout={"sharding": "zero2"}),
    _sets("options", "memory_cap", 60.0, 100.0, 900.0),
    _sets("options", "memory_cap", 100.0, 300.0),
    _makes(model=MOE, layout={"sharding": "zero2", "ep": 2, "etp": 1}),
    _makes(model=MOE, layout={"sharding": "zero3", "ep": 2, "etp": 1}),
    _layers_off,
    _batch_off,
    _odd_micro_batches,
    _odd_micro_batches,
    _interleave,
    _interleave,
    _local_attention,
    _local_attention,
)
