"""What is believed of the time model's constants before any row is seen: where they start, how far they may go.

Values are times over the ideal: 1.3 for `matmul` is 77 % of the peak. Widths are of a factor's log: 0.1 = 10 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from superpod.planner.calibration import calibration
from superpod.planner.planned_job import PlannedJob

START = {
    "software": 1.0,  # on all computation of a GPU
    "matmul": 1.1,  # a GPU that trains runs hotter and at lower clocks than one that times a kernel
    "plain": 1.1,
    "router": 2.0,
    "expert": 1.2,
    "attention": 1.3,  # backward reaches less of the peak than forward: arXiv:2407.08608, figures 5 and 6
    "unfused": 1.4,
    "scan": 1.0,
    "delta": 1.0,
    "misaligned": 0.4,
    "main_grads": 1.0,
    "stream": 1.25,  # copies reach 4.3 of 4.8 TB/s on H200 (measured by this project)
    "scores": 1.25,
    "loss": 1.25,
    "cast": 1.25,
    "expert_cast": 1.5,
    "sorting": 1.5,
    "kernels": 8e-6,  # s of CPU time for each launch
    "expert_kernels": 4e-6,
    "gap": 2e-6,  # s of GPU time between kernels
    "graphed": 0.1,
    "jitter": 0.01,
    "queue": 4.0,
    "tp_near": 1.3,
    "tp_far": 1.3,
    "tp_steps": 1e-5,
    "tp_hidden": 0.3,
    "cp_near": 1.3,
    "cp_far": 1.3,
    "cp_steps": 1e-5,
    "cp_hidden": 0.7,
    "ep_near": 1.5,  # DeepEP on eight H100s: 1.4 to 1.6 (aiconfigurator-core 0.12.0)
    "ep_far": 1.3,  # DeepEP on two to four nodes: 1.05 to 1.3 (there)
    "ep_steps": 2e-4,  # the host reads how many tokens go where, and the GPU waits for its next launches
    "ep_under": 0.5,
    "send_near": 1.3,
    "send_far": 1.3,
    "send_near_s": 1.5e-5,
    "send_far_s": 3e-5,
    "send_hidden": 0.8,
    "dp_near": 1.3,
    "dp_far": 1.3,
    "dp_step_s": 2e-5,
    "dp_under": 0.9,
    "dp_tail": 1.0,
    "dp_slows": 0.03,
    "states": 1.3,
    "grads": 1.3,
    "copies": 0.1,
    "step_s": 5e-3,
    "tensor_s": 5e-5,
}

LEAST = {
    **dict.fromkeys(("matmul", "plain"), 0.9),
    "expert": 0.5,
    "attention": 0.5,  # cuDNN's kernels of training are faster on Blackwell than those that were measured
    "unfused": 1.1,
    **dict.fromkeys(("stream", "scores"), 0.9),
    "main_grads": 0.3,
    **dict.fromkeys(("cast", "loss"), 0.7),
    "expert_cast": 0.3,
    "sorting": 0.2,
    **{f"{group}_{tier}": 1.05 for group in ("tp", "cp", "ep", "send", "dp") for tier in ("near", "far")},
    "ep_near": 0.5,  # tokens may travel in FP8
    "gap": 3e-7,
    "queue": 1.5,
}
"""No faster than this: nothing beats the peak, and bytes that a cache spares are fewer than half."""


@dataclass(frozen=True)
class Scope:
    """Where a factor applies. The file of a GPU holds the product of those that it and its generation have."""

    selector: str = ""
    """Of `calibration.selectors`; "" = always."""
    generation: str = ""
    gpu: str = ""


def scopes(job: PlannedJob) -> list[Scope]:
    """The scopes of one job."""
    gpu, era = job.node.gpu, calibration.era(job)
    kind = "moe" if job.model.is_moe else "dense"
    scopes_of_job = [Scope(), Scope(generation=gpu.generation), Scope(gpu=gpu.name)]
    for selector in calibration.selectors(job):
        if selector in (f"precision {job.precision}", f"era {era} {kind}"):
            scopes_of_job.append(Scope(selector, generation=gpu.generation))
        else:
            scopes_of_job.append(Scope(selector))
    return scopes_of_job


BASE = {
    **dict.fromkeys(START, 0.5),
    **{"matmul": 0.15, "plain": 0.06, "attention": 0.12, "main_grads": 0.3, "stream": 0.02, "cast": 0.2, "scores": 0.2},
    **{"send_near": 0.1, "send_far": 0.1, "loss": 0.3, "software": 1e-6, "router": 1.0, "scan": 0.4},
    **{
        "tp_hidden": 0.6,
        "cp_hidden": 0.2,
        "ep_under": 0.3,
        "ep_near": 0.15,
        "dp_far": 0.2,
        "ep_steps": 1.0,
        "send_hidden": 0.1,
        "dp_under": 0.2,
    },
}
GENERATION = {
    **{"software": 0.08, "attention": 0.2, "stream": 0.05, "expert": 0.3, "kernels": 0.4, "tp_near": 0.3},
    **{"sorting": 0.3, "cast": 0.1, "ep_near": 0.3, "ep_steps": 0.4, "scan": 0.5, "ep_far": 0.2},
}
OWN = {
    **dict.fromkeys(("plain", "loss"), 0.3),
    **dict.fromkeys(("unfused", "scores", "stream", "kernels", "gap", "queue", "states", "copies", "step_s"), 1.5),
    **dict.fromkeys(("tp_near", "tp_steps", "send_far", "send_far_s", "send_hidden", "dp_far", "dp_near"), 1.5),
    **{"matmul": 0.1, "jitter": 2.0},
}
"""Of Megatron-DeepSpeed on A100: another code, with rows enough to say it all."""

BEGIN = {("era deepspeed", "kernels"): 2.2}
"""Logs that the search begins at, where not at 0: from there it takes vTrain's slow launches, traced by CUPTI, for long
gaps between kernels, and does not come back."""


def widths(scope: Scope) -> dict[str, float]:
    """The constants that a scope has a factor of, and how wide."""
    name = scope.selector
    if not name:
        return GENERATION if scope.generation else {"software": 0.02, "dp_far": 0.1} if scope.gpu else BASE
    if name.startswith("precision"):
        return {"matmul": 0.15, "expert": 0.3, "cast": 0.2, "expert_cast": 0.4}
    if name.startswith("era"):
        return _era(name)
    if name == "fused experts":
        return {"expert": 0.4, "expert_cast": 0.6, "stream": 0.3, "sorting": 0.4, "kernels": 0.4, "ep_steps": 0.5}
    if name == "deepep":
        return {"ep_near": 0.3, "ep_far": 0.3, "ep_steps": 0.5, "sorting": 0.3}
    if name.startswith("task"):
        return {"software": 0.07, "attention": 0.3, "kernels": 0.3}
    return {"software": 0.5, "kernels": 0.7}  # functional


def _era(name: str) -> dict[str, float]:
    if name == "era deepspeed":
        return OWN
    if name.endswith((" moe", " dense")):
        if "deepspeed" in name or "fsdp2" in name:  # one kind of runs each: they have no factor of their own
            return {}
        more = {"expert": 0.15, "kernels": 0.4, "ep_near": 0.2, "ep_steps": 0.3, "software": 0.05, "sorting": 0.2}
        return more if name.endswith(" moe") else {"software": 0.06}
    width = {"software": 0.03, "kernels": 0.3}
    if name == "era 2021":
        width |= {"scores": 0.3, "stream": 0.2, "tp_near": 0.3, "kernels": 1.0, "copies": 1.0}
    if name in ("era fsdp2", "era mlperf v5.0", "era mlperf v5.1"):
        width |= {"software": 0.15, "dp_far": 0.5}
    return width
