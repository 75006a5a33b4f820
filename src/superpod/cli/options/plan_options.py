"""The options that planning verbs share, and the planned job they describe: a recipe, or a model on its GPUs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import spellings
from superpod.cli.options import size_options
from superpod.cli.options.shared_options import spread
from superpod.errors import UserError, did_you_mean
from superpod.planner.formats import option_syntax

if TYPE_CHECKING:
    from superpod.collection.registry import Recipe
    from superpod.planner.hardware import Hardware, Node
    from superpod.planner.models import ModelShape
    from superpod.planner.planned_job import PlannedJob


SEQ, GBS = 8192, 512
"""Tokens and samples for a model, which declares neither."""
MOST = 2**31
"""No count of GPUs, tokens or samples reaches it; numpy's products of two of them stay exact."""
EXAMPLES = {"--gpus": 8, "--nodes": 1, "--seq": SEQ, "--gbs": GBS}
"""A number that each can have."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of a planning verb. Each field is an option of all verbs under `with_plan_options`, in this order."""

    name: Annotated[
        str,
        typer.Argument(
            help="A recipe, a model's name, a Hugging Face config.json, or layers=..,hidden=..",
            callback=spellings.model_or_recipe,
        ),
    ]
    layout: Annotated[
        str | None, typer.Option("--layout", help="Such as tp=4,pp=2,sp,recompute=full; auto = the planner's fastest.")
    ] = None
    gpu: Annotated[str | None, typer.Option("--gpu", help="Such as h100, or one of --hardware.")] = None
    gpus: Annotated[int | None, typer.Option("--gpus", help="Number of GPUs.")] = None
    nodes: Annotated[int | None, typer.Option("--nodes", help="Number of nodes, instead of --gpus.")] = None
    seq: Annotated[int | None, typer.Option("--seq", help="Sequence length, tokens. Default of a model: 8192.")] = None
    gbs: Annotated[int | None, typer.Option("--gbs", help="Global batch, samples. Default of a model: 512.")] = None
    batch_tokens: size_options.BatchTokens = None
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
        options = replace(self, **changes)
        return _of_recipe(options) if options.is_recipe else _of_model(options)

    def job_to_search(self, **changes: object) -> PlannedJob:
        """`job` for a verb that ranks layouts itself: of this one only the global batch counts. Raises as `job`."""
        options = replace(self, **changes)
        return _of_recipe_in_any_layout(options) if options.is_recipe else _of_model(options)

    def job_of_model(self, **changes: object) -> PlannedJob:
        """As `job`, of the model of that name, also where a recipe is called like it."""
        return _of_model(replace(self, **changes))

    def size(self) -> size_options.SizeOptions:
        """Those that say the size of a recipe's run.

        Raises:
            UserError: --gpus and --nodes contradict each other, or are no whole nodes.
        """
        return size_options.SizeOptions(self.nodes, self.gpus, self.seq, self.gbs, self.batch_tokens, self.layout)

    @property
    def is_recipe(self) -> bool:
        """Whether the name is a recipe's, and not a model's."""
        from superpod.collection.registry import recipes

        return self.name in recipes()

    def command(self, verb: str, *, without: tuple[str, ...] = (), overrides: Sequence[str] = ()) -> str:
        """The command line of another verb for the same job: `recipes plan llama3_8b --gpu h100 --gpus 16`."""
        words = ["recipes", verb, self.name, *overrides]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is not None and field.name not in without:
                values = value if isinstance(value, list) else [value]
                words += [word for text in values for word in (f"--{field.name.replace('_', '-')}", str(text))]
        return shlex.join(words)


def with_plan_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the decorated verb's parameter `options` by the fields of `PlanOptions`: `shared_options.spread`."""
    return spread(PlanOptions, "options", *without, name_first=True)


def _facts(options: PlanOptions) -> Hardware:
    from superpod.planner import hardware

    return hardware.load(options.hardware) if options.hardware else hardware.builtin()


def _of_recipe(options: PlanOptions) -> PlannedJob:
    """The recipe's job at its size, in the layout that it has there or that is asked for."""
    request = options.size().request(options.name)
    recipe = request.sized()
    size_options.say(request.notes())
    return _changed_recipe(options, recipe, request.num_nodes)


def _of_recipe_in_any_layout(options: PlanOptions) -> PlannedJob:
    """The recipe's job at its size and batch, where the caller ranks layouts itself."""
    from superpod.collection.registry import find
    from superpod.collection.sizes import sized

    request = options.size().request(options.name)
    recipe, size = find(options.name), request.size()
    sized.check(recipe, size)
    batch, seq = sized.wanted_batch(recipe, size), size.seq or recipe.seq
    if size.batch_tokens and size.batch_tokens != batch * seq:
        size_options.say([f"tokens a step: {batch * seq:,} (gbs {batch:,} x seq {seq:,}), the nearest round batch"])
    request = replace(request, gbs=None, batch_tokens=None, layout=recipe.layout().replace(gbs=batch))
    return _changed_recipe(options, request.sized(), request.num_nodes)


def _changed_recipe(options: PlanOptions, recipe: Recipe, nodes: int | None) -> PlannedJob:
    """A recipe's job with the options that change it, decided as a recipe would be built where none says otherwise."""
    from superpod.collection import recipe_job
    from superpod.planner import legality

    facts = _facts(options)
    job = recipe_job.job(recipe, nodes, facts=facts)
    if options.gpu is not None:
        job = job.replace(node=facts.node(options.gpu), fabric=facts.fabric_of(facts.node(options.gpu)))
    job = _changed(options, job, facts)
    _say_uncalibrated(options, job, facts)
    return job if options.option or legality.violations(job) else recipe_job.settled(job)


def _changed(options: PlanOptions, job: PlannedJob, facts: Hardware) -> PlannedJob:
    """The job with the fabric, precision, task and options that are asked for."""
    from superpod.planner.hardware import precision

    if options.fabric is not None:
        job = job.replace(fabric=facts.fabric(options.fabric))
    if options.precision is not None:
        job = job.replace(precision=precision(options.precision))
    if options.task is not None:
        job = job.replace(task=_one_of("--task", options.task, ("pretrain", "sft", "lora")))
    return job.replace(options=option_syntax.options(job.options, options.option)) if options.option else job


def _in_layout(job: PlannedJob, text: str | None) -> PlannedJob:
    """A model's job in the layout that `--layout` says."""
    from superpod.planner import plans

    if text == size_options.AUTO:
        return plans.best(job)
    if text is None:
        return job
    layout, note = option_syntax.layout_of_model(job.layout, text, job.model.layers)
    size_options.say([note] if note else [])
    return job.replace(layout=layout)


def _of_model(options: PlanOptions) -> PlannedJob:
    """The job of a model on its GPUs, in the layout that `--layout` says; without one, in data parallelism alone."""
    from superpod.collection.recipe_job import passes_heads
    from superpod.planner.layout import Layout
    from superpod.planner.planned_job import Options, PlannedJob

    shape, facts = _shape(options.name), _facts(options)
    node, world = _gpus_of_model(options, facts)
    attention = Options(cp_comm="a2a" if passes_heads(shape) else "p2p")
    seq = SEQ if options.seq is None else _positive("--seq", options.seq)
    layout = Layout(gbs=_batch(options, seq))
    job = PlannedJob(shape, node, facts.fabric_of(node), world, seq, "bf16", layout, options=attention)
    _say_uncalibrated(options, job, facts)
    return _in_layout(_changed(options, job, facts), options.layout)


def _say_uncalibrated(options: PlanOptions, job: PlannedJob, facts: Hardware) -> None:
    """A note where --hardware has the calibration of other GPUs only: this one is planned as shipped."""
    from superpod.planner.calibration import corrections

    own = job.node.gpu.name
    calibrated = [gpu.name for gpu in facts.gpus.values() if corrections.split(gpu.calibrated_as)[1]]
    if options.hardware and calibrated and own not in calibrated:
        size_options.say([f"{options.hardware} calibrates {', '.join(calibrated)}; {own} is planned as shipped"])


def _shape(name: str) -> ModelShape:
    """The model of that name, which it keeps where it is another one's too.

    Raises:
        UserError: there is none, or it is known and not planned.
    """
    from superpod.collection.facts import absent
    from superpod.collection.registry import recipes, refuse_fp16
    from superpod.planner import models
    from superpod.planner.models import named_model, table

    refuse_fp16(name)
    absent.refuse(name)
    try:
        shape = named_model.find(name)
    except UserError as unknown:
        near = did_you_mean(name, [*models.names(), *recipes()])
        raise UserError(str(unknown), near or unknown.hint) from unknown
    return shape.replace(name=name) if name in table.aliases() else shape


def _gpus_of_model(options: PlanOptions, facts: Hardware) -> tuple[Node, int]:
    """The node that a model is planned on, and how many GPUs there are in all."""
    name, gpu, gpus, nodes = options.name, options.gpu, options.gpus, options.nodes
    if gpu is None:
        raise UserError(f"{name} is a model: say on which GPU", "--gpu h100 --gpus 64, for example")
    node = facts.node(gpu)
    if gpus is not None and nodes is not None and gpus != nodes * node.gpus:
        raise UserError(f"--gpus {gpus} and --nodes {nodes} of {node.gpus} GPUs contradict each other", "give one")
    if gpus is None and nodes is None:
        raise UserError(f"{name} is a model: say on how many GPUs", f"--gpus {8 * node.gpus}, or --nodes 8")
    return node, _positive("--gpus", gpus) if gpus is not None else _positive("--nodes", nodes or 0) * node.gpus


def _batch(options: PlanOptions, seq: int) -> int:
    """The global batch of a model's job, samples."""
    tokens = size_options.tokens(options.batch_tokens)
    if tokens is None:
        return GBS if options.gbs is None else _positive("--gbs", options.gbs)
    gbs = max(1, round(tokens / seq))
    if options.gbs is not None and options.gbs != gbs:
        raise UserError(f"--gbs {options.gbs} and --batch-tokens {tokens} contradict each other", "give one")
    if gbs * seq != tokens:
        size_options.say([f"tokens a step: {gbs * seq:,} (gbs {gbs:,} x seq {seq:,}), the nearest to {tokens:,}"])
    return gbs


def _positive(what: str, value: int) -> int:
    if not 1 <= value < MOST:
        example = f"write a whole number of at least 1, such as {what} {EXAMPLES[what]}"
        raise UserError(f"{what} is {value}; it is 1 to {MOST - 1:,}", example)
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
