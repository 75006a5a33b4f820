"""`recipes check`: whether a run is legal and fits; with changes, a file or NeMo's own recipe, whether it starts."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options import hardware_option, size_options
from superpod.cli.options.plan_options import PlanOptions, title, with_plan_options
from superpod.cli.options.request_options import AsJson, Overrides
from superpod.cli.options.size_options import SizeOptions
from superpod.cli.planning import folder_notes
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.rehearsal.judge import Judgement
    from superpod.requests.request import Request

Build = Annotated[
    bool, typer.Option("--build/--no-build", help="With changes, a file or nemo:NAME: build the models of three ranks.")
]


@with_plan_options("fabric")
def check(options: PlanOptions, overrides: Overrides = None, build: Build = True, as_json: AsJson = False) -> None:
    """Say whether a run is legal and fits, before the queue does; exit 2 with every reason if not.

    NAME is a recipe or a model; with changes (trainer.max_steps=10, with=fsdp), a recipe that they change; a Python
    file with recipe(), from `recipes export`; or NeMo's own recipe, nemo:llama3_70b or nemo:llama3_70b/finetune. These
    are built with NeMo (20 s): their fields, layout and memory are checked, and their real models built.
    """
    if options.hardware is not None:
        hardware_option.use(options.hardware)
    judged = bool(overrides) or options.name.startswith("nemo:") or options.name.endswith(".py")
    judgement = _judged(options, overrides or [], build) if judged else _planned(options)
    with contextlib.suppress(BrokenPipeError):  # `| head -1` has read enough; the code is that of the check
        if as_json:
            print(json.dumps(_facts(judgement, whole=judged), indent=1))
        else:
            _print_all(judgement, options, overrides or [], judged=judged)
    if not judgement.passed:
        raise typer.Exit(2)


def _plan(options: PlanOptions) -> str:
    """The line that names the search which can mend a model's run; "" = no layout can, nor another precision."""
    from superpod.planner import legality

    broken = legality.in_any_layout(options.job())
    if broken is None:
        alone = f"note: {options.name} is a model, and no --layout is given: data parallelism alone was judged\n"
        search = options.command("plan", without=("layout",))
        return f"{'' if options.layout else alone}next: {search} ranks every layout that is legal and fits\n"
    if broken.rule == "attention_backend" or options.precision is None:
        return ""
    others = options.command("plan", without=("layout", "precision"))
    return f"next: no layout changes this; {others} --precision auto plans in those that can run\n"


def _better(options: PlanOptions, overrides: list[str]) -> str:
    """The line that names the planner's layout for a recipe at another length, batch or layout, where it is better."""
    from superpod.collection.sizes import better_layout
    from superpod.collection.sizes.sized import SizedRecipe

    recipe = options.size().request(options.name, overrides).sized()
    changed = (options.gpu, options.precision, options.task, options.option)
    of_layout = any(text.startswith(("trainer.", "data.micro", "data.global", "model.", "with")) for text in overrides)
    if not isinstance(recipe, SizedRecipe) or recipe.planned or of_layout or any(changed):
        return ""
    better = better_layout.of(recipe)
    command = options.command("check", without=("layout",), overrides=overrides)
    others = "does submit" if options.hardware else "do run and submit"  # run has no --hardware
    return f"next: a better layout is {better}\n  {command} --layout auto takes it, as {others}\n" if better else ""


def _planned(options: PlanOptions) -> Judgement:
    """By arithmetic alone."""
    from superpod.planner import explain, legality, predict
    from superpod.rehearsal.judge import Judgement, known_problems

    job = options.job()
    prediction = predict.one(job)
    broken, known = known_problems(options.name)
    return Judgement(
        options.name,
        title=title(job),
        broken=[*legality.violations(job), *broken],
        warnings=[*legality.warnings(job), *known],
        verdict=prediction.verdict,
        short=explain.short_of(job, prediction) if prediction.fit in ("tight", "does not fit") else "",
        allocated_gib=prediction.allocated_gib_max,
        reserved_gib=prediction.reserved_gib_max,
        usable_gib=prediction.limit_gib,
        step_time_s=prediction.step_time_s,
        tight=bool(prediction.tight),
    )


def _print_all(judgement: Judgement, options: PlanOptions, overrides: list[str], *, judged: bool) -> None:
    """Print the outcome and what to do next."""
    _print(judgement)
    # A recipe has a layout; for a model without one, or with one that fails, `recipes plan` finds others.
    if not judged and not options.is_recipe and (options.layout is None or judgement.verdict != "ok"):
        print(_plan(options), end="")
    if options.is_recipe:
        print(_better(options, overrides), end="")
    for line in folder_notes.training(options.name):
        print(f"note: {line}")


OF_A_REQUEST = ("name", "nodes", "gpus", "gpu", "seq", "gbs", "batch_tokens", "layout", "hardware")
"""Options that say which run is meant, where it is built; the others are overrides then."""
AS_OVERRIDES = {
    "precision": "a recipe of that precision: `recipes list`",
    "task": "a recipe of that task: `recipes list`",
    "option": "with=OPTION",
}


def _judged(options: PlanOptions, overrides: list[str], build: bool) -> Judgement:
    """By building it with NeMo, in a process of its own."""
    from superpod.cli.running.progress import on_stderr, waiting
    from superpod.collection import installed
    from superpod.rehearsal import judge

    request = _request(options, overrides)
    request.check(any_subject=True)
    installed.require("checking a configuration, which builds it,")
    if options.is_recipe:
        size_options.say(request.notes())
        request = request.decided()
    with waiting(on_stderr(), f"importing NeMo and {'building' if build else 'judging'} it (10 to 30 s)"):
        return judge.ask(request, build=build)


def _request(options: PlanOptions, overrides: list[str]) -> Request:
    from superpod.planner import hardware

    for field in fields(options):
        if field.name not in OF_A_REQUEST and getattr(options, field.name) is not None:
            instead = AS_OVERRIDES.get(field.name, "leave it out")
            raise UserError(f"--{field.name} is for plans; what is built takes changes", f"write {instead}")
    if options.gpu is not None:
        hardware.builtin().node(options.gpu)
    if options.is_recipe:
        _refuse_devices(options, overrides)
        return replace(options.size().request(options.name, overrides), gpu=options.gpu or "")
    if options.gpus is not None or options.layout is not None:
        which = "--gpus" if options.gpus is not None else "--layout"
        raise UserError(f"{which} is for recipes and models; {options.name} has its own", "write trainer.* overrides")
    size = SizeOptions(options.nodes, options.gpus, options.seq, options.gbs, options.batch_tokens)
    return replace(size.request(options.name, overrides), gpu=options.gpu or "")


def _refuse_devices(options: PlanOptions, overrides: list[str]) -> None:
    """Refuse --gpus beside an override of the GPUs of a node: both say how many GPUs there are."""
    devices = next((text for text in overrides if text.startswith("trainer.devices=")), None)
    if options.gpus is not None and devices is not None:
        raise UserError(
            f"--gpus {options.gpus} and {devices} contradict each other: both say it of one run",
            "write trainer.num_nodes=N beside trainer.devices, without --gpus",
        )


def _facts(judgement: Judgement, *, whole: bool) -> dict[str, object]:
    facts: dict[str, object] = {
        "verdict": judgement.verdict,
        "tight": judgement.tight,
        "broken": [violation._asdict() for violation in judgement.broken],
        "warnings": [warning._asdict() for warning in judgement.warnings],
        "short": judgement.short,
        "reserved_gib": judgement.reserved_gib,
        "usable_gib": judgement.usable_gib,
        "step_time_s": judgement.step_time_s,
    }
    if whole:
        known = asdict(judgement)
        facts |= {name: known[name] for name in ("title", "unplanned", "built", "layers", "build_error", "not_built")}
        facts["passed"] = judgement.passed
    return facts


def _print(judgement: Judgement) -> None:
    print(judgement.title or judgement.name)
    for violation in judgement.broken:
        print(f"refused: {violation.message}" + _next(violation.fix))
    if judgement.short:
        print(f"{'tight' if judgement.tight else 'does not fit'}: {judgement.short}")
    if judgement.unplanned:
        print(f"not planned: {judgement.unplanned}")
    for warning in judgement.warnings:
        print(f"warning: {warning.message}" + _next(warning.fix))
    if judgement.not_built:
        print(f"not built here: {judgement.not_built}")
    if judgement.build_error:
        print(f"does not start: {judgement.build_error}")
    elif judgement.built:
        sizes = ", ".join(f"rank {rank} {sum(counts):,}" for rank, counts in judgement.built.items())
        print(f"built with {judgement.layers} layers, parameters: {sizes}")
    if judgement.passed and judgement.verdict == "ok":
        outcome = "tight" if judgement.tight else "ok"
        print(
            f"{outcome}: legal; {judgement.allocated_gib:.1f} GiB allocated and {judgement.reserved_gib:.1f} "
            f"reserved of {judgement.usable_gib:.1f} on the fullest rank; {judgement.step_time_s:.3g} s a step"
        )


def _next(fix: str) -> str:
    return f"\n  next: {fix}" if fix else ""
