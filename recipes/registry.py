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

from superpod.planner.errors import UserError, did_you_mean
from superpod.planner.layout import Layout

if TYPE_CHECKING:
    import nemo_run as run

FAMILIES = ("llama", "tiny")
"""The family files of this folder, in the order `recipes list` shows them."""

LAYOUTS = Path(__file__).parent / "layouts"

TABLE = re.compile(
    r"(?:(?P<context_k>\d+)k_)?(?P<task>pretrain|sft|lora|dora)"
    r"_(?P<gpu>a100|h100|h200|b200|gb200|b300|gb300)_(?P<precision>bf16|fp16|fp8ds|fp8cs|fp8bw|mxfp8)"
)
"""A recipe's name is `{model}_{table}`; this is what a table may be called."""


@dataclass(frozen=True)
class Model:
    """A model as a family file declares it: facts that need no NeMo, and the function that configures it."""

    name: str
    family: str
    make: Callable[[], run.Config]
    vocab_size: int
    """Tokens of the model's own tokenizer, unpadded."""
    seq: int
    """Sequence length it is trained at, tokens."""
    lr: float
    min_lr: float
    warmup_steps: int
    max_steps: int
    hf: str = ""
    """Hugging Face id of the weights and tokenizer."""
    tune: Callable[[run.Partial], None] | None = None
    """What this model's recipes have different from the base, beyond the layout."""

    @property
    def title(self) -> str:
        """First line of the function's docstring."""
        return (self.make.__doc__ or "").strip().splitlines()[0].rstrip(".")


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

    @property
    def nodes(self) -> tuple[int, ...]:
        """Declared node counts, ascending; the first is the default."""
        return tuple(self.layouts)

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
        importlib.import_module(f"superpod.recipes.{family}")
    return dict(_models)


@cache
def recipes() -> dict[str, Recipe]:
    """Every registered recipe by name: models in the order of their family files, tables in the file's order."""
    found = {r.name: r for m in models().values() for r in _read(m, LAYOUTS / f"{m.name}.toml")}
    return found


def find(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        UserError: naming the closest ones when there is none.
    """
    known = recipes()
    if name not in known:
        hint = did_you_mean(name, list(known)) or "`recipes list` shows them all"
        raise UserError(f"no recipe is called {name!r}", hint)
    return known[name]


def _read(m: Model, path: Path) -> Iterator[Recipe]:
    if not path.is_file():
        return
    with path.open("rb") as f:
        tables = tomllib.load(f)
    for table, values in tables.items():
        yield _recipe(m, path, table, dict(values))


def _recipe(m: Model, path: Path, table: str, values: dict[str, Any]) -> Recipe:
    where = f"{path.name} [{table}]"
    tiny = m.name.startswith("tiny_")
    match = TABLE.fullmatch(table)
    if match is None and not tiny:
        raise UserError(f"{where}: a table is called [NNk_]task_gpu_precision, such as pretrain_h100_bf16")
    facts = match.groupdict() if match else {k: values.pop(k) for k in ("task", "gpu", "precision")}
    at = values.pop("at", {})
    if not (nodes := values.pop("nodes", [])):
        raise UserError(f"{where}: nodes is missing", "list the node counts this recipe is meant to run at")
    gpus = values.pop("gpus_per_node", 4 if facts["gpu"] in ("gb200", "gb300") else 8)
    return Recipe(
        name=m.name if tiny and table == "default" else f"{m.name}_{table}",
        model=m,
        task=facts["task"],
        gpu=facts["gpu"],
        precision=facts["precision"],
        seq=int(facts["context_k"]) * 1024 if facts.get("context_k") else m.seq,
        gpus_per_node=gpus,
        layouts={n: Layout.from_mapping(values | at.get(str(n), {}), where) for n in nodes},
        source=path,
        table=table,
    )
