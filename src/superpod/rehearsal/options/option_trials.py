"""What becomes of an option on a recipe: refused by a rule, rehearsed, or built only, and why it is not more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.rehearsal.options.option_cases import OptionCase
from superpod.requests.request import Request

if TYPE_CHECKING:
    from nemo_run import Partial

Result = dict[str, Any]
"""What is known of a case, as JSON: `outcome`, `reason`, and what the outcome rests on."""
REFUSED, UNCHANGED, TO_REHEARSE, TO_BUILD = "refused", "environment", "to rehearse", "to build"
REHEARSED, BUILT, FAILED = "rehearsed", "built", "failed"
IN_FP8 = "a rehearsal computes in bf16: its run of this option is the line of bf16"
RANKS, STEPS = 4, 4


def judged(case: OptionCase) -> Result:
    """What the rules say of a case, what the option changes, and what remains to be executed. Needs NeMo."""
    from superpod.requests.resolve import resolve

    result: Result = {"recipe": case.recipe, "overrides": list(case.overrides)}
    try:
        partial = resolve(Request(case.recipe, case.overrides)).partial
    except UserError as refused:
        return result | {"outcome": REFUSED, "reason": str(refused), "next": refused.hint}
    plain = resolve(Request(case.recipe, case.overrides[:-1])).partial
    changes = _changes(plain, partial)
    result["changes"] = changes
    if not changes:
        return result | {"outcome": UNCHANGED, "reason": f"sets {_variables(case)}: nothing that a CPU reads"}
    if off := switched_off(partial, changes):
        return result | {"outcome": TO_BUILD, "reason": "; ".join(off)}
    if case.precision not in ("bf16", "fp16"):
        return result | {"outcome": TO_BUILD, "reason": IN_FP8}
    return result | {"outcome": TO_REHEARSE}


def switched_off(partial: Partial, changes: dict[str, list[str]]) -> list[str]:
    """Which of an option's changes a rehearsal takes back, with the reasons; [] = it runs with all of them."""
    from superpod.rehearsal.patches.gpu_settings import GPU_ONLY
    from superpod.rehearsal.training.cpu_recipe import rehearse

    small, made = rehearse(partial, devices=partial.trainer.devices)
    kept, why = _lines(small), {change.path: change.reason for change in made}
    reasons = {}
    for path, (_, new) in changes.items():
        part, _, name = path.rpartition(".")
        neutral, reason = GPU_ONLY.get(name, (None, ""))
        if "callbacks[" in part:  # a field of one, which stays or goes with it
            continue
        if path.startswith("trainer.callbacks"):
            if new and new not in kept.values():  # whatever its number is now
                reasons[new.rpartition(".")[2]] = why[path]
        elif reason and new not in ("", str(neutral), repr(neutral)):
            reasons[name] = reason
        elif new and kept.get(path) != new:
            reasons[name] = why[path]
    return [f"{name}: {reason}" for name, reason in reasons.items()]


def rehearsed(case: OptionCase, folder: Path) -> Result:
    """The rehearsal of a case in its smallest shape: the real loop of NeMo, compared with one rank."""
    from superpod.rehearsal import trial

    planned = trial.plan(case.recipe, None, RANKS, case.overrides)
    done = trial.facts(trial.conduct(planned, folder, STEPS))
    checks = {check["name"]: check["message"] for check in done["checks"]}
    failed = [f"{check['name']}: {check['message']}" for check in done["checks"] if not check["passed"]]
    return {
        "outcome": FAILED if failed else REHEARSED,
        "reason": "; ".join(failed),
        "topology": f"{done['ranks']}: {done['topology']}",
        "checks": checks,
        "seconds": round(sum(done["seconds"].values())),
    }


def built(case: OptionCase) -> Result:
    """The case's first and last pipeline rank with Transformer Engine's layers, forward and backward by shape.

    In a process that began with `superpod.rehearsal.te.entry`.
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


def _changes(plain: Partial, changed: Partial) -> dict[str, list[str]]:
    """{path: [before, after]}; "" = no such line."""
    before, after = _lines(plain), _lines(changed)
    paths = sorted({*before, *after})
    return {p: [before.get(p, ""), after.get(p, "")] for p in paths if before.get(p) != after.get(p)}


def _lines(partial: Partial) -> dict[str, str]:
    from superpod.nemo2.export.flatten import flatten

    return {line.path: line.value for line in flatten(partial)}


def _variables(case: OptionCase) -> str:
    """The environment variables that the option adds or changes."""
    from superpod.collection import recipe_job
    from superpod.collection.facts import environment
    from superpod.collection.registry import find

    recipe = find(case.recipe)
    job = recipe_job.job(recipe, recipe.nodes[0])
    plain, special = (
        {v.name: v.value for v in environment.variables(job, overrides)}
        for overrides in (case.overrides[:-1], case.overrides)
    )
    return ", ".join(f"{name}={value}" for name, value in special.items() if plain.get(name) != value)
