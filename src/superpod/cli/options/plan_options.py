"""Options of the planning commands, and the planned job that they describe: a recipe, or a model on a set of GPUs."""

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
"""Default sequence length (tokens) and global batch size (samples) for a model, which declares neither."""
COUNT_LIMIT = 2**31
"""Exclusive upper limit of counts; the product of two such counts does not overflow numpy's int64."""
EXAMPLES = {"--gpus": 8, "--nodes": 1, "--seq": SEQ, "--gbs": GBS}
"""A valid value of each option, for hints."""
TASKS = ("pretrain", "sft", "lora")


@dataclass(frozen=True)
class PlanOptions:
    """Options of a planning command. Each field is an option of all commands decorated with `with_plan_options`."""

    name: Annotated[
        str,
        typer.Argument(
            help="Recipe, model, Hugging Face config.json, or model shape: layers=..,hidden=..",
            callback=spellings.normalize_name,
        ),
    ]
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="Parallel layout, such as tp=4,pp=2,sp,recompute=full; auto = the fastest according to the planner.",
        ),
    ] = None
    gpu: Annotated[str | None, typer.Option("--gpu", help="GPU type, such as h100 or one defined in --hardware.")] = (
        None
    )
    gpus: Annotated[int | None, typer.Option("--gpus", help="Number of GPUs.")] = None
    nodes: Annotated[int | None, typer.Option("--nodes", help="Number of nodes, instead of --gpus.")] = None
    seq: Annotated[int | None, typer.Option("--seq", help="Sequence length in tokens. Default for a model: 8192.")] = (
        None
    )
    gbs: Annotated[
        int | None, typer.Option("--gbs", help="Global batch size in samples. Default for a model: 512.")
    ] = None
    batch_tokens: size_options.BatchTokens = None
    precision: Annotated[
        str | None, typer.Option("--precision", help="Training precision: bf16, fp8cs, mxfp8, ...")
    ] = None
    task: Annotated[str | None, typer.Option("--task", help="Training task: pretrain, sft or lora.")] = None
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            help="Variant, such as moments=bf16, offload=1 or lora_targets=linear_qkv,linear_proj; repeatable.",
        ),
    ] = None
    hardware: Annotated[
        Path | None, typer.Option("--hardware", help="TOML file with your own GPUs, nodes and fabrics.")
    ] = None
    fabric: Annotated[
        str | None, typer.Option("--fabric", help="Network between nodes. Default: as in a SuperPOD with this GPU.")
    ] = None

    def job(self, **changes: object) -> PlannedJob:
        """Return the planned job for these options; `changes` replaces fields of the options first.

        Raises:
            UserError: a name is unknown, a number is out of range, or a model is given without GPUs.
        """
        options = replace(self, **changes)
        return _recipe_job(options) if options.is_recipe else _model_job(options)

    def job_to_search(self, **changes: object) -> PlannedJob:
        """Return the job for a search over layouts, which uses only the global batch size from the job's layout.

        Raises:
            UserError: as in `job`.
        """
        options = replace(self, **changes)
        return _recipe_job_to_search(options) if options.is_recipe else _model_job(options)

    def model_job(self, **changes: object) -> PlannedJob:
        """Return the job for the model called `name`, even if a recipe has the same name. Raises UserError."""
        return _model_job(replace(self, **changes))

    def size(self) -> size_options.SizeOptions:
        """Return the subset of these options that `SizeOptions` has."""
        return size_options.SizeOptions(self.nodes, self.gpus, self.seq, self.gbs, self.batch_tokens, self.layout)

    @property
    def is_recipe(self) -> bool:
        """Whether `name` is a recipe rather than a model."""
        from superpod.collection import registry

        return registry.is_recipe(self.name)

    def command(self, name: str, *, without: tuple[str, ...] = (), overrides: Sequence[str] = ()) -> str:
        """Return the command line of the command `name` for the same job: `recipes plan llama3_8b --gpu h100`."""
        command = ["recipes", name, self.name, *overrides]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is None or field.name in without:
                continue
            for one in value if isinstance(value, list) else [value]:
                command += [f"--{field.name.replace('_', '-')}", str(one)]
        return shlex.join(command)


def with_plan_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameter `options` of a command by the fields of `PlanOptions`, as `shared_options.spread` does."""
    return spread(PlanOptions, "options", *without, name_first=True)


def _hardware(options: PlanOptions) -> Hardware:
    from superpod.planner import hardware

    return hardware.load(options.hardware) if options.hardware else hardware.builtin()


def _recipe_job(options: PlanOptions) -> PlannedJob:
    """Return the job of a recipe at the requested size, with its own layout or the requested one."""
    request = options.size().request(options.name)
    recipe = request.sized_recipe()
    size_options.print_notes(request.notes())
    return _changed_recipe_job(options, recipe, request.num_nodes)


def _recipe_job_to_search(options: PlanOptions) -> PlannedJob:
    """Return the job of a recipe at the requested size and batch size, without choosing a layout."""
    from superpod.collection.registry import find
    from superpod.collection.sizes import sized

    request = options.size().request(options.name)
    recipe, size = find(options.name), request.size()
    sized.check(recipe, size)
    batch, seq = sized.requested_batch(recipe, size), size.seq or recipe.seq
    if size.batch_tokens and size.batch_tokens != batch * seq:
        size_options.print_note(
            f"tokens per step: {batch * seq:,} (gbs {batch:,} x seq {seq:,}), the nearest round batch size"
        )
    request = replace(request, gbs=None, batch_tokens=None, layout=recipe.layout().replace(gbs=batch))
    return _changed_recipe_job(options, request.sized_recipe(), request.num_nodes)


def _changed_recipe_job(options: PlanOptions, recipe: Recipe, nodes: int | None) -> PlannedJob:
    """Return the job of a recipe with the changes from the options; without --option, use the settings NeMo applies."""
    from superpod.collection import recipe_job
    from superpod.planner import legality

    facts = _hardware(options)
    job = recipe_job.job(recipe, nodes, facts=facts)
    if options.gpu is not None:
        job = job.replace(node=facts.node(options.gpu), fabric=facts.fabric_of(facts.node(options.gpu)))
    job = _changed_job(options, job, facts)
    _note_uncalibrated(options, job, facts)
    if options.option or legality.violations(job):
        return job
    return recipe_job.resolve_parameters(job)


def _changed_job(options: PlanOptions, job: PlannedJob, facts: Hardware) -> PlannedJob:
    """Return the job with the requested fabric, precision, task and options."""
    from superpod.planner.hardware import precision

    if options.fabric is not None:
        job = job.replace(fabric=facts.fabric(options.fabric))
    if options.precision is not None:
        job = job.replace(precision=precision(options.precision))
    if options.task is not None:
        job = job.replace(task=_require_task(options.task))
    if options.option:
        job = job.replace(options=option_syntax.change_options(job.options, options.option))
    return job


def _with_layout(job: PlannedJob, text: str | None) -> PlannedJob:
    """Return the job of a model with the layout given by `--layout`."""
    from superpod.planner import plans

    if text == size_options.AUTO:
        return plans.best(job)
    if text is None:
        return job
    layout, note = option_syntax.layout_for_model(job.layout, text, job.model.layers)
    if note:
        size_options.print_note(note)
    return job.replace(layout=layout)


def _model_job(options: PlanOptions) -> PlannedJob:
    """Return the job of a model with the layout given by `--layout`; without it, use data parallelism only."""
    from superpod.collection.recipe_job import exchanges_heads
    from superpod.planner.layout import Layout
    from superpod.planner.planned_job import Options, PlannedJob

    shape, facts = _model_shape(options.name), _hardware(options)
    node, world = _node_and_gpus(options, facts)
    attention = Options(cp_comm="a2a" if exchanges_heads(shape) else "p2p")
    seq = SEQ if options.seq is None else _require_positive("--seq", options.seq)
    layout = Layout(gbs=_global_batch(options, seq))
    job = PlannedJob(shape, node, facts.fabric_of(node), world, seq, "bf16", layout, options=attention)
    _note_uncalibrated(options, job, facts)
    return _with_layout(_changed_job(options, job, facts), options.layout)


def _note_uncalibrated(options: PlanOptions, job: PlannedJob, facts: Hardware) -> None:
    """Print a note if --hardware calibrates only other GPUs, so that this one keeps the built-in calibration."""
    from superpod.planner.calibration import corrections

    gpu_name = job.node.gpu.name
    calibrated = [gpu.name for gpu in facts.gpus.values() if corrections.decode(gpu.calibrated_as)[1]]
    if options.hardware and calibrated and gpu_name not in calibrated:
        size_options.print_note(
            f"{options.hardware} calibrates {', '.join(calibrated)}; {gpu_name} is planned with the built-in "
            "calibration"
        )


def _model_shape(name: str) -> ModelShape:
    """Return the shape of a model; if `name` is an alias, the shape has the alias as its name.

    Raises:
        UserError: the model is unknown, or the planner does not support it.
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
        suggestion = did_you_mean(name, [*models.names(), *recipes()])
        raise UserError(str(unknown), suggestion or unknown.hint) from unknown
    return shape.replace(name=name) if name in table.aliases() else shape


def _node_and_gpus(options: PlanOptions, facts: Hardware) -> tuple[Node, int]:
    """Return the node type and the total number of GPUs for the job of a model."""
    name, gpu, gpus, nodes = options.name, options.gpu, options.gpus, options.nodes
    if gpu is None:
        raise UserError(f"{name} is a model, so the GPU type is needed", "add --gpu h100 --gpus 64, for example")
    node = facts.node(gpu)
    if gpus is not None and nodes is not None and gpus != nodes * node.gpus:
        raise UserError(
            f"--gpus {gpus} conflicts with --nodes {nodes} ({node.gpus} GPUs per node)", "leave one of them out"
        )
    if gpus is not None:
        return node, _require_positive("--gpus", gpus)
    if nodes is not None:
        return node, _require_positive("--nodes", nodes) * node.gpus
    raise UserError(
        f"{name} is a model, so the number of GPUs is needed", f"add --gpus {8 * node.gpus} or --nodes 8, for example"
    )


def _global_batch(options: PlanOptions, seq: int) -> int:
    """Return the global batch size in samples for the job of a model."""
    tokens = size_options.parse_batch_tokens(options.batch_tokens)
    if tokens is None:
        return GBS if options.gbs is None else _require_positive("--gbs", options.gbs)
    gbs = max(1, round(tokens / seq))
    if options.gbs is not None and options.gbs != gbs:
        raise UserError(f"--gbs {options.gbs} conflicts with --batch-tokens {tokens}", "leave one of them out")
    if gbs * seq != tokens:
        size_options.print_note(
            f"tokens per step: {gbs * seq:,} (gbs {gbs:,} x seq {seq:,}), the nearest to {tokens:,}"
        )
    return gbs


def _require_positive(option: str, value: int) -> int:
    if not 1 <= value < COUNT_LIMIT:
        raise UserError(
            f"{option} must be between 1 and {COUNT_LIMIT - 1:,}, not {value}",
            f"for example {option} {EXAMPLES[option]}",
        )
    return value


def _require_task(task: str) -> str:
    if task not in TASKS:
        allowed = ", ".join(TASKS)
        raise UserError(f"--task must be one of {allowed}, not {task!r}", did_you_mean(task, list(TASKS)))
    return task


def job_title(job: PlannedJob) -> str:
    """Describe a planned job in one line: model, task, GPUs, precision, sequence length, batch and layout."""
    from superpod.planner import explain

    return (
        f"{job.model.name} {job.task}, {job.gpus} x {job.node.gpu.name} {job.precision}, seq {job.seq}, "
        f"gbs {job.layout.gbs}: {explain.title(job.layout)}"
    )
