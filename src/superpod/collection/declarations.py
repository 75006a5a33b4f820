"""`Recipe` and `Model`, and all that `recipes/layouts/*.toml` and `recipes/models/*.py` declare.

A user's own, in folders outside this package, count like ours (common/collection.py). Reads names and facts only:
nothing here imports NeMo. `build` is where a recipe becomes a `run.Partial`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from superpod.collection import layout_text, own_models
from superpod.common import collection, package_files
from superpod.errors import UserError, did_you_mean
from superpod.planner import hardware
from superpod.planner import models as planned
from superpod.planner.layout import Layout

if TYPE_CHECKING:
    import nemo_run as run

RECIPES = package_files.included("recipes")
LAYOUTS = RECIPES / "layouts"

ORDER = (
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
"""The families that `recipes list` shows first, in this order; any other file of this folder follows by name."""

Task = Literal["pretrain", "sft", "lora", "dora"]
TASKS: tuple[Task, ...] = get_args(Task)
NAME = re.compile(rf"(?:(?P<context_k>\d+)k_)?(?P<task>{'|'.join(TASKS)})_(?P<gpu>\w+)_(?P<precision>[a-z0-9]+)")
"""A recipe's name after its model's: `16k_pretrain_h100_bf16`."""

PRECISIONS = tuple(name for name in hardware.PRECISIONS if name not in ("fp32", "tf32", "fp16", "nvfp4"))
"""Precisions that recipes are written for. NeMo 2.7.3 has no recipe for NVFP4, and no loss scale that works for FP16,
which is an option (`with=fp16`, nemo2/options.py)."""

FINETUNE_SEQ = 4096
"""Tokens of a packed fine-tuning sample: what NVIDIA's published SFT and LoRA runs use (NeMo performance summary)."""

Need = tuple[str, str, str, str]
"""A package, the least version, the first that is too new ("" = none), and why: `versions.Range` of `runtime/`."""


@dataclass(frozen=True)
class Model:
    """A model as its file declares it: facts that need no NeMo, and the function that configures it."""

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
    """Peak learning rate of full fine-tuning, as in NeMo's recipes."""
    hf: str = ""
    """Hugging Face id of the weights and tokenizer: where fine-tuning starts."""
    not_imported: str = ""
    """Why NeMo's importer refuses the weights `hf`; "" = it takes them."""
    import_instead: str = ""
    """What to import in their place."""
    mtp_layers: int = 0
    """Layers that predict the token after the next, on the last pipeline stage, in this model's recipes."""
    unproven: str = ""
    """Why it can only be rehearsed on a machine with a GPU; "" = it can be rehearsed anywhere."""
    broken: str = ""
    """Why no recipe of it can train with the versions that are pinned here; "" = nothing known against it."""
    way_round: str = ""
    """What to do about `broken`."""
    needs: tuple[Need, ...] = ()
    """Versions that it needs beside those that all recipes do (`runtime/runs/versions.py`)."""
    tune: Callable[[run.Partial], None] | None = None
    """Changes this model's recipes, after everything else is set."""

    @cached_property
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
    """Learning rate and steps of a recipe, at its own global batch."""

    lr: float
    """Peak."""
    min_lr: float
    warmup_steps: int
    max_steps: int


ADAPTERS = ("lora", "dora")
"""Tasks that train adapters beside frozen weights."""


ADAPTER_LR = 1e-4
"""Their peak learning rate (NeMo 2.7.3, finetune_recipe of every model)."""


@dataclass(frozen=True)
class Recipe:
    """A registered recipe: a model, a task, the hardware and precision it is for, and its layout per size."""

    name: str
    model: Model
    task: Task
    gpu: str
    precision: str
    seq: int
    gpus_per_node: int
    layouts: dict[int, Layout] = field(hash=False)
    """Layout at each node count the recipe is meant to run at."""
    source: Path
    """The layout file that declares it."""
    suffix: str
    """Its name without its model's."""
    line: int = field(default=1, compare=False)
    """Where it stands in `source`."""
    lines: Mapping[int, int] = field(default_factory=dict, hash=False, compare=False)
    """Line of the layout at each node count in `source`."""
    saves: Mapping[int, int] = field(default_factory=dict, hash=False)
    """Steps between two checkpoints at each node count whose line says them; else they are computed."""

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
        """Pretraining: the model's. Fine-tuning: a thousand steps with a short warm-up, decaying to 0."""
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
    """Register the decorated function as the model of its name. `facts` are fields of `Model`.

    Raises:
        UserError: when a fact is unknown or missing, or another model has the name.
    """

    def wrap(make: Callable[[], run.Config]) -> Callable[[], run.Config]:
        name = make.__name__
        if other := _models.get(name):
            places = f"{_file(other.make)} and {_file(make)}"
            raise UserError(f"two models are called {name}, in {places}", "rename one")
        try:
            _models[name] = Model(name=name, family=own_models.family(make.__module__), make=make, **facts)
        except TypeError as wrong:
            problem = str(wrong).removeprefix("Model.__init__() ")
            raise UserError(f"{name}: {problem}", "@model takes seq, lr, min_lr, warmup_steps and max_steps") from wrong
        return make

    return wrap


def _file(function: Callable[..., Any]) -> str:
    return function.__code__.co_filename


def families() -> list[str]:
    """The files of recipes/models/, in the order in which `recipes list` shows them."""
    files = sorted(path.stem for path in (RECIPES / "models").glob("[!_]*.py"))
    return sorted(files, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


@cache
def models() -> dict[str, Model]:
    """Every model by name: those of the family files, then those of collections.

    Raises:
        UserError: when a file of a collection cannot be imported, or a model has no shape.
    """
    for family in families():
        importlib.import_module(f"superpod.collection.models.{family}")
    ours = set(_models)
    own_models.load()
    for name in [name for name in _models if name not in ours]:
        _check_own(_models[name])
        _models[name] = replace(_models[name], make=own_models.guarded(_models[name].make))
    return dict(_models)


def _check_own(m: Model) -> None:
    """Refuse a collection's model without what every verb needs of it."""
    place = f"{_file(m.make)}:{m.make.__code__.co_firstlineno}"
    if not (m.make.__doc__ or "").strip():
        raise UserError(f"{place}: {m.name} has no docstring", "its first line is the model's title; write one")
    try:
        _ = m.shape
    except UserError as missing:
        hint = f"describe it in shapes/*.toml, or put its config.json there as shapes/{m.name}.json"
        raise UserError(f"{place}: {missing}", hint) from missing


@cache
def recipes() -> dict[str, Recipe]:
    """Every registered recipe by name: models in their order, recipes in the order of their layout file.

    Raises:
        UserError: when a layout file is wrong, or is of no model.
    """
    for path in collection.files("layouts"):
        if path.stem not in models():
            hint = did_you_mean(path.stem, list(models())) or "name the file after its model"
            raise UserError(f"{path}: no model is called {path.stem!r}", hint)
    return {name: recipe for m in models().values() for name, recipe in recipes_of(m).items()}


@cache
def recipes_of(m: Model) -> dict[str, Recipe]:
    """The recipes of a model: those of our layout file, then those of collections.

    Raises:
        UserError: when a layout file is wrong, or two lay out the same recipe.
    """
    declared: dict[str, Recipe] = {}
    for path in layout_files(m.name):
        for recipe in read(m, path):
            if other := declared.get(recipe.name):
                same = path == other.source
                hint = "take it out of one of the two" if same else "choose another context, GPU or precision"
                place = f"{path}:{recipe.line}"
                raise UserError(f"{place}: {recipe.name} is laid out already, in {other.source}", hint)
            declared[recipe.name] = recipe
    return declared


def layout_files(name: str) -> list[Path]:
    """The layout files of a model: ours where there is one, and those of collections."""
    every = (LAYOUTS / f"{name}.toml", *collection.files("layouts"))
    return [path for path in every if path.stem == name and path.is_file()]


def read(m: Model, path: Path) -> Iterator[Recipe]:
    """The recipes of a model's layout file. Raises UserError where it is wrong."""
    for entry in layout_text.read(path):
        stated = {key: value for key, value in entry.facts.items() if key != "gpus_per_node"}
        if stated and not m.name.startswith("tiny_"):
            raise UserError(f"{entry.where}: {', '.join(stated)} follow from the recipe's name", "leave them out")
        facts = stated or recipe_facts(entry.recipe, entry.where)
        yield Recipe(
            name=m.name if entry.recipe == "default" else f"{m.name}_{entry.recipe}",
            model=m,
            task=cast(Task, facts["task"]),
            gpu=facts["gpu"],
            precision=facts["precision"],
            seq=sequence(m, facts["task"], int(facts.get("context_k") or 0)),
            gpus_per_node=entry.facts.get("gpus_per_node") or hardware.node(facts["gpu"]).gpus,
            layouts=entry.layouts,
            source=path,
            suffix=entry.recipe,
            line=entry.line,
            lines=entry.lines,
            saves=entry.saves,
        )


def recipe_facts(suffix: str, where: str) -> Mapping[str, str]:
    """Context, task, GPU and precision of a recipe, from its name without the model.

    Raises:
        UserError: when the name is not of that form, or names hardware that is not known or cannot train so.
    """
    facts, problem = _parsed(suffix)
    if problem:
        raise UserError(f"{where}: {suffix} is not [NNk_]task_gpu_precision, such as pretrain_h100_bf16", problem)
    return facts


@cache
def _parsed(suffix: str) -> tuple[dict[str, str], str]:
    """The facts in a recipe's name, and what is wrong with them."""
    match, nodes = NAME.fullmatch(suffix), hardware.builtin().nodes
    if match is None:
        return {}, f"tasks: {', '.join(TASKS)}; another one: 64k_sft_b200_mxfp8"
    facts = match.groupdict(default="")
    if facts["gpu"] not in nodes:
        near = did_you_mean(facts["gpu"], list(nodes)) or f"known: {', '.join(nodes)}"
        return facts, f"no GPU is called {facts['gpu']}; {near}"
    trained = [name for name in nodes[facts["gpu"]].gpu.precisions if name in PRECISIONS]
    return facts, "" if facts["precision"] in trained else f"{facts['gpu']} trains in {', '.join(trained)}"


def shape_for(m: Model, task: str) -> planned.ModelShape:
    """A model in a task. Only pretraining has layers that predict further tokens: imported weights lack them."""
    return m.shape if task == "pretrain" or not m.shape.mtp_layers else m.shape.replace(mtp_layers=0)


def sequence(m: Model, task: str, context_k: int = 0) -> int:
    """Tokens of a sample: `context_k` thousand where it is given; fine-tuning takes at most `FINETUNE_SEQ`."""
    if context_k:
        return context_k * 1024
    if task == "pretrain" or m.shape.positions:  # a learned table of positions keeps its length
        return m.seq
    return min(m.seq, FINETUNE_SEQ)
