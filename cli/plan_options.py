"""The options that planning verbs share, and the planned job they describe: a recipe, or a model on its GPUs."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from superpod.cli import option_syntax
from superpod.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from superpod.planner.hardware import Hardware
    from superpod.planner.models import ModelShape
    from superpod.planner.planned_job import PlannedJob


SEQ, GBS = 8192, 512
"""Tokens and samples for a model, which declares neither."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of a planning verb. Each field is an option of all verbs under `with_plan_options`, in this order."""

    name: Annotated[
        str, typer.Argument(help="A recipe, a model's name, a Hugging Face config.json, or layers=..,hidden=..")
    ]
    layout: Annotated[str | None, typer.Option("--layout", help="Such as tp=4,pp=2,sp,mbs=2,recompute=full.")] = None
    gpu: Annotated[str | None, typer.Option("--gpu", help="Such as h100, or one of --hardware.")] = None
    gpus: Annotated[int | None, typer.Option("--gpus", help="Number of GPUs.")] = None
    nodes: Annotated[int | None, typer.Option("--nodes", help="Number of nodes, instead of --gpus.")] = None
    seq: Annotated[int | None, typer.Option("--seq", help="Sequence length, tokens. Default of a model: 8192.")] = None
    gbs: Annotated[int | None, typer.Option("--gbs", help="Global batch, samples. Default of a model: 512.")] = None
    precision: Annotated[str | None, typer.Option("--precision", help="bf16, fp8cs, mxfp8, ...")] = None
    task: Annotated[str | None, typer.Option("--task", help="pretrain, sft or lora.")] = None
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="Such as moments=bf16, offload=1 or lora_targets=linear_qkv,linear_proj."),
    ] = None
    hardware: Annotated[Path | None, typer.Option("--hardware", help="TOML with your own GPUs, nodes and fabrics.")] = (
        None
    )
    fabric: Annotated[
        str | None, typer.Option("--fabric", help="Network between nodes; default: that of the GPU's SuperPOD.")
    ] = None

    def job(self, **changes: object) -> PlannedJob:
        """The planned job: a recipe's, changed by these options, or a model's. `changes` replace fields first.

        Raises:
            UserError: a name is unknown, a number is out of range, or a model comes without GPUs.
        """
        return _job(replace(self, **changes))

    @property
    def is_recipe(self) -> bool:
        """Whether the name is a recipe's, and not a model's."""
        from superpod.recipes.registry import recipes

        return self.name in recipes()

    def command(self, verb: str, *, without: tuple[str, ...] = ()) -> str:
        """The command line of another verb for the same job: `recipes plan llama3_8b --gpu h100 --gpus 16`."""
        words = ["recipes", verb, self.name]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is not None and field.name not in without:
                values = value if isinstance(value, list) else [value]
                words += [word for text in values for word in (f"--{field.name}", str(text))]
        return shlex.join(words)


def with_plan_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the decorated verb's parameter `options` by the fields of `PlanOptions`, except those in `without`.

    The name comes first. A parameter of the verb that is called like a field takes the place of that field, which
    `options` then leaves at its default.
    """

    def wrap(verb: Callable[..., None]) -> Callable[..., None]:
        own = dict(inspect.signature(verb, eval_str=True).parameters)
        shared = {name: option for name, option in _declared_options().items() if name not in without}
        passed = set(shared) - set(own)
        name, *rest = [own.pop(name, option) for name, option in shared.items()]
        parameters = [name, *(p for parameter in own.values() for p in _in_place(parameter, rest))]

        @wraps(verb)
        def call(**words: Any) -> None:
            options = PlanOptions(**{name: words.pop(name) for name in passed})
            verb(options=options, **words)

        # Typer builds a command from a function's signature, and a dozen verbs share these twelve options. Declaring
        # them once and rewriting the signature keeps every verb's options in one order, with one help text.
        # Typer reads both: the parameters from `__signature__`, their types from `__annotations__`.
        signature = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters])
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return wrap


def _in_place(parameter: inspect.Parameter, options: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return options if parameter.name == "options" else [parameter]


def _declared_options() -> dict[str, inspect.Parameter]:
    hints = get_type_hints(PlanOptions, include_extras=True)
    declared = inspect.signature(PlanOptions).parameters
    return {name: parameter.replace(annotation=hints[name]) for name, parameter in declared.items()}


def _job(options: PlanOptions) -> PlannedJob:
    from superpod.planner import hardware, legality
    from superpod.planner.hardware import precision
    from superpod.recipes.planned_job import settled

    facts = hardware.load(options.hardware) if options.hardware else hardware.builtin()
    job = _of_recipe(options, facts) if options.is_recipe else _of_model(options, facts)
    if options.gpu is not None and options.is_recipe:
        job = job.replace(node=facts.node(options.gpu), fabric=facts.fabric_of(facts.node(options.gpu)))
    if options.fabric is not None:
        job = job.replace(fabric=facts.fabric(options.fabric))
    if options.precision is not None:
        job = job.replace(precision=precision(options.precision))
    if options.seq is not None:
        job = job.replace(seq=_positive("--seq", options.seq))
    if options.gbs is not None:
        job = job.replace(layout=job.layout.replace(gbs=_positive("--gbs", options.gbs)))
    if options.task is not None:
        job = job.replace(task=_one_of("--task", options.task, ("pretrain", "sft", "lora")))
    if options.option:
        job = job.replace(options=option_syntax.options(job.options, options.option))
    job = job.replace(layout=option_syntax.layout(job.layout, options.layout)) if options.layout else job
    if not options.is_recipe or options.option or legality.violations(job):
        return job
    return settled(job)  # as a recipe of this size and layout would be built


def model(text: str) -> ModelShape:
    """A model by name, by the path of a config.json, or by its shape: `layers=32,hidden=4096,heads=32,vocab=32000`."""
    from superpod.planner import huggingface, models

    if len(text) > 4000:
        raise UserError("a model is a name, a path or a short shape; this has more than 4,000 letters")
    if "=" in text and not Path(text).exists():
        shape: dict[str, Any] = {**option_syntax.pairs(text, "the shape")}
        return models.ModelShape.from_shape(**shape)
    if text.endswith(".json") or Path(text).is_dir():
        return huggingface.from_config(text)
    return models.find(text)


def _of_recipe(options: PlanOptions, facts: Hardware) -> PlannedJob:
    from superpod.recipes.planned_job import job as recipe_job
    from superpod.recipes.registry import find

    name, nodes, gpus = options.name, options.nodes, options.gpus
    recipe = find(name)
    if nodes is not None and gpus is not None and gpus != nodes * recipe.gpus_per_node:
        raise UserError(f"--gpus {gpus} and --nodes {nodes} of {recipe.gpus_per_node} GPUs contradict each other")
    if nodes is None and gpus is not None:
        if gpus % recipe.gpus_per_node:
            raise UserError(f"{gpus} GPUs do not fill whole nodes: {name} has {recipe.gpus_per_node} GPUs a node")
        nodes = gpus // recipe.gpus_per_node
    if nodes is None or nodes in recipe.layouts:
        return recipe_job(recipe, nodes, facts=facts)
    smallest = recipe_job(recipe, None, facts=facts)  # a size without a layout of its own: the smallest size's
    return smallest.replace(gpus=_positive("--nodes", nodes) * recipe.gpus_per_node)


def _of_model(options: PlanOptions, facts: Hardware) -> PlannedJob:
    from superpod.planner import models
    from superpod.planner.layout import Layout
    from superpod.planner.planned_job import Options, PlannedJob
    from superpod.recipes.facts import absent
    from superpod.recipes.planned_job import passes_heads
    from superpod.recipes.registry import recipes, refuse_fp16

    name, gpu, gpus, nodes = options.name, options.gpu, options.gpus, options.nodes
    refuse_fp16(name)
    absent.refuse(name)
    try:
        shape = model(name)
    except UserError as unknown:
        near = did_you_mean(name, [*models.names(), *recipes()])
        raise UserError(str(unknown), near or unknown.hint) from unknown
    if gpu is None:
        raise UserError(f"{name} is a model: say on which GPU", "--gpu h100 --gpus 64, for example")
    node = facts.node(gpu)
    if gpus is not None and nodes is not None and gpus != nodes * node.gpus:
        raise UserError(f"--gpus {gpus} and --nodes {nodes} of {node.gpus} GPUs contradict each other", "give one")
    if gpus is None and nodes is None:
        raise UserError(f"{name} is a model: say on how many GPUs", f"--gpus {8 * node.gpus}, or --nodes 8")
    world = _positive("--gpus", gpus) if gpus is not None else _positive("--nodes", nodes or 0) * node.gpus
    attention = Options(cp_comm="a2a" if passes_heads(shape) else "p2p")
    return PlannedJob(shape, node, facts.fabric_of(node), world, SEQ, "bf16", Layout(gbs=GBS), options=attention)


def _positive(what: str, value: int) -> int:
    if not 1 <= value < 2**31:
        raise UserError(f"{what} is {value}; it is 1 or more")
    return value


def _one_of(what: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise UserError(f"{what} is {value!r}", did_you_mean(value, list(choices)) or f"one of {', '.join(choices)}")
    return value


def title(job: PlannedJob) -> str:
    """A planned job in one line: model, task, GPUs, precision, sequence, batch and layout."""
    from superpod.planner.explain import title

    return (
        f"{job.model.name} {job.task}, {job.gpus} x {job.node.gpu.name} {job.precision}, seq {job.seq}, "
        f"gbs {job.layout.gbs}: {title(job.layout)}"
    )
