"""Requests that the nodes build, because NeMo or the data are missing where the job is submitted.

Without NeMo, everything in the batch script and in the run folder follows from the recipe's facts, and from overrides
whose effect is known here. With deferred data, a data folder that another job makes (`recipes submit --after JOB`), it
follows from the recipe on mock data. The script then carries the request and this project's sources in place of an
exported file; on the nodes, `build` makes the configuration, and refuses one that differs from the plan. The job looks
for the data before it starts the ranks (`runtime/attempts/deferred_data.py`).
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

from superpod.collection import installed, own_models, save_interval
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

WITHOUT_NEMO = "run `recipes render ... > job.sbatch` where NeMo is installed, and `sbatch job.sbatch` here; or"
NOTE = (
    "NeMo is not installed here: layout and memory were checked; the overrides' values, Megatron's and Transformer "
    "Engine's own checks were not: the job builds the configuration on its nodes and checks it before it trains"
)

LAYOUT_FIELDS = {f"trainer.strategy.{field}": short for short, field in PARALLEL_SIZES.items()}
LAYOUT_FIELDS |= {
    "trainer.strategy.sequence_parallel": "sp",
    "data.micro_batch_size": "mbs",
    "data.global_batch_size": "gbs",
}
"""Override -> field of `Layout`."""
COUNTS = ("trainer.max_steps", "trainer.num_nodes", "trainer.devices", "log.ckpt.every_n_train_steps")
"""Overrides that are a field of `ResolvedRun`, or the number of GPUs."""
NOT_PLANNED = (
    *("optim.config.lr", "optim.config.min_lr", "optim.config.weight_decay", "optim.config.clip_grad"),
    *("optim.config.adam_beta1", "optim.config.adam_beta2", "optim.config.adam_eps"),
    *("optim.lr_scheduler.warmup_steps", "optim.lr_scheduler.constant_steps", "optim.lr_scheduler.min_lr"),
    *("trainer.val_check_interval", "trainer.limit_val_batches", "trainer.limit_test_batches"),
    *("trainer.log_every_n_steps", "trainer.num_sanity_val_steps", "log.ckpt.save_top_k", "data.num_workers"),
    "resume.restore_config.path",
)
"""Overrides that change neither the layout, the memory nor the time of a run: the nodes apply them."""

FAMILY_OPTIONS: dict[str, dict[str, float]] = {
    "starcoder_15b": {"hidden_dropout": 0.2, "attention_dropout": 0.2},
    "t5": {"hidden_dropout": 0.1, "attention_dropout": 0.1, "fused_loss": False},
    "bert": {"hidden_dropout": 0.1, "attention_dropout": 0.1, "fused_loss": False},
    "e5": {"hidden_dropout": 0.1, "attention_dropout": 0.1, "fused_loss": False},
    "hyena": {"fused_loss": False},
}
"""Model, or the first word of its name -> options that NeMo 2.7.3's class has otherwise than the planner takes them."""
TINY_SAVES_EVERY = 10
"""Steps, as recipes/models/tiny.py sets them."""


def resolve_for_job(request: Request) -> ResolvedRun:
    """What a job of this request runs: resolved here, or deferred to its nodes.

    Raises:
        UserError: as `resolve` and `plan`.
    """
    if installed.missing():
        return plan_run(request)
    resolved = resolve_cached(without_deferred_data(request))
    return defer(replace(resolved, request=request)) if request.deferred_data else resolved


def needs_nemo(request: Request) -> bool:
    """Whether `resolve_for_job` will import NeMo."""
    return not installed.missing() and not is_cached(without_deferred_data(request))


# -- deferred data ----------------------------------------------------------------------------------------------------


def is_deferred(data: Path | None) -> bool:
    """Whether a data folder is still to be made: `recipes data` writes its dataset.json last."""
    return data is not None and not (data / FILE).exists() and not data.is_file()


def with_deferred_data(request: Request, data: Path) -> Request:
    """The request, which was checked without data, on a folder that is still to be made.

    Raises:
        UserError: its recipe is of a user's own folder, whose Python does not travel.
    """
    if is_user_recipe(request.sized()):
        raise UserError(
            f"--data {data} does not exist yet, and {request.recipe} is of a folder of your own: such a recipe is "
            "built from its data where it is submitted",
            "let the submission itself wait: sbatch --dependency=afterok:JOB --wrap 'recipes submit ...'",
        )
    return replace(request, data=data.absolute(), deferred_data=True)


def deferred_data_note(request: Request, jobs: Sequence[str]) -> str:
    """What is assumed about deferred data."""
    return (
        f"{request.data} does not exist yet, and {', '.join(jobs)} is trusted to make it; the run looks for it when "
        "it starts, and stops where it is not there"
    )


def without_deferred_data(request: Request) -> Request:
    """The same on mock data in place of deferred data: what can be decided now."""
    return replace(request, data=None, deferred_data=False) if request.deferred_data else request


# -- without NeMo -----------------------------------------------------------------------------------------------------


def plan_run(request: Request) -> ResolvedRun:
    """What a request comes to by arithmetic alone, where NeMo is not installed.

    Raises:
        UserError: an illegal layout, or a recipe or an override whose effect only NeMo can tell.
    """
    from superpod.nemo2 import validation as rules
    from superpod.planner import legality, plans

    recipe = request.sized()
    if is_user_recipe(recipe):
        raise _needs_nemo_error(f"{recipe.name} is of a folder of your own")
    values = _parse_overrides(request.overrides)
    job = _job(recipe, request, values)
    rules.require(legality.violations(job))
    nodes = values.get("trainer.num_nodes", request.num_nodes or recipe.nodes[0])
    gpus = values.get("trainer.devices", recipe.gpus_per_node)
    planned = ResolvedRun(
        request=request,
        job=job,
        plan=plans.of_run(job),
        nodes=nodes,
        gpus_per_node=gpus,
        max_steps=values.get("trainer.max_steps", recipe.schedule.max_steps),
        save_every=values.get("log.ckpt.every_n_train_steps", _save_every(recipe, request.num_nodes)),
        data_facts=describe_data(request.data) if request.data and not request.deferred_data else {},
        lines=[],
    )
    return defer(planned)


def is_user_recipe(recipe: Recipe) -> bool:
    """Whether a recipe is a user's own: its Python may change what is built, and does not travel."""
    return recipe.source.parent != LAYOUTS or recipe.model.make.__module__.startswith(own_models.PREFIX)


def defer(run: ResolvedRun) -> ResolvedRun:
    """The run with a `source` that holds its request, which the ranks build."""
    heading = f"# {' '.join([run.request.recipe, *run.request.overrides])}: written by rank 0, which builds it"
    return replace(run, is_deferred=True, lines=[heading], source=_source(run))


def _needs_nemo_error(what: str) -> UserError:
    return UserError(
        f"{what}: only NeMo can say what that comes to, and {installed.missing() or 'it'} is not installed",
        f"{WITHOUT_NEMO} {installed.INSTALL}",
    )


def _parse_overrides(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Path -> value of the overrides that are planned; the last of two wins, as NeMo-Run has it.

    Raises:
        UserError: an override that only NeMo can apply.
    """
    values: dict[str, Any] = {}
    for text in overrides:
        path, _, value = text.partition("=")
        if (path in NOT_PLANNED and value) or environment.sets_only(text):
            continue
        if path not in (*LAYOUT_FIELDS, *COUNTS, *LENGTHS):
            raise _needs_nemo_error(text)
        values[path] = _parse_value(text, path, value)
    return values


def _parse_value(text: str, path: str, value: str) -> int | bool | None:
    if path.endswith("sequence_parallel") and value in ("True", "False", "true", "false"):
        return value in ("True", "true")
    if LAYOUT_FIELDS.get(path) in ("vp", "etp") and value in ("None", "null"):
        return None
    if not re.fullmatch(r"[0-9]{1,12}", value):
        raise _needs_nemo_error(text)
    return int(value)


def _job(recipe: Recipe, request: Request, values: dict[str, Any]) -> PlannedJob:
    from superpod.collection import recipe_job
    from superpod.planner import hardware

    base = recipe_job.job(recipe, request.num_nodes)  # the length of a sample is the sized recipe's
    layout = replace(base.layout, **{short: values[path] for path, short in LAYOUT_FIELDS.items() if path in values})
    nodes = values.get("trainer.num_nodes", request.num_nodes or recipe.nodes[0])
    job = base.replace(
        layout=layout,
        gpus=nodes * values.get("trainer.devices", recipe.gpus_per_node),
        options=replace(base.options, overlap_tp=_overlaps_tp(base, layout), **_family_options(recipe.model.name)),
    )
    job = recipe_job.with_attention(job)
    if not request.gpu:
        return job
    node = hardware.builtin().node(request.gpu)
    return job.replace(node=node, fabric=hardware.builtin().fabric_of(node))


def _family_options(model: str) -> dict[str, Any]:
    return FAMILY_OPTIONS.get(model) or FAMILY_OPTIONS.get(model.partition("_")[0], {})


def _save_every(recipe: Recipe, num_nodes: int | None) -> int:

    return TINY_SAVES_EVERY if recipe.model.name.startswith("tiny_") else save_interval.save_every(recipe, num_nodes)


def _overlaps_tp(base: PlannedJob, layout: Layout) -> bool:
    """As `nemo2/build/overlap.py` sets the callback for the recipe's own layout, which an override does not change."""
    own = base.layout
    if layout.tp > 1 and layout.sp:
        return own.tp > 1 and own.sp and base.options.overlap_tp
    return base.options.overlap_tp


# -- what the job carries ---------------------------------------------------------------------------------------------

SOURCE = '''"""{heading}

The machine that it was submitted from had no NeMo, so this holds the request, and `recipe()` builds it: with the
sources of superpod-recipes beside this file, and with the NeMo of the node. It refuses what differs from the plan.
"""

import json

REQUEST = json.loads({request!r})
PLANNED = json.loads({planned!r})


def recipe():
    """The whole recipe, a run.Partial."""
    from superpod.requests import deferred

    return deferred.build(REQUEST, PLANNED)
'''


def _source(run: ResolvedRun) -> str:
    heading = f"{run.request.recipe} on {run.nodes} nodes x {run.gpus_per_node} GPUs, as it was submitted."
    request = run.request.decided()  # the node searches for no layout
    facts = json.dumps({"recipe": request.recipe, **request.facts(), "data_facts": run.data_facts})
    return SOURCE.format(heading=heading, request=facts, planned=json.dumps(planned_facts(run)))


def planned_facts(run: ResolvedRun) -> dict[str, Any]:
    """What the configuration must come to, as JSON holds it: all that the script and preflight rest on."""
    job, sizes = run.job, ("nodes", "gpus_per_node", "max_steps", "save_every")
    facts: dict[str, Any] = {name: getattr(run, name) for name in sizes}
    facts |= {name: getattr(job, name) for name in ("seq", "precision", "task", "gpus")}
    facts |= {"parameters": job.model.total_parameters(), "layout": asdict(job.layout), "options": asdict(job.options)}
    return json.loads(json.dumps(facts))


NOT_CARRIED = (".pyc", ".json", "published.toml")
LAYOUT_FILES = "included/recipes/layouts/"


def sources(run: ResolvedRun) -> dict[str, Path]:
    """What the job of such a run carries beside the runtime: path in its code folder -> file."""
    if not run.is_deferred:
        return {}
    own_layouts = find(run.request.recipe).source
    return {
        f"superpod/{name}": path
        for name, path in package_files.files([".", *SOURCES]).items()
        if path == own_layouts or (not name.endswith(NOT_CARRIED) and not name.startswith(LAYOUT_FILES))
    }


# -- on the nodes -----------------------------------------------------------------------------------------------------


def build(request: Mapping[str, Any], planned: Mapping[str, Any]) -> run.Partial:
    """The recipe that was asked for, as every rank of the job builds it; rank 0 keeps its lines in the run folder.

    Ends the process, before it joins the others, where the recipe breaks a rule or is not what was `planned`: the
    nodes, the time limit and the memory were chosen for that.
    """
    os.environ.pop(collection.VARIABLE, None)  # the job carries what it needs, and the folder may not be here
    try:
        built = resolve(Request.from_facts(request["recipe"], request), request["data_facts"])
    except UserError as wrong:
        sys.exit(f"refused: {wrong}" + (f"\n  next: {wrong.hint}" if wrong.hint else ""))
    differences = plan_differences(planned, planned_facts(built))
    if differences:
        sys.exit(f"refused: built on this node, it is not the run that was planned: {'; '.join(differences)}")
    _write_recipe_lines(built)
    return built.partial


def plan_differences(planned: Mapping[str, Any], built: Mapping[str, Any], where: str = "") -> list[str]:
    """What differs between two answers of `planned_facts`, as `layout.tp: 2 planned, 4 built`."""
    lines: list[str] = []
    for name in sorted({*planned, *built}):
        old, new = planned.get(name), built.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += plan_differences(old, new, f"{where}{name}.")
        elif old != new:
            lines.append(f"{where}{name}: {old} planned, {new} built")
    return lines


def _write_recipe_lines(built: BuiltRun) -> None:
    run_dir = os.environ.get("SUPERPOD_RUN_DIR")
    if run_dir and os.environ.get("RANK") == "0":
        atomic_file.write(Path(run_dir, "recipe.txt"), "".join(f"{line}\n" for line in built.lines))
