"""Priors of the time model's constants: their initial values, and the widths within which the fit changes them.

Values are times relative to measured kernels, HBM's bandwidth and links' bandwidth: 1.3 for `tp_near` is 77 % of
NVLink's bandwidth. Widths are of a factor's log: 0.1 = 10 %.
"""

from __future__ import annotations

START = {
    "software": 1.0,  # factor on all computation of a GPU
    "matmul": 1.1,  # in training, a GPU has lower clocks than in kernel benchmarks
    "plain": 1.1,
    "router": 2.0,
    "expert": 1.2,
    "fill": 1.1,
    "attention": 1.3,  # backward reaches less of the peak than forward: arXiv:2407.08608, figures 5 and 6
    "unfused": 1.4,
    "scan": 1.1,
    "delta": 1.1,
    "misaligned": 0.4,
    "main_grads": 1.1,
    "stream": 1.25,  # copies reach 4.3 of 4.8 TB/s on H200 (measured by this project)
    "scores": 1.25,
    "loss": 2.5,  # of reading the logits once; NeMo's fused loss has 5 passes in all (fused_cross_entropy.py)
    "cast": 2.0,  # of writing the quantized copies; a kernel of its own reads the input, too, once or twice
    "expert_cast": 2.0,
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

COMMON = {
    **{"matmul": 0.15, "plain": 0.1, "expert": 0.1, "attention": 0.15, "unfused": 0.3, "main_grads": 0.2},
    **{"stream": 0.1, "scores": 0.2, "cast": 0.3, "expert_cast": 0.4, "sorting": 0.4, "loss": 0.2, "kernels": 0.5},
    **{"gap": 0.5, "queue": 0.5, "jitter": 0.5, "tp_near": 0.3, "tp_steps": 0.5, "tp_hidden": 0.6, "cp_near": 0.2},
    **{"ep_near": 0.3, "ep_far": 0.3, "ep_steps": 1.0, "ep_under": 0.3, "dp_near": 0.3, "dp_far": 0.2, "dp_under": 0.2},
    **{"dp_slows": 0.5, "states": 0.3, "step_s": 1.0, "cp_hidden": 0.2, "expert_kernels": 1.0},
}
"""Constants that are fitted for all jobs -> width of the prior; all others keep their initial values."""
MEGATRON_DEEPSPEED = {
    **{"plain": 0.3, "stream": 1.5, "kernels": 1.5, "queue": 0.5, "step_s": 1.5, "states": 1.0},
    **{"tp_near": 1.0, "tp_steps": 1.5, "dp_far": 1.0, "jitter": 2.0},
}
FACTORS: dict[str, dict[str, float]] = {
    "power": {"matmul": 0.5, "expert": 0.5},
    "generation ampere": {"attention": 0.2, "kernels": 0.3},
    "generation hopper": {"attention": 0.2, "kernels": 0.3, "sorting": 0.3, "ep_steps": 0.4},
    "generation blackwell": {"attention": 0.2, "kernels": 0.3, "sorting": 0.3, "ep_steps": 0.4},
    **{f"precision {name}": {"matmul": 0.15, "expert": 0.3} for name in ("fp8ds", "fp8cs", "mxfp8", "nvfp4")},
    **{f"software NeMo {name}": {"software": 0.05} for name in ("24", "25.0", "26.0", "26.1")},
    **{f"software MLPerf {name}": {"software": 0.1} for name in ("v5.0", "v5.1")},
    "software Megatron-LM 2021": {"software": 0.1},
    "software fsdp2": {"software": 0.15, "dp_far": 0.5},
    "software deepspeed": MEGATRON_DEEPSPEED,
    "task lora": {"software": 0.1},
    "task sft": {"software": 0.1},
    "deepep": {"ep_near": 0.3, "ep_far": 0.3, "sorting": 0.3},
    "graphs": {"gap": 1.0},  # the GPU starts the kernels of a graph without waiting for the CPU
    "fused experts": {"expert": 0.4, "expert_cast": 0.6},
}
"""Selector of `calibration.selectors` -> constants that it has a factor of; those of `power` are raised
to `calibration.power`."""

BEGIN = {("software deepspeed", "kernels"): 2.2}
"""(selector, constant) -> initial log of a factor, if not 0. From 0, the fit explains vTrain's slow launches, which are
traced by CUPTI, by long gaps between kernels, and stays in that local minimum."""
