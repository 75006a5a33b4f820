"""Options of the planning commands, which describe a planned job: a recipe, or a model on a number of GPUs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import spellings
from superpod.cli.options import size_options
from superpod.cli.options.hardware_option import HardwareFile
from superpod.cli.options.shared_options import spread
from superpod.errors import UserError, did_you_mean
from superpod.planner.formats import option_syntax

if TYPE_CHECKING:
    from superpod.collection.registry import Recipe
    from superpod.planner.hardware import Hardware, Node
    from superpod.planner.models import ModelShape
    from superpod.planner.planned_job import PlannedJob


SEQ, GBS = 8192, 512
"""Default sequence length (tokens) and global batch size (samples) for a model, which has none of its own."""
COUNT_LIMIT = 2**31
"""Exclusive upper limit of counts, so that the product of two counts does not overflow numpy's int64."""
EXAMPLES = {"--gpus": 8, "--nodes": 1, "--seq": SEQ, "--gbs": GBS}
"""A valid value of each option, for hints in error messages."""
TASKS = ("pretrain", "sft", "lora")


@dataclass(frozen=True)
class PlanOptions:
    """Options that describe a planned job; each field is an option of the commands with `with_plan_options`."""

    name: Annotated[
        str,
        typer.Argument(
            help="Recipe, model, Hugging Face config.json, or model shape such as layers=32,hidden=4096,...",
            callback=spellings.normalize_name,
        ),
    ]
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="Parallel layout, such as tp=4,pp=2,sp,recompute=full; auto selects the fastest one.",
        ),
    ] = None
    gpu: Annotated[str | None, typer.Option("--gpu", help="GPU type, such as h100, or one in --hardware.")] = None
    gpus: Annotated[int | None, typer.Option("--gpus", help="Number of GPUs.")] = None
    nodes: Annotated[int | None, typer.Option("--nodes", help="Number of nodes, instead of --gpus.")] = None
    seq: Annotated[int | None, typer.Option("--seq", help="Sequence length in tokens; 8192 for a model.")] = None
    gbs: Annotated[int | None, typer.Option("--gbs", help="Global batch size in samples; 512 for a model.")] = None
    batch_tokens: size_options.BatchTokens = None
    precision: Annotated[str | None, typer.Option("--precision", help="Precision: bf16, fp8cs, mxfp8, ...")] = None
    task: Annotated[str | None, typer.Option("--task", help="Training task: pretrain, sft or lora.")] = None
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            help="Variant, such as moments=bf16, offload=1 or lora_targets=linear_qkv,linear_proj; repeatable.",
        ),
    ] = None
    hardware: HardwareFile = None
    fabric: Annotated[
        str | None,
        typer.Option("--fabric", help="Network between nodes, such as ib_ndr. Default: that of the GPU's SuperPOD."),
    ] = None

    def job(self, **changes: object) -> PlannedJob:
        """Return the planned job for these options, after replacing the fields in `changes`.

        Raises:
            UserError: a name is unknown, a number is out of range, or a model is given without a GPU type and number.
        """
        options = replace(self, **changes)
        return _recipe_job(options) if options.is_recipe else _model_job(options)

    def job_to_search(self, **changes: object) -> PlannedJob:
        """Return the job for a search over layouts; only the global batch size of its own layout is relevant.

        Raises:
            UserError: see `job`.
        """
        options = replace(self, **changes)
        return _recipe_job_to_search(options) if options.is_recipe else _model_job(options)

    def model_job(self, **changes: object) -> PlannedJob:
        """Return the job for the model called `name`, even if a recipe has the same name. Raises UserError."""
        return _model_job(replace(self, **changes))

    def size(self) -> size_options.SizeOptions:
        """Return the options for nodes, GPUs, sequence length, batch size and layout as `SizeOptions`."""
        return size_options.SizeOptions(self.nodes, self.gpus, self.seq, self.gbs, self.batch_tokens, self.layout)

    @property
    def is_recipe(self) -> bool:
        """Whether `name` is a recipe rather than a model."""
        from superpod.collection import registry

        return registry.is_recipe(self.name)

    def command(self, name: str, *, without: tuple[str, ...] = (), overrides: Sequence[str] = ()) -> str:
        """Return a command line for the same job, quoted for the shell, such as `recipes plan llama3_8b --gpu h100`.

        Args:
            name: command of `recipes`, such as "plan".
            without: fields of these options to leave out.
            overrides: overrides to add after the name of the recipe.
        """
        command = ["recipes", name, self.name, *overrides]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is None or field.name in without:
                continue
            for one in value if isinstance(value, list) else [value]:
                command += [f"--{field.name.replace('_', '-')}", str(one)]
        return shlex.join(command)


def with_plan_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces the parameter `options` of a command by the fields of `PlanOptions`.

    `without` names fields to leave out; see `shared_options.spread`.
    """
    return spread(PlanOptions, "options", *without, name_first=True)


def _hardware(options: PlanOptions) -> Hardware:
    from superpod.planner import hardware

    return hardware.load(options.hardware) if options.hardware else hardware.builtin()


def _recipe_job(options: PlanOptions) -> PlannedJob:
    """Return the job of a recipe at the requested size, with the recipe's layout or that of --layout."""
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
    sized.check_size(recipe, size)
    batch, seq = sized.compute_requested_batch(recipe, size), size.seq or recipe.seq
    if size.batch_tokens and size.batch_tokens != batch * seq:
        size_options.print_note(
            f"tokens per step: {batch * seq:,} (gbs {batch:,} x seq {seq:,}), the nearest round batch size"
        )
    request = replace(request, gbs=None, batch_tokens=None, layout=recipe.layout().replace(gbs=batch))
    return _changed_recipe_job(options, request.sized_recipe(), request.num_nodes)


def _changed_recipe_job(options: PlanOptions, recipe: Recipe, nodes: int | None) -> PlannedJob:
    """Return the job of a recipe on `nodes` nodes with --gpu, --fabric, --precision, --task and --option applied.

    Without --option, the job of a legal layout has the parameter format that is chosen for training.
    """
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
    """Return the job with --fabric, --precision, --task and --option applied."""
    from superpod.planner.hardware import precision

    if options.fabric is not None:
        job = job.replace(fabric=facts.fabric(options.fabric))
    if options.precision is not None:
        job = job.replace(precision=precision(options.precision))
    if options.task is not None:
        if options.task not in TASKS:
            hint = did_you_mean(options.task, list(TASKS))
            raise UserError(f"--task must be one of {', '.join(TASKS)}, not {options.task!r}", hint)
        job = job.replace(task=options.task)
    if options.option:
        job = job.replace(options=option_syntax.change_options(job.options, options.option))
    return job


def _with_layout(job: PlannedJob, text: str | None) -> PlannedJob:
    """Return the job of a model with the layout `text` from --layout; None leaves it unchanged, "auto" searches."""
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
    """Return the job of a model with the layout from --layout; the default is data parallelism only."""
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
    """Print a note if --hardware calibrates only other GPU types, so that the job has the built-in calibration."""
    from superpod.planner.calibration import corrections

    gpu_name = job.node.gpu.name
    calibrated = [gpu.name for gpu in facts.gpus.values() if corrections.decode(gpu.calibrated_as)[1]]
    if options.hardware and calibrated and gpu_name not in calibrated:
        size_options.print_note(
            f"{options.hardware} calibrates only {', '.join(calibrated)}; {gpu_name} is planned with the built-in "
            "calibration"
        )


def _model_shape(name: str) -> ModelShape:
    """Return the shape of a model. If `name` is an alias, the alias is the name of the returned shape.

    Raises:
        UserError: the model is unknown, or the planner does not support it.
    """
    from superpod.collection.facts import absent
    from superpod.collection.registry import recipes, refuse_fp16
    from superpod.planner import models
    from superpod.planner.models import named_model, table

    refuse_fp16(name)
    absent.refuse_absent_recipe(name)
    try:
        shape = named_model.find(name)
    except UserError as unknown:
        suggestion = did_you_mean(name, [*models.names(), *recipes()])
        raise UserError(str(unknown), suggestion or unknown.hint) from unknown
    return shape.replace(name=name) if name in table.aliases() else shape


def _node_and_gpus(options: PlanOptions, facts: Hardware) -> tuple[Node, int]:
    """Return the node type and the total number of GPUs of a model's job. Raises UserError if the options lack them."""
    name, gpu, gpus, nodes = options.name, options.gpu, options.gpus, options.nodes
    if gpu is None:
        raise UserError(f"{name} is a model, which needs a GPU type", "add --gpu h100 --gpus 64, for example")
    node = facts.node(gpu)
    if gpus is not None and nodes is not None and gpus != nodes * node.gpus:
        raise UserError(f"--gpus {gpus} conflicts with --nodes {nodes} ({node.gpus} GPUs)", "leave one of them out")
    if gpus is not None:
        return node, _require_positive("--gpus", gpus)
    if nodes is not None:
        return node, _require_positive("--nodes", nodes) * node.gpus
    raise UserError(
        f"{name} is a model, which needs a number of GPUs", f"add --gpus {8 * node.gpus} or --nodes 8, for example"
    )


def _global_batch(options: PlanOptions, seq: int) -> int:
    """Return the global batch size of a model's job in samples. Raises UserError if --gbs and --batch-tokens differ."""
    tokens = size_options.parse_batch_tokens(options.batch_tokens)
    if tokens is None:
        return GBS if options.gbs is None else _require_positive("--gbs", options.gbs)
    gbs = max(1, round(tokens / seq))
    if options.gbs is not None and options.gbs != gbs:
        raise UserError(f"--gbs {options.gbs} conflicts with --batch-tokens {tokens}", "leave one of them out")
    if gbs * seq != tokens:
        size_options.print_note(f"tokens per step: {gbs * seq:,} (gbs {gbs:,} x seq {seq:,}), nearest to {tokens:,}")
    return gbs


def _require_positive(option: str, value: int) -> int:
    if not 1 <= value < COUNT_LIMIT:
        raise UserError(
            f"{option} must be between 1 and {COUNT_LIMIT - 1:,}, not {value}",
            f"for example {option} {EXAMPLES[option]}",
        )
    return value


def job_title(job: PlannedJob) -> str:
    """Describe a planned job in one line: model, task, GPUs, precision, sequence length, batch and layout."""
    from superpod.planner import explain

    return (
        f"{job.model.name} {job.task}, {job.gpus} x {job.node.gpu.name} {job.precision}, seq {job.seq}, "
        f"gbs {job.layout.gbs}: {explain.title(job.layout)}"
    )
