"""`Recipe` and `Model`, and readers of their declarations in `recipes/layouts/*.toml` and `recipes/models/*.py`.

User collections are read in the same way (common/collection.py). Nothing here imports NeMo; `superpod.recipes.build`
converts a recipe to a `run.Partial`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from superpod.collection import layout_text, user_models
from superpod.common import collection, package_files
from superpod.errors import UserError, did_you_mean
from superpod.planner import hardware
from superpod.planner import models as planned
from superpod.planner.layout import Layout

if TYPE_CHECKING:
    import nemo_run as run

RECIPES = package_files.included_folder("recipes")
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
"""The families that `recipes list` shows first; all others follow in alphabetical order."""

Task = Literal["pretrain", "sft", "lora", "dora"]
TASKS: tuple[Task, ...] = get_args(Task)
NAME = re.compile(rf"(?:(?P<context_k>\d+)k_)?(?P<task>{'|'.join(TASKS)})_(?P<gpu>\w+)_(?P<precision>[a-z0-9]+)")
"""The part of a recipe's name that follows the model's name, such as `16k_pretrain_h100_bf16`."""

PRECISIONS = tuple(name for name in hardware.PRECISIONS if name not in ("fp32", "tf32", "fp16", "nvfp4"))
"""Precisions of recipes. NeMo 2.7.3 has no NVFP4 recipe, and no working loss scaling for FP16, which is available as an
option (`with=fp16`, nemo2/options.py)."""

FINETUNE_SEQ = 4096
"""Tokens per packed fine-tuning sample, as in NVIDIA's published SFT and LoRA runs (NeMo performance summary)."""

Need = tuple[str, str, str, str]
"""Package, minimum version, first version that is too new ("" = none), and reason (`versions.Range` in `runtime/`)."""


@dataclass(frozen=True)
class Model:
    """A declared model: the facts that are known without NeMo, and the function that creates its configuration."""

    name: str
    family: str
    make: Callable[[], run.Config]
    seq: int
    """Sequence length in pretraining, in tokens."""
    lr: float
    """Peak learning rate in pretraining."""
    min_lr: float
    warmup_steps: int
    max_steps: int
    """Number of pretraining steps."""
    sft_lr: float = 5e-6
    """Peak learning rate in full fine-tuning, as in NeMo's recipes."""
    hf: str = ""
    """Hugging Face ID of the weights and tokenizer from which fine-tuning starts."""
    not_imported: str = ""
    """Why NeMo's importer cannot import the weights `hf`, or ""."""
    import_instead: str = ""
    """What to import instead of `hf`."""
    mtp_layers: int = 0
    """Multi-token prediction layers on the last pipeline stage."""
    unproven: str = ""
    """Why rehearsing the model requires a machine with a GPU, or ""."""
    broken: str = ""
    """Why the model cannot train with the pinned versions, or ""."""
    workaround: str = ""
    """What to do about `broken`."""
    needs: tuple[Need, ...] = ()
    """Required package versions, in addition to those required by all recipes (`runtime/runs/versions.py`)."""
    tune: Callable[[run.Partial], None] | None = None
    """Function that modifies the model's recipes after all other fields are set."""

    @cached_property
    def shape(self) -> planned.ModelShape:
        """The planner's shape of the model."""
        return planned.find(self.name).replace(mtp_layers=self.mtp_layers)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the model's tokenizer, without padding."""
        return self.shape.vocab

    @property
    def title(self) -> str:
        """First line of the docstring of `make`, without the period."""
        return (self.make.__doc__ or "").strip().splitlines()[0].rstrip(".")


@dataclass(frozen=True)
class Schedule:
    """Learning rate and steps of a recipe at its declared global batch size."""

    lr: float
    """Peak learning rate."""
    min_lr: float
    warmup_steps: int
    max_steps: int


ADAPTERS = ("lora", "dora")
"""Tasks that train adapters on top of frozen weights."""


ADAPTER_LR = 1e-4
"""Peak learning rate of adapters (NeMo 2.7.3, finetune_recipe of every model)."""


@dataclass(frozen=True)
class Recipe:
    """A registered recipe: model, task, hardware, precision, and a layout per number of nodes."""

    name: str
    model: Model
    task: Task
    gpu: str
    precision: str
    seq: int
    gpus_per_node: int
    layouts: dict[int, Layout] = field(hash=False)
    """Number of nodes -> layout, for each declared size."""
    source: Path
    """The layout file that declares the recipe."""
    suffix: str
    """Name of the recipe without the name of its model."""
    line: int = field(default=1, compare=False)
    """First line of the recipe in `source`."""
    lines: Mapping[int, int] = field(default_factory=dict, hash=False, compare=False)
    """Number of nodes -> line of the layout in `source`."""
    saves: Mapping[int, int] = field(default_factory=dict, hash=False)
    """Number of nodes -> declared steps between two checkpoints; computed for all other sizes."""

    @property
    def shape(self) -> planned.ModelShape:
        """The planner's shape of the model in this task."""
        return shape_for(self.model, self.task)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Declared numbers of nodes in ascending order; the first is the default."""
        return tuple(self.layouts)

    @property
    def schedule(self) -> Schedule:
        """The model's schedule in pretraining; in fine-tuning, 1,000 steps with a short warm-up and decay to 0."""
        m = self.model
        if self.task == "pretrain":
            return Schedule(m.lr, m.min_lr, m.warmup_steps, m.max_steps)
        lr = ADAPTER_LR if self.task in ADAPTERS else m.sft_lr
        return Schedule(lr, 0.0, warmup_steps=50, max_steps=1000)

    def layout(self, num_nodes: int | None = None) -> Layout:
        """Return the layout at `num_nodes` (default: the smallest declared size).

        Raises:
            UserError: the recipe does not declare that size.
        """
        size = self.nodes[0] if num_nodes is None else num_nodes
        if size not in self.layouts:
            sizes = ", ".join(map(str, self.nodes))
            raise UserError(f"{self.name} has no layout for {size} nodes", f"choose one of: {sizes}")
        return self.layouts[size]


_models: dict[str, Model] = {}


def nemo(model: str, config: str, **sizes: Any) -> run.Config:
    """Return the configuration of a NeMo model class and its config class, both in `nemo.collections.llm`."""
    import nemo_run as run
    from nemo.collections import llm

    return run.Config(getattr(llm, model), config=run.Config(getattr(llm, config), **sizes))


def model(**facts: Any) -> Callable[[Callable[[], run.Config]], Callable[[], run.Config]]:
    """Register the decorated function as a model under its own name. `facts` are fields of `Model`.

    Raises:
        UserError: a fact is unknown or missing, or another model has the same name.
    """

    def wrap(make: Callable[[], run.Config]) -> Callable[[], run.Config]:
        name = make.__name__
        if name in _models:
            places = f"{_file(_models[name].make)} and {_file(make)}"
            raise UserError(f"two models are named {name}: in {places}", "rename one of them")
        try:
            _models[name] = Model(name=name, family=user_models.family(make.__module__), make=make, **facts)
        except TypeError as error:
            problem = str(error).removeprefix("Model.__init__() ")
            raise UserError(f"{name}: {problem}", "@model needs seq, lr, min_lr, warmup_steps, max_steps") from error
        return make

    return wrap


def _file(function: Callable[..., Any]) -> str:
    return function.__code__.co_filename


def families() -> list[str]:
    """List the model families, which are the files in recipes/models/, in the order of `recipes list`."""
    files = sorted(path.stem for path in (RECIPES / "models").glob("[!_]*.py"))
    return sorted(files, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


@cache
def models() -> dict[str, Model]:
    """Return all models by name: first the built-in models, then those of user collections.

    Raises:
        UserError: a file in a collection cannot be imported, or a model has no shape.
    """
    for family in families():
        importlib.import_module(f"superpod.collection.models.{family}")
    built_in = set(_models)
    user_models.load()
    for name in [name for name in _models if name not in built_in]:
        _check_user_model(_models[name])
        _models[name] = replace(_models[name], make=user_models.with_located_errors(_models[name].make))
    return dict(_models)


def _check_user_model(m: Model) -> None:
    """Check that a model in a user collection has a title and a shape."""
    place = f"{_file(m.make)}:{m.make.__code__.co_firstlineno}"
    if not (m.make.__doc__ or "").strip():
        raise UserError(f"{place}: {m.name} has no docstring", "write one; its first line is the title of the model")
    try:
        _ = m.shape
    except UserError as error:
        hint = f"describe it in shapes/*.toml, or copy its config.json to shapes/{m.name}.json"
        raise UserError(f"{place}: {error}", hint) from error


@cache
def recipes() -> dict[str, Recipe]:
    """Return all recipes by name, in the order of the models and, for each model, of its layout file.

    Raises:
        UserError: a layout file is invalid, or not named after a model.
    """
    for path in collection.files("layouts"):
        if path.stem not in models():
            hint = did_you_mean(path.stem, list(models())) or "name the file after its model"
            raise UserError(f"{path}: there is no model {path.stem!r}", hint)
    return {name: recipe for m in models().values() for name, recipe in recipes_for(m).items()}


def is_recipe(name: str) -> bool:
    """Return whether a recipe has this name. Reads only the layout files of models with which the name begins.

    Raises:
        UserError: as in `recipes`, if user collections have layout files.
    """
    if collection.files("layouts"):
        return name in recipes()
    return any(name in recipes_for(m) for m in models().values() if name.startswith(m.name))


@cache
def recipes_for(m: Model) -> dict[str, Recipe]:
    """Return the recipes of a model: first those in the built-in layout file, then those in user collections.

    Raises:
        UserError: a layout file is invalid, or two files declare the same recipe.
    """
    declared: dict[str, Recipe] = {}
    for path in layout_files(m.name):
        for recipe in read(m, path):
            earlier_recipe = declared.get(recipe.name)
            if earlier_recipe:
                hint = "choose a different context length, GPU or precision"
                if path == earlier_recipe.source:
                    hint = "remove one of the two"
                message = f"{path}:{recipe.line}: {recipe.name} is already declared in {earlier_recipe.source}"
                raise UserError(message, hint)
            declared[recipe.name] = recipe
    return declared


def layout_files(name: str) -> list[Path]:
    """List the layout files of a model, the built-in one first."""
    candidates = (LAYOUTS / f"{name}.toml", *collection.files("layouts"))
    return [path for path in candidates if path.stem == name and path.is_file()]


def read(m: Model, path: Path) -> Iterator[Recipe]:
    """Read a model's recipes from a layout file. Raises UserError if the file is invalid."""
    for entry in layout_text.read(path):
        stated_facts = {key: value for key, value in entry.facts.items() if key != "gpus_per_node"}
        if stated_facts and not m.name.startswith("tiny_"):
            message = f"{entry.where}: {', '.join(stated_facts)} cannot be set; the name of the recipe determines them"
            raise UserError(message, "remove them")
        facts = stated_facts or recipe_facts(entry.recipe, entry.where)
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
    """Parse context length, task, GPU and precision from a recipe name without its model.

    Raises:
        UserError: the name does not have this form, or the GPU or its precision is unknown.
    """
    facts, problem = _parse_suffix(suffix)
    if problem:
        message = f"{where}: {suffix} must have the form [NNk_]TASK_GPU_PRECISION, such as pretrain_h100_bf16"
        raise UserError(message, problem)
    return facts


@cache
def _parse_suffix(suffix: str) -> tuple[dict[str, str], str]:
    """Return the facts in the name of a recipe, and a hint if they are invalid, or ""."""
    match, nodes = NAME.fullmatch(suffix), hardware.builtin().nodes
    if match is None:
        return {}, f"the tasks are {', '.join(TASKS)}; another example: 64k_sft_b200_mxfp8"
    facts = match.groupdict(default="")
    gpu = facts["gpu"]
    if gpu not in nodes:
        closest = did_you_mean(gpu, list(nodes)) or f"known GPUs: {', '.join(nodes)}"
        return facts, f"there is no GPU {gpu}; {closest}"
    supported_precisions = [name for name in nodes[gpu].gpu.precisions if name in PRECISIONS]
    return facts, "" if facts[
        "precision"
    ] in supported_precisions else f"precisions on {gpu}: {', '.join(supported_precisions)}"


def shape_for(m: Model, task: str) -> planned.ModelShape:
    """Return the shape of a model in a task. Only pretraining has MTP layers, because imported weights lack them."""
    if task == "pretrain" or not m.shape.mtp_layers:
        return m.shape
    return m.shape.replace(mtp_layers=0)


def sequence(m: Model, task: str, context_k: int = 0) -> int:
    """Return the sequence length: `context_k` x 1024 if given, else that of the model, for fine-tuning at most 4096."""
    if context_k:
        return context_k * 1024
    if task == "pretrain" or m.shape.positions:  # the embedding of learned positions has a fixed length
        return m.seq
    return min(m.seq, FINETUNE_SEQ)
