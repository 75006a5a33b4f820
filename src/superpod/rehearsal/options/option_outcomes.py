"""Determines the outcome of an option case with its reason: rejected by a rule, rehearsed, or only built."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.rehearsal.options.option_cases import OptionCase
from superpod.requests.request import Request

if TYPE_CHECKING:
    from nemo_run import Partial

Result = dict[str, Any]
"""The result of a case for JSON: `outcome`, `reason`, and details that depend on the outcome."""
REFUSED, UNCHANGED, TO_REHEARSE, TO_BUILD = "refused", "environment", "to rehearse", "to build"
REHEARSED, BUILT, FAILED = "rehearsed", "built", "failed"
NO_FP8 = "a rehearsal computes in bf16: see this option in bf16"
RANKS, STEPS = 4, 4


def check_case(case: OptionCase) -> Result:
    """Resolve a case, list the fields that its option changes, and decide how to execute it. Imports NeMo."""
    from superpod.requests.resolve import resolve

    result: Result = {"recipe": case.recipe, "overrides": list(case.overrides)}
    try:
        partial = resolve(Request(case.recipe, case.overrides)).partial
    except UserError as refused:
        return result | {"outcome": REFUSED, "reason": str(refused), "next": refused.hint}
    plain_partial = resolve(Request(case.recipe, case.overrides[:-1])).partial
    changes = _diff(plain_partial, partial)
    result["changes"] = changes
    if not changes:
        return result | {"outcome": UNCHANGED, "reason": f"sets {_list_variables(case)}, which has no effect on a CPU"}
    reverted_changes = find_reverted_changes(partial, changes)
    if reverted_changes:
        return result | {"outcome": TO_BUILD, "reason": "; ".join(reverted_changes)}
    if case.precision not in ("bf16", "fp16"):
        return result | {"outcome": TO_BUILD, "reason": NO_FP8}
    return result | {"outcome": TO_REHEARSE}


def find_reverted_changes(partial: Partial, changes: dict[str, list[str]]) -> list[str]:
    """List the changes of an option that a rehearsal reverts, as `field: reason`; [] if there are none.

    `partial` is the recipe with the option, and `changes` is {path: [value without it, value with it]}.
    """
    from superpod.rehearsal.patches.gpu_settings import GPU_ONLY
    from superpod.rehearsal.training.cpu_recipe import rehearse

    rehearsal, made = rehearse(partial, devices=partial.trainer.devices)
    kept_lines = _flatten(rehearsal)
    reason_of_path = {change.path: change.reason for change in made}
    reasons = {}
    for path, (_, new) in changes.items():
        part, _, name = path.rpartition(".")
        neutral, reason = GPU_ONLY.get(name, (None, ""))
        if "callbacks[" in part:  # a field of a callback is kept or removed with the callback
            continue
        if path.startswith("trainer.callbacks"):
            if new and new not in kept_lines.values():  # at any index
                reasons[new.rpartition(".")[2]] = reason_of_path[path]
        elif reason and new not in ("", str(neutral), repr(neutral)):
            reasons[name] = reason
        elif new and kept_lines.get(path) != new:
            reasons[name] = reason_of_path[path]
    return [f"{name}: {reason}" for name, reason in reasons.items()]


def rehearse_case(case: OptionCase, folder: Path) -> Result:
    """Rehearse a case on its smallest number of nodes, with checkpoints and logs in `folder`; return the result."""
    from superpod.rehearsal import rehearsal_run

    rehearsal = rehearsal_run.plan_rehearsal(Request(case.recipe, case.overrides), RANKS)
    rehearsal_run.run_rehearsal(rehearsal, folder, STEPS)
    failed_checks = [f"{check.name}: {check.message}" for check in rehearsal.checks if not check.passed]
    return {
        "outcome": FAILED if failed_checks else REHEARSED,
        "reason": "; ".join(failed_checks),
        "topology": f"{rehearsal.shrunk.job.gpus}: {rehearsal.shrunk.topology}",
        "checks": {check.name: check.message for check in rehearsal.checks},
        "seconds": round(sum(rehearsal.seconds.values())),
    }


def build_case(case: OptionCase) -> Result:
    """Build the first and last pipeline rank of a case with TE's layers, and run a step on meta tensors.

    The process must have imported `superpod.rehearsal.te.import_te` before NeMo.
    """
    from superpod.collection.facts import environment
    from superpod.collection.registry import find
    from superpod.rehearsal.proof.resolved import generation
    from superpod.rehearsal.te.build import build_with_te
    from superpod.requests.resolve import resolve

    run = resolve(Request(case.recipe, case.overrides))
    variables = {v.name: v.value for v in environment.variables(run.job, case.overrides)}
    gpus, pp = run.job.gpus, run.layout.pp
    for rank in sorted({0, gpus - gpus // pp}):
        try:
            build_with_te(run.partial, rank, gpus, generation(find(case.recipe)), variables)
        except Exception as refused:
            return {"outcome": FAILED, "reason": f"rank {rank}: {type(refused).__name__}: {refused}"}
    return {"outcome": BUILT}


def _diff(plain_recipe: Partial, changed: Partial) -> dict[str, list[str]]:
    """Return {path: [before, after]} of all settings that differ between two recipes; a missing setting is ""."""
    before, after = _flatten(plain_recipe), _flatten(changed)
    paths = sorted({*before, *after})
    return {p: [before.get(p, ""), after.get(p, "")] for p in paths if before.get(p) != after.get(p)}


def _flatten(partial: Partial) -> dict[str, str]:
    """Return {dotted path: value as text} of all settings of a recipe."""
    from superpod.nemo2.export.flatten import flatten

    return {line.path: line.value for line in flatten(partial)}


def _list_variables(case: OptionCase) -> str:
    """Return the environment variables that the option adds or changes, as `NAME=VALUE, ...`."""
    from superpod.collection import recipe_job
    from superpod.collection.facts import environment
    from superpod.collection.registry import find

    recipe = find(case.recipe)
    job = recipe_job.job(recipe, recipe.nodes[0])
    old_values = {v.name: v.value for v in environment.variables(job, case.overrides[:-1])}
    variables = environment.variables(job, case.overrides)
    return ", ".join(f"{v.name}={v.value}" for v in variables if old_values.get(v.name) != v.value)
