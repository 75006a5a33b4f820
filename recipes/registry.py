"""What recipes exist: every table of `recipes/layouts/*.toml` whose model has a function in a family file.

Reads names and facts only: nothing here imports NeMo. `build` is where a recipe becomes a `run.Partial`.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError, did_you_mean
from superpod.planner import models as planned
from superpod.planner.layout import Layout

if TYPE_CHECKING:
    import nemo_run as run

FAMILIES = (
    "llama",
    "llama_nemotron",
    "nemotron",
    "qwen",
    "mistral",
    "deepseek",
    "gemma",
    "gpt",
    "others",
    "ssm",
    "encoders",
    "tiny",
)
"""The family files of this folder, in the order `recipes list` shows them."""

LAYOUTS = Path(__file__).parent / "layouts"

TABLE = re.compile(
    r"(?:(?P<context_k>\d+)k_)?(?P<task>pretrain|sft|lora|dora)"
    r"_(?P<gpu>a100|h100|h200|b200|gb200|b300|gb300)_(?P<precision>bf16|fp16|fp8ds|fp8cs|fp8bw|mxfp8)"
)
"""A recipe's name is `{model}_{table}`; this is what a table may be called."""


FINETUNE_SEQ = 4096
"""Tokens of a packed fine-tuning sample: what NVIDIA's published SFT and LoRA runs use (NeMo performance summary)."""


@dataclass(frozen=True)
class Model:
    """A model as a family file declares it: facts that need no NeMo, and the function that configures it."""

    name: str
    family: str
    make: Callable[[], run.Config]
    seq: int
    """Sequence length it is pretrained at, tokens."""
    lr: float
    """Peak learning rate of pretraining."""
    min_lr: float
    warmup_steps: int
    max_steps: int
    """Of pretraining."""
    sft_lr: float = 5e-6
    """Peak learning rate of full fine-tuning: what NeMo's own recipes take."""
    hf: str = ""
    """Hugging Face id of the weights and tokenizer: where fine-tuning starts."""
    mtp_layers: int = 0
    """Layers that predict the token after the next, on the last pipeline stage, in this model's recipes."""
    unproven: str = ""
    """Why no machine without a GPU can build it, where that is so."""
    tune: Callable[[run.Partial], None] | None = None
    """What this model's recipes have different from the base, beyond the layout."""

    @property
    def shape(self) -> planned.ModelShape:
        """As the planner knows it."""
        return planned.find(self.name).replace(mtp_layers=self.mtp_layers)

    @property
    def vocab_size(self) -> int:
        """Tokens of the model's own tokenizer, unpadded."""
        return self.shape.vocab

    @property
    def title(self) -> str:
        """First line of the function's docstring."""
        return (self.make.__doc__ or "").strip().splitlines()[0].rstrip(".")


@dataclass(frozen=True)
class Schedule:
    """How fast and how long a recipe learns, at its own global batch."""

    lr: float
    """Peak."""
    min_lr: float
    warmup_steps: int
    max_steps: int


ADAPTERS = ("lora", "dora")
"""Tasks that train adapters beside frozen weights."""


def adapted(shape: planned.ModelShape, task: str) -> tuple[str, ...]:
    """The linear layers beside which adapters are put: all of a dense model's, the attention's of a model with experts.

    What NeMo 2.7.3's own recipes adapt. Latent attention has no `linear_qkv`, but small projections down and up. DoRA
    leaves out the layers that are split over tensor parallelism by their inputs: NeMo 2.7.3 takes the norm of a rank's
    own columns for that of the whole row, so that each rank would have another magnitude (rehearsed).
    """
    found = _adapted(shape)
    return tuple(name for name in found if name not in ("linear_proj", "linear_fc2")) if task == "dora" else found


def _adapted(shape: planned.ModelShape) -> tuple[str, ...]:
    if shape.kv_lora:
        queries = ("linear_q_down_proj", "linear_q_up_proj") if shape.q_lora else ("linear_q_proj",)
        return (*queries, "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
    attention = ("linear_qkv", "linear_proj")
    return attention if shape.is_moe else (*attention, "linear_fc1", "linear_fc2")


ADAPTER_LR = 1e-4
"""Their peak learning rate (NeMo 2.7.3, finetune_recipe of every model)."""


@dataclass(frozen=True)
class Recipe:
    """A registered recipe: a model, a task, the hardware and precision it is for, and its layout per size."""

    name: str
    model: Model
    task: str
    gpu: str
    precision: str
    seq: int
    gpus_per_node: int
    layouts: dict[int, Layout] = field(hash=False)
    """Layout at each node count the recipe is meant to run at."""
    source: Path
    table: str
    """Head of the table in `source` that lays it out; of several recipes, where they are laid out alike."""
    table_name: str
    """The recipe's name without its model."""

    @property
    def shape(self) -> planned.ModelShape:
        """Its model, as the planner knows it."""
        return shape_for(self.model, self.task)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Declared node counts, ascending; the first is the default."""
        return tuple(self.layouts)

    @property
    def schedule(self) -> Schedule:
        """Of pretraining the model's; of fine-tuning a thousand steps with a short warm-up, down to nothing."""
        m = self.model
        if self.task == "pretrain":
            return Schedule(m.lr, m.min_lr, m.warmup_steps, m.max_steps)
        return Schedule(ADAPTER_LR if self.task in ADAPTERS else m.sft_lr, 0.0, 50, 1000)

    def layout(self, num_nodes: int | None = None) -> Layout:
        """The layout at `num_nodes` (default: the smallest declared size).

        Raises:
            UserError: when the recipe does not declare that size.
        """
        size = self.nodes[0] if num_nodes is None else num_nodes
        if size not in self.layouts:
            sizes = ", ".join(map(str, self.nodes))
            raise UserError(f"{self.name} is laid out for {sizes} nodes, not for {size}", f"choose one of: {sizes}")
        return self.layouts[size]


_models: dict[str, Model] = {}


def nemo(model: str, config: str, **sizes: Any) -> run.Config:
    """NeMo's model class `model` on its configuration class `config`, both of `nemo.collections.llm`."""
    import nemo_run as run
    from nemo.collections import llm

    return run.Config(getattr(llm, model), config=run.Config(getattr(llm, config), **sizes))


def model(**facts: Any) -> Callable[[Callable[[], run.Config]], Callable[[], run.Config]]:
    """Register the decorated function as the model of its name. `facts` are fields of `Model`."""

    def wrap(make: Callable[[], run.Config]) -> Callable[[], run.Config]:
        name = make.__name__
        if name in _models:
            raise ValueError(f"two models are called {name}: {_models[name].make.__module__} and {make.__module__}")
        _models[name] = Model(name=name, family=make.__module__.rpartition(".")[2], make=make, **facts)
        return make

    return wrap


@cache
def models() -> dict[str, Model]:
    """Every model of the family files, by name."""
    for family in FAMILIES:
        importlib.import_module(f"superpod.recipes.models.{family}")
    return dict(_models)


@cache
def recipes() -> dict[str, Recipe]:
    """Every registered recipe by name: models in the order of their family files, tables in the file's order."""
    return {name: recipe for m in models().values() for name, recipe in _of(m).items()}


def find(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        UserError: naming the closest ones when there is none.
    """
    for m in models().values():  # its own file is enough
        if name.startswith(m.name) and name in (own := _of(m)):
            return own[name]
    known = list(recipes())
    hint = did_you_mean(name, known) or "`recipes list` shows them all"
    raise UserError(f"no recipe is called {name!r}", hint)


@cache
def _of(m: Model) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in _read(m, LAYOUTS / f"{m.name}.toml")}


def _read(m: Model, path: Path) -> Iterator[Recipe]:
    """The recipes of a layout file: of each table its own, and those that it also lays out."""
    if not path.is_file():
        return
    with path.open("rb") as f:
        tables = tomllib.load(f)
    for table, values in tables.items():
        where = f"{path.name} [{table}]"
        names = (table, *values.pop("also", ()))
        tiny = m.name.startswith("tiny_")
        given = {key: values.pop(key) for key in ("task", "gpu", "precision")} if tiny else {}
        gpus_per_node = values.pop("gpus_per_node", None)
        layouts = _layouts(values, where)
        for name in names:
            yield _recipe(m, name, given, gpus_per_node, layouts, (path, table))


def _layouts(values: dict[str, Any], where: str) -> dict[int, Layout]:
    """The layout at each size: the table's, or where a size has a line of its own, what that says."""
    at = values.pop("at", {})
    if not (nodes := values.pop("nodes", [])):
        raise UserError(f"{where}: nodes is missing", "list the node counts this recipe is meant to run at")
    usual = Layout.from_mapping(values, where)
    own = {size: Layout.from_mapping({"gbs": usual.gbs} | given, f"{where} at.{size}") for size, given in at.items()}
    return {n: own.get(str(n), usual) for n in nodes}


def _recipe(
    m: Model, name: str, given: dict[str, str], gpus: int | None, layouts: dict[int, Layout], place: tuple[Path, str]
) -> Recipe:
    path, table = place
    match = TABLE.fullmatch(name)
    if match is None and not given:
        where = f"{path.name} [{table}]"
        raise UserError(f"{where}: {name} is not [NNk_]task_gpu_precision, such as pretrain_h100_bf16")
    facts: dict[str, Any] = match.groupdict() if match else given
    return Recipe(
        name=m.name if name == "default" else f"{m.name}_{name}",
        model=m,
        task=facts["task"],
        gpu=facts["gpu"],
        precision=facts["precision"],
        seq=sequence(m, facts["task"], int(facts.get("context_k") or 0)),
        gpus_per_node=gpus or (4 if facts["gpu"] in ("gb200", "gb300") else 8),
        layouts=layouts,
        source=path,
        table=table,
        table_name=name,
    )


def shape_for(m: Model, task: str) -> planned.ModelShape:
    """A model in a task: imported weights have no layer that predicts further tokens, so only pretraining has one."""
    return m.shape if task == "pretrain" else m.shape.replace(mtp_layers=0)


def sequence(m: Model, task: str, context_k: int = 0) -> int:
    """Tokens of a sample: of a longer context as asked for, of fine-tuning no more than is usual."""
    if context_k:
        return context_k * 1024
    if task == "pretrain" or m.shape.positions:  # a learned table of positions keeps its length
        return m.seq
    return min(m.seq, FINETUNE_SEQ)
