"""List the recipes that `plan_layouts.py` plans: models, tasks, sequence lengths, GPUs, precisions, global batches.

Every GPU of the planner with NVLink and at least 80 GB has recipes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from superpod.collection import registry
from superpod.collection.recipe_job import default_options, resolve_parameters, set_unfused_attention
from superpod.collection.registry import TASKS, Task
from superpod.errors import UserError
from superpod.planner import hardware
from superpod.planner.hardware import Gpu
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob

LEAST_GB = 80
"""Minimum memory of a GPU that has recipes."""
GENERATIONS = {
    "ampere": ("bf16",),
    "hopper": ("bf16", "fp8ds", "fp8cs", "fp8bw"),
    "blackwell": ("bf16", "fp8cs", "mxfp8"),
}
"""GPU generation -> precisions of its recipes: those of NVIDIA's published runs."""
SEARCHED_PRECISIONS = ("bf16", "fp8cs")
"""Precisions that are searched, one of each kind; the others choose from the layouts that these find."""
SAME_MEMORY = 1.1
"""GPUs whose memory differs by less than this factor are searched once."""
SIZED_TO_GB = 190
"""GPUs with more memory have the node counts of a GPU with this much, so that a model's recipes have the same sizes."""
TOKENS = 2**22
"""Tokens per global batch in pretraining: 4 million, as for Llama 2 and 3."""
BATCHES = {
    "llama31_405b": 2048,
    "deepseek_v3": 15_360,
    "deepseek_v2": 2304,
    "deepseek_v2_lite": 4608,
    "nemotron4_340b": 2304,
    **dict.fromkeys(("nemotronh_4b", "nemotronh_8b", "nemotronh_47b", "nemotronh_56b"), 768),
    **dict.fromkeys(("nemotron_nano_9b_v2", "nemotron_nano_12b_v2"), 768),
    **dict.fromkeys(("bert_110m", "bert_340m"), 256),
    **dict.fromkeys(("t5_220m", "t5_3b", "t5_11b"), 2048),
}
"""Model -> samples per global batch in pretraining, from its paper or NeMo's recipe."""
FINETUNE_BATCH = 32
"""Packed samples per global batch of NVIDIA's published fine-tuning runs (NeMo performance summary)."""
LONG = {
    **dict.fromkeys(("llama3_8b", "llama3_70b", "llama31_8b", "llama31_70b"), (16, 64, 128)),
    **dict.fromkeys(("mixtral_8x7b", "mixtral_8x22b"), (16, 64)),
    **dict.fromkeys(("nemotron3_22b", "nemotron4_15b"), (16, 64)),
}
"""Model -> sequence lengths of its long-context recipes, in thousands of tokens: those of NeMo and some between."""
RETRIEVERS = ("e5_340m", "llama_embedding_1b", "llama_embedding_3b", "llama_reranker_1b")
"""Models that are only fine-tuned."""


@dataclass(frozen=True)
class Case:
    """A recipe to plan: model, task, sequence length, GPU and precision."""

    model: str
    task: Task
    context_k: int
    """Sequence length of a long-context recipe in thousands of tokens; 0 = the model's usual length."""
    gpu: str
    precision: str

    @property
    def suffix(self) -> str:
        """Name of the recipe without its model."""
        return f"{f'{self.context_k}k_' if self.context_k else ''}{self.task}_{self.gpu}_{self.precision}"

    @property
    def seq(self) -> int:
        """Tokens per sample."""
        return registry.sequence(registry.models()[self.model], self.task, self.context_k)

    @property
    def gbs(self) -> int:
        """Samples per global batch."""
        if self.task != "pretrain":
            return FINETUNE_BATCH
        return BATCHES[self.model] if self.model in BATCHES and not self.context_k else TOKENS // self.seq

    def job(self, gpus: int, layout: Layout | None = None) -> PlannedJob:
        """Return the planned job on `gpus` GPUs; without a layout, one with only the batch size and sharding."""
        facts = hardware.builtin()
        node = facts.node(self.gpu)
        shape = registry.shape_for(registry.models()[self.model], self.task)
        planned = PlannedJob(
            model=shape,
            node=node,
            fabric=facts.fabric_of(node),
            gpus=gpus,
            seq=self.seq,
            precision=self.precision,
            layout=layout or Layout(gbs=self.gbs, sharding=self.sharding),
            task="lora" if self.task == "dora" else self.task,
            options=default_options(self.task, self.precision, self.sharding, shape),
        )
        try:
            return resolve_parameters(planned) if layout else set_unfused_attention(planned)
        except UserError:  # a layout that these GPUs do not fill: `predict` says that it is illegal
            return planned

    @property
    def sharding(self) -> Literal["none", "zero1"]:
        """Sharding of the optimizer states: none for adapters, which are too small to benefit."""
        return "none" if self.task in registry.ADAPTERS else "zero1"


@cache
def gpus() -> dict[str, Gpu]:
    """Return name -> GPU for the GPUs that have recipes, by memory: those with constants of their own."""
    nodes = hardware.builtin().nodes.values()
    own = [node for node in nodes if not node.gpu.calibrated_as and not node.gpu.fitted_as]
    planned = [node.gpu for node in own if node.nvlink_domain > 1 and node.gpu.hbm_gb >= LEAST_GB]
    return {gpu.name: gpu for gpu in sorted(planned, key=lambda gpu: gpu.hbm_gb)}


def precisions(gpu: str) -> tuple[str, ...]:
    """Return the precisions of a GPU's recipes."""
    return GENERATIONS[gpus()[gpu].generation]


@cache
def searched() -> dict[str, Gpu]:
    """Return name -> GPU for one GPU of each memory size: the first with FP8, for all SEARCHED_PRECISIONS."""
    chosen: list[Gpu] = []
    for gpu in gpus().values():
        if gpu.fp8_tflops and all(gpu.hbm_gb > SAME_MEMORY * other.hbm_gb for other in chosen):
            chosen.append(gpu)
    return {gpu.name: gpu for gpu in chosen}


def sized_as(gpu: str) -> str:
    """Return the searched GPU whose memory determines the minimum number of GPUs of a model on `gpu`."""
    memory_gb = min(gpus()[gpu].hbm_gb, SIZED_TO_GB)
    return max((g for g in searched().values() if g.hbm_gb <= memory_gb), key=lambda g: g.hbm_gb).name


def cases(name: str) -> list[list[Case]]:
    """Return the recipes of a model, in groups with the same task and sequence length."""
    model = registry.models()[name]
    tasks: list[Task] = [*TASKS] if model.family != "ssm" else [*TASKS[:2]]
    if name in RETRIEVERS or name.startswith("bert"):
        tasks = ["sft"] if name in RETRIEVERS else ["pretrain"]
    lengths = {"pretrain": (0, *LONG.get(name, ()))}
    kinds: list[tuple[Task, int]] = [(task, k) for task in tasks for k in lengths.get(task, (0,))]
    plain_only = model.unproven and not name.startswith("nemotron")
    return [
        [
            Case(name, task, k, gpu, precision)
            for gpu in gpus()
            for precision in precisions(gpu)
            if precision == "bf16" or not (plain_only or task == "dora")
            if precision != "fp8ds" or not model.shape.shared_ffn  # family_rules.py, delayed_shared
        ]
        for task, k in kinds
    ]
