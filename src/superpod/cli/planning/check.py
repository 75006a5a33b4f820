"""`recipes check`: check that a layout is legal and fits in memory; with overrides, also build the model with NeMo."""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.options import hardware_option, size_options
from superpod.cli.options.plan_options import PlanOptions, job_title, with_plan_options
from superpod.cli.options.request_options import AsJson, Overrides
from superpod.cli.options.size_options import SizeOptions
from superpod.cli.planning import folder_notes
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.rehearsal.configuration_check import CheckReport
    from superpod.requests.request import Request

Build = Annotated[
    bool,
    typer.Option(
        "--build/--no-build",
        help="Build the models of three ranks if there are overrides, or NAME is a file or nemo:NAME.",
    ),
]


@with_plan_options("fabric")
def check(options: PlanOptions, overrides: Overrides = None, build: Build = True, as_json: AsJson = False) -> None:
    """Check that a layout is legal and fits in memory; otherwise print all reasons and exit 2.

    The layout and memory of a recipe or a model are checked within a second. A recipe with overrides
    (trainer.max_steps=10, with=fsdp), a Python file with recipe() from `recipes export`, or one of NeMo's own recipes
    (nemo:llama3_70b, nemo:llama3_70b/finetune) is also built with NeMo (20 s).
    """
    if options.hardware is not None:
        hardware_option.use_hardware(options.hardware)
    needs_build = bool(overrides) or options.name.startswith("nemo:") or options.name.endswith(".py")
    report = _check_by_build(options, overrides or [], build) if needs_build else _check_by_plan(options)
    with contextlib.suppress(BrokenPipeError):  # keep the exit code of the check
        if as_json:
            tables.print_json(_facts(report, with_build=needs_build))
        else:
            _print_result(report)
            _print_suggestions(report, options, overrides or [], with_build=needs_build)
    if not report.passed:
        raise typer.Exit(2)


def _print_suggestions(report: CheckReport, options: PlanOptions, overrides: list[str], *, with_build: bool) -> None:
    """Print a command for a better layout, and notes on a Hugging Face config.json."""
    if options.is_recipe:
        _suggest_better_layout(options, overrides)
    elif not with_build and (options.layout is None or report.verdict != "ok"):
        _suggest_plan(options)
    for line in folder_notes.training_notes(options.name):
        print(f"note: {line}")


def _suggest_plan(options: PlanOptions) -> None:
    """Print a `recipes plan` command that searches for a layout or a precision with which a model can run."""
    from superpod.planner import legality

    violation = legality.layout_independent_violation(options.job())
    if violation is None:
        if not options.layout:
            print(
                f"note: only data parallelism was checked, because {options.name} is a model without a layout of its "
                "own; --layout specifies one"
            )
        print(f"next: `{options.command('plan', without=('layout',))}` ranks all legal layouts that fit in memory")
    elif violation.rule != "attention_backend" and options.precision is not None:
        command = options.command("plan", without=("layout", "precision"))
        print(f"next: no layout satisfies this rule; `{command} --precision auto` plans other precisions")


def _suggest_better_layout(options: PlanOptions, overrides: list[str]) -> None:
    """Print the best layout if the recipe's own, scaled to a different sequence or batch size, is slower."""
    from superpod.collection.sizes import better_layout
    from superpod.collection.sizes.sized import SizedRecipe

    recipe = options.size().request(options.name, overrides).sized_recipe()
    if not isinstance(recipe, SizedRecipe) or recipe.planned:
        return
    changes_job = any((options.gpu, options.precision, options.task, options.option))
    layout_fields = ("trainer.", "data.micro", "data.global", "model.", "with")
    if changes_job or any(text.startswith(layout_fields) for text in overrides):
        return
    better_text = better_layout.describe_better_layout(recipe)
    if better_text:
        command = options.command("check", without=("layout",), overrides=overrides)
        commands = "submit" if options.hardware else "run and submit"  # run has no --hardware
        print(f"next: a better layout is {better_text}\n  `{command} --layout auto` selects it, also in {commands}")


def _check_by_plan(options: PlanOptions) -> CheckReport:
    """Check the layout and the memory of a recipe or a model with the planner, without NeMo."""
    from superpod.planner import legality, predict, suggestions
    from superpod.rehearsal.configuration_check import CheckReport, known_problems

    job = options.job()
    prediction = predict.one(job)
    broken, known = known_problems(options.name)
    return CheckReport(
        options.name,
        title=job_title(job),
        broken=[*legality.violations(job), *broken],
        warnings=[*legality.warnings(job), *known],
        verdict=prediction.verdict,
        short=suggestions.describe_shortage(job, prediction) if prediction.fit in ("tight", "does not fit") else "",
        allocated_gib=prediction.allocated_gib_max,
        reserved_gib=prediction.reserved_gib_max,
        usable_gib=prediction.limit_gib,
        step_time_s=prediction.step_time_s,
        step_time=prediction.step_time,
        step_time_low_s=prediction.step_time_low_s,
        step_time_high_s=prediction.step_time_high_s,
        extrapolation=prediction.extrapolation,
        tight=bool(prediction.tight),
    )


BUILD_OPTIONS = ("name", "nodes", "gpus", "gpu", "seq", "gbs", "batch_tokens", "layout", "hardware")
"""Fields of `PlanOptions` that are accepted when the recipe is built; the others must be given as overrides."""
ALTERNATIVES = {
    "precision": "use a recipe of that precision, see `recipes list`",
    "task": "use a recipe for that task, see `recipes list`",
    "option": "use with=OPTION",
}
"""Next steps for options that are not accepted when the recipe is built."""


def _check_by_build(options: PlanOptions, overrides: list[str], build: bool) -> CheckReport:
    """Check a recipe by building its configuration, and with `build` its models, with NeMo in a separate process."""
    from superpod.collection import installed
    from superpod.launch.display.progress_bar import spinner, stderr_console
    from superpod.rehearsal import configuration_check

    request = _request(options, overrides)
    request.check(any_subject=True)
    installed.require("checking a configuration by building it")
    if options.is_recipe:
        size_options.print_notes(request.notes())
        request = request.with_resolved_size()
    with spinner(stderr_console(), f"importing NeMo and {'building' if build else 'checking'} the recipe (10 to 30 s)"):
        return configuration_check.check_in_subprocess(request, build=build)


def _request(options: PlanOptions, overrides: list[str]) -> Request:
    """Return the request for a recipe to build. Raises UserError for options that apply only to plans."""
    from superpod.planner import hardware

    for field in fields(options):
        if field.name not in BUILD_OPTIONS and getattr(options, field.name) is not None:
            raise UserError(
                f"--{field.name} cannot be combined with overrides or a file, because the recipe is built",
                ALTERNATIVES.get(field.name, "leave it out"),
            )
    if options.gpu is not None:
        hardware.builtin().node(options.gpu)
    if options.is_recipe:
        _refuse_devices(options, overrides)
        return replace(options.size().request(options.name, overrides), gpu=options.gpu or "")
    if options.gpus is not None or options.layout is not None:
        option = "--gpus" if options.gpus is not None else "--layout"
        raise UserError(f"{option} cannot be used, because {options.name} sets its own", "use trainer.* overrides")
    size = SizeOptions(options.nodes, options.gpus, options.seq, options.gbs, options.batch_tokens)
    return replace(size.request(options.name, overrides), gpu=options.gpu or "")


def _refuse_devices(options: PlanOptions, overrides: list[str]) -> None:
    """Raise UserError if --gpus and an override of trainer.devices are combined."""
    devices = next((text for text in overrides if text.startswith("trainer.devices=")), None)
    if options.gpus is not None and devices is not None:
        raise UserError(
            f"--gpus {options.gpus} and {devices} both set the number of GPUs",
            "use trainer.num_nodes=N and trainer.devices=N, without --gpus",
        )


def _facts(report: CheckReport, *, with_build: bool) -> dict[str, object]:
    """Return the object that --json prints."""
    names = ["verdict", "tight", "broken", "warnings", "short", "reserved_gib", "usable_gib", "step_time_s"]
    names += ["step_time_low_s", "step_time_high_s", "extrapolation"]
    if with_build:
        names += ["title", "unplanned", "built", "layers", "build_error", "not_built", "passed"]
    facts = {name: getattr(report, name) for name in names}
    for name in ("broken", "warnings"):
        facts[name] = [violation._asdict() for violation in facts[name]]
    return facts


def _print_result(report: CheckReport) -> None:
    print(report.title or report.name)
    for violation in report.broken:
        print(f"refused: {violation.message}" + _next(violation.fix))
    if report.short:
        print(f"{'tight' if report.tight else 'does not fit'}: {report.short}")
    if report.unplanned:
        print(f"not planned: {report.unplanned}")
    for warning in report.warnings:
        print(f"warning: {warning.message}" + _next(warning.fix))
    if report.extrapolation:
        print(report.extrapolation)
    if report.not_built:
        print(f"not built here: {report.not_built}")
    if report.build_error:
        print(f"cannot be built: {report.build_error}")
    elif report.built:
        sizes = ", ".join(f"rank {rank} {sum(counts):,}" for rank, counts in report.built.items())
        print(f"built with {report.layers} layers, parameters: {sizes}")
    if report.passed and report.verdict == "ok":
        outcome = "tight" if report.tight else "ok"
        print(
            f"{outcome}: legal; {report.allocated_gib:.1f} GiB allocated and {report.reserved_gib:.1f} "
            f"reserved of {report.usable_gib:.1f} on the rank with the most memory; {report.step_time} per step"
        )


def _next(fix: str) -> str:
    return f"\n  next: {fix}" if fix else ""
