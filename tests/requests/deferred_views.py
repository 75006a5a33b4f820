"""deferred_views.py CASES FILE: how runs that are planned without NeMo differ from those that NeMo builds.

CASES is JSON: [[recipe, [override, ...], facts], ...], or "models" for the first recipe of every task of every model.
FILE gets {case: [difference, ...]}. NeMo is imported once, in this process of its own.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from superpod.collection import registry
from superpod.errors import UserError
from superpod.requests import deferred, resolve
from superpod.requests.request import Request
from superpod.slurm.profiles import profiles
from superpod.slurm.submission import submit

OTHERWISE = ("lines", "source", "is_deferred")
"""Fields that cannot be the same without a configuration."""


def main(cases: str, file: str) -> None:
    known = json.loads(cases)
    requests = _first_recipes() if known == "models" else [_request(*case) for case in known]
    answer = {f"{request.recipe} {request.facts()}": differences(request) for request in requests}
    Path(file).write_text(json.dumps(answer))


def _request(name: str, overrides: list[str], facts: Mapping[str, object] | None = None) -> Request:
    return replace(Request.from_facts(name, facts or {}), overrides=tuple(overrides))


def _first_recipes() -> list[Request]:
    first = {(recipe.model.name, recipe.task): recipe.name for recipe in reversed(registry.recipes().values())}
    return [Request(name) for name in first.values()]


def differences(request: Request) -> list[str]:
    """List differences in the fields of the resolved run and in the executed lines of the batch script."""
    (built, why), (planned, why_not) = _or_refusal(resolve.resolve, request), _or_refusal(deferred.plan_run, request)
    if built is None or planned is None:
        return [] if why == why_not else [f"built: {why or 'yes'}; planned: {why_not or 'yes'}"]
    names = [f.name for f in fields(resolve.ResolvedRun) if f.name not in OTHERWISE]
    lines = [name for name in names if getattr(built, name) != getattr(planned, name)]
    lines += deferred.plan_differences(deferred.planned_facts(planned), deferred.planned_facts(built))
    pretrains = registry.find(request.recipe).task == "pretrain"
    compared = pretrains and not request.overrides  # an export takes a second or two
    if isinstance(built, resolve.BuiltRun) and compared and head(built.export()) != head(planned):
        lines.append("the script")
    return lines


def _or_refusal(function, request: Request) -> tuple[resolve.ResolvedRun | None, str]:
    try:
        return function(request), ""
    except UserError as wrong:
        return None, str(wrong)


def head(run: resolve.ResolvedRun) -> str:
    """The script without the files that it carries: options of sbatch, environment, the ranks' command, facts."""
    text = submit.script(submit.Submission(run, profiles.load("dgx_h100")))
    before, carried, _ = text.partition("exit 1 # exec failed")
    assert carried
    return re.sub(r"== [0-9a-f]{64}\*", "== DIGEST*", before)


if __name__ == "__main__":
    main(*sys.argv[1:])
