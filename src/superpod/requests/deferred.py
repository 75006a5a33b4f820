"""Defer the build of a recipe to the nodes if NeMo or the data are missing at submission.

Without NeMo, the batch script and the run folder are derived from the recipe's declaration, and from overrides whose
effect is known here. With deferred data (a folder that another job writes, `recipes submit --after JOB`), they are
derived from the recipe with mock data. The script contains the request and this project's sources instead of an
exported file. On the nodes, `build` builds the configuration and exits if it differs from the plan. The job checks the
data before it starts the ranks (`runtime/attempts/deferred_data.py`).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.collection import installed, save_interval, user_models
from superpod.collection.facts import environment
from superpod.collection.registry import LAYOUTS, Recipe, find
from superpod.common import atomic_file, collection, package_files
from superpod.data.folder import FILE
from superpod.errors import UserError
from superpod.planner.layout import PARALLEL_SIZES, Layout
from superpod.planner.planned_job import PlannedJob
from superpod.requests.request import LENGTHS, Request
from superpod.requests.resolve import (
    SOURCES,
    BuiltRun,
    ResolvedRun,
    describe_data,
    is_cached,
    resolve,
    resolve_cached,
)

if TYPE_CHECKING:
    import nemo_run as run

WITHOUT_NEMO = "run `recipes render ... > job.sbatch` where NeMo is installed and `sbatch job.sbatch` here, or"
NO_NEMO_NOTE = (
    "NeMo is not installed on this machine: layout and memory were checked, but the values of overrides were not, and "
    "the checks of Megatron and Transformer Engine did not run; the job builds and checks the configuration before it "
    "trains"
)

LAYOUT_FIELDS = {f"trainer.strategy.{field}": short for short, field in PARALLEL_SIZES.items()}
LAYOUT_FIELDS |= {
    "trainer.strategy.sequence_parallel": "sp",
    "data.micro_batch_size": "mbs",
    "data.global_batch_size": "gbs",
}
"""Path of an override -> field of `Layout`."""
COUNT_OVERRIDES = ("trainer.max_steps", "trainer.num_nodes", "trainer.devices", "log.ckpt.every_n_train_steps")
"""Paths of overrides that set a field of `ResolvedRun` or the number of GPUs."""
NODE_ONLY_OVERRIDES = (
    *("optim.config.lr", "optim.config.min_lr", "optim.config.weight_decay", "optim.config.clip_grad"),
    *("optim.config.adam_beta1", "optim.config.adam_beta2", "optim.config.adam_eps"),
    *("optim.lr_scheduler.warmup_steps", "optim.lr_scheduler.constant_steps", "optim.lr_scheduler.min_lr"),
    *("trainer.val_check_interval", "trainer.limit_val_batches", "trainer.limit_test_batches"),
    *("trainer.log_every_n_steps", "trainer.num_sanity_val_steps", "log.ckpt.save_top_k", "data.num_workers"),
    "resume.restore_config.path",
)
"""Paths of overrides that affect neither layout, memory nor step time, so that only the nodes apply them."""

FAMILY_OPTIONS: dict[str, dict[str, float]] = {
    "starcoder_15b": {"hidden_dropout": 0.2, "attention_dropout": 0.2},
    "t5": {"hidden_dropout": 0.1, "attention_dropout": 0.1, "fused_loss": False},
    "bert": {"hidden_dropout": 0.1, "attention_dropout": 0.1, "fused_loss": False},
    "e5": {"hidden_dropout": 0.1, "attention_dropout": 0.1, "fused_loss": False},
    "hyena": {"fused_loss": False},
}
"""Model, or the first word of its name -> options in which NeMo 2.7.3's class differs from the planner's defaults."""
TINY_SAVE_EVERY = 10
"""Steps between two checkpoints of the tiny models, as in recipes/models/tiny.py."""


def resolve_for_job(request: Request) -> ResolvedRun:
    """Resolve a request for a Slurm job: on this machine, or deferred to the nodes if NeMo or the data are missing.

    Raises UserError in the same cases as `resolve` and `plan_run`.
    """
    if installed.missing_package():
        return plan_run(request)
    run = resolve_cached(without_deferred_data(request))
    if not request.deferred_data:
        return run
    return defer(replace(run, request=request))


def needs_nemo(request: Request) -> bool:
    """Return whether `resolve_for_job` would import NeMo for a request."""
    return not installed.missing_package() and not is_cached(without_deferred_data(request))


# -- deferred data ----------------------------------------------------------------------------------------------------


def is_deferred(data: Path | None) -> bool:
    """Return whether a data folder does not exist yet or is incomplete. `recipes data` writes dataset.json last."""
    return data is not None and not (data / FILE).exists() and not data.is_file()


def with_deferred_data(request: Request, data: Path) -> Request:
    """Return a request, which was checked without data, with the data folder `data`, which does not exist yet.

    Raises UserError if the recipe is from a user collection, whose Python files are not copied to the job.
    """
    if is_user_recipe(request.sized_recipe()):
        raise UserError(
            f"--data {data} does not exist yet, but {request.recipe} is from your own collection, and such "
            "recipes are built at submission, with their data",
            "submit after the data job has ended: `sbatch --dependency=afterok:JOB --wrap 'recipes submit ...'`",
        )
    return replace(request, data=data.absolute(), deferred_data=True)


def deferred_data_note(request: Request, jobs: Sequence[str]) -> str:
    """Return a note that the `jobs` (ids) are expected to write the data folder of a request."""
    verb = "is" if len(jobs) == 1 else "are"
    return (
        f"{request.data} does not exist yet; {', '.join(jobs)} {verb} expected to write it. If it is missing when the "
        "run starts, the run stops"
    )


def without_deferred_data(request: Request) -> Request:
    """Return a request with mock data instead of deferred data; unchanged if its data are not deferred."""
    if not request.deferred_data:
        return request
    return replace(request, data=None, deferred_data=False)


# -- without NeMo -----------------------------------------------------------------------------------------------------


def plan_run(request: Request) -> ResolvedRun:
    """Resolve a request with the planner alone, without NeMo.

    Raises UserError for an illegal layout, and for a recipe or an override whose effect depends on NeMo.
    """
    from superpod.nemo2 import validation as rules
    from superpod.planner import legality, plans

    recipe = request.sized_recipe()
    if is_user_recipe(recipe):
        raise _needs_nemo_error(f"{recipe.name}, a recipe from your own collection")
    values = _parse_overrides(request.overrides)
    job = _job(recipe, request, values)
    rules.require(legality.violations(job))
    nodes = values.get("trainer.num_nodes", request.num_nodes or recipe.nodes[0])
    gpus = values.get("trainer.devices", recipe.gpus_per_node)
    is_tiny = recipe.model.name.startswith("tiny_")
    save_every = TINY_SAVE_EVERY if is_tiny else save_interval.save_every(recipe, request.num_nodes)
    planned = ResolvedRun(
        request=request,
        job=job,
        plan=plans.describe_run(job),
        nodes=nodes,
        gpus_per_node=gpus,
        max_steps=values.get("trainer.max_steps", recipe.schedule.max_steps),
        save_every=values.get("log.ckpt.every_n_train_steps", save_every),
        data_facts=describe_data(request.data) if request.data and not request.deferred_data else {},
        lines=[],
    )
    return defer(planned)


def is_user_recipe(recipe: Recipe) -> bool:
    """Return whether a recipe is from a user collection, whose Python files are not copied to the job."""
    return recipe.source.parent != LAYOUTS or recipe.model.make.__module__.startswith(user_models.PREFIX)


def defer(run: ResolvedRun) -> ResolvedRun:
    """Return a run whose `source` contains its request, so that the ranks build it."""
    heading = f"# {' '.join([run.request.recipe, *run.request.overrides])}: rank 0 replaces this file after the build"
    return replace(run, is_deferred=True, lines=[heading], source=_source(run))


def _needs_nemo_error(subject: str) -> UserError:
    """Return the error for `subject`, an override or a recipe whose effect depends on NeMo."""
    return UserError(
        f"{subject}: its effect can only be determined with NeMo, but {installed.missing_package() or 'NeMo'} is not "
        "installed",
        f"{WITHOUT_NEMO} {installed.INSTALL}",
    )


def _parse_overrides(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return path -> value of the overrides that affect the plan; later overrides take precedence.

    Raises UserError if the effect of an override depends on NeMo.
    """
    values: dict[str, Any] = {}
    for text in overrides:
        path, _, value = text.partition("=")
        if (path in NODE_ONLY_OVERRIDES and value) or environment.sets_only_environment(text):
            continue
        if path not in (*LAYOUT_FIELDS, *COUNT_OVERRIDES, *LENGTHS):
            raise _needs_nemo_error(text)
        values[path] = _parse_value(text, path, value)
    return values


def _parse_value(text: str, path: str, value: str) -> int | bool | None:
    """Return the value of the override `text`. Raises UserError unless it is of the type of the field `path`."""
    if path.endswith("sequence_parallel") and value in ("True", "False", "true", "false"):
        return value in ("True", "true")
    if LAYOUT_FIELDS.get(path) in ("vp", "etp") and value in ("None", "null"):
        return None
    if not re.fullmatch(r"[0-9]{1,12}", value):
        raise _needs_nemo_error(text)
    return int(value)


def _job(recipe: Recipe, request: Request, values: dict[str, Any]) -> PlannedJob:
    """Return the planner's job for a recipe with the parsed overrides `values`."""
    from superpod.collection import recipe_job
    from superpod.planner import hardware

    base = recipe_job.job(recipe, request.num_nodes)
    layout = replace(base.layout, **{short: values[path] for path, short in LAYOUT_FIELDS.items() if path in values})
    model = recipe.model.name
    family_options = FAMILY_OPTIONS.get(model) or FAMILY_OPTIONS.get(model.partition("_")[0], {})
    options: dict[str, Any] = {"overlap_tp": _overlaps_tp(base, layout), **family_options}
    nodes = values.get("trainer.num_nodes", request.num_nodes or recipe.nodes[0])
    job = base.replace(
        layout=layout,
        gpus=nodes * values.get("trainer.devices", recipe.gpus_per_node),
        options=replace(base.options, **options),
    )
    job = recipe_job.set_unfused_attention(job)
    if not request.gpu:
        return job
    node = hardware.builtin().node(request.gpu)
    return job.replace(node=node, fabric=hardware.builtin().fabric_of(node))


def _overlaps_tp(base: PlannedJob, layout: Layout) -> bool:
    """Return whether TP communication overlaps with GEMMs in a job with the overridden `layout`.

    `nemo2/build/overlap.py` decides from the recipe's layout, before overrides.
    """
    recipe_layout = base.layout
    if layout.tp > 1 and layout.sp:
        return recipe_layout.tp > 1 and recipe_layout.sp and base.options.overlap_tp
    return base.options.overlap_tp


# -- files copied to the job ------------------------------------------------------------------------------------------

SOURCE = '''"""{heading}

The submitting machine lacked NeMo or the data, so this file contains the request. `recipe()` builds it with the sources
of superpod-recipes next to this file and with the node's NeMo, and exits if the result differs from the plan.
"""

import json

REQUEST = json.loads({request!r})
PLANNED = json.loads({planned!r})


def recipe():
    """Build the recipe, a run.Partial."""
    from superpod.requests import deferred

    return deferred.build(REQUEST, PLANNED)
'''


def _source(run: ResolvedRun) -> str:
    """Return the text of the Python file that contains the request of a run and its plan."""
    heading = f"{run.request.recipe} on {run.nodes} nodes x {run.gpus_per_node} GPUs, as submitted."
    request = run.request.with_resolved_size()  # so that the nodes do not search for a layout
    facts = json.dumps({"recipe": request.recipe, **request.facts(), "data_facts": run.data_facts})
    return SOURCE.format(heading=heading, request=facts, planned=json.dumps(planned_facts(run)))


def planned_facts(run: ResolvedRun) -> dict[str, Any]:
    """Return the values of a run on which its batch script and its preflight depend, as JSON values."""
    job, sizes = run.job, ("nodes", "gpus_per_node", "max_steps", "save_every")
    facts: dict[str, Any] = {name: getattr(run, name) for name in sizes}
    facts |= {name: getattr(job, name) for name in ("seq", "precision", "task", "gpus")}
    facts |= {"parameters": job.model.total_parameters(), "layout": asdict(job.layout), "options": asdict(job.options)}
    return json.loads(json.dumps(facts))


SKIPPED_SUFFIXES = (".pyc", ".json")
SKIPPED_FOLDERS = ("included/recipes/layouts/", "reports/", "weights/serving/")
"""Folders whose files are not copied to the job: layouts of other recipes, and code that `build` does not import."""


def sources(run: ResolvedRun) -> dict[str, Path]:
    """Return path in the code folder -> file, for the files that a deferred run needs in addition to the runtime."""
    if not run.is_deferred:
        return {}
    own_layouts = find(run.request.recipe).source
    return {
        f"superpod/{name}": path
        for name, path in package_files.files([".", *SOURCES]).items()
        if path == own_layouts or (not name.endswith(SKIPPED_SUFFIXES) and not name.startswith(SKIPPED_FOLDERS))
    }


# -- on the nodes -----------------------------------------------------------------------------------------------------


def build(request: Mapping[str, Any], plan: Mapping[str, Any]) -> run.Partial:
    """Build the requested recipe on a rank of the job; rank 0 writes recipe.txt to the run folder.

    Exits before the process group is initialized if the recipe violates a rule or differs from `plan`, for which the
    number of nodes, the time limit and the memory were chosen.
    """
    os.environ.pop(collection.VARIABLE, None)  # the job has its own copy; the user's folder may not exist here
    try:
        built_run = resolve(Request.from_facts(request["recipe"], request), request["data_facts"])
    except UserError as error:
        hint = f"\n  next: {error.hint}" if error.hint else ""
        sys.exit(f"refused: {error}{hint}")
    differences = plan_differences(plan, planned_facts(built_run))
    if differences:
        sys.exit(f"refused: the run built on this node differs from the plan: {'; '.join(differences)}")
    _write_recipe_lines(built_run)
    return built_run.partial


def plan_differences(plan: Mapping[str, Any], built_plan: Mapping[str, Any], where: str = "") -> list[str]:
    """Return the differences of two results of `planned_facts`, such as `layout.tp: 2 planned, 4 built`.

    `where` is the prefix of the names.
    """
    lines: list[str] = []
    for name in sorted({*plan, *built_plan}):
        old, new = plan.get(name), built_plan.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += plan_differences(old, new, f"{where}{name}.")
        elif old != new:
            lines.append(f"{where}{name}: {old} planned, {new} built")
    return lines


def _write_recipe_lines(built_run: BuiltRun) -> None:
    """Write recipe.txt to the run folder if this is rank 0 of a job."""
    run_dir = os.environ.get("SUPERPOD_RUN_DIR")
    if run_dir and os.environ.get("RANK") == "0":
        atomic_file.write(Path(run_dir, "recipe.txt"), "".join(f"{line}\n" for line in built_run.lines))
