"""Builds the models before a job is submitted, as in `recipes check`.

`resolve` has already applied the rules that need no separate process. `require` adds the dry build in a separate
process (`configuration_check`), and caches the outcome for the part of the resolved configuration that the build reads:
a later command with the same model, layout and precision needs no build.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from superpod.collection import installed
from superpod.collection.facts.override_fields import path_of
from superpod.common.json_files import read_json, write_json
from superpod.errors import UserError
from superpod.rehearsal import configuration_check
from superpod.requests import deferred, resolve
from superpod.requests.request import Request
from superpod.requests.resolve import ResolvedRun
from superpod.runtime.runs import versions

UNREAD_OVERRIDES = (
    *(*deferred.NODE_ONLY_OVERRIDES, "trainer.max_steps", "log", "resume"),
    *("data.paths", "data.dataset_root", "data.dataset_kwargs", "data.index_mapping_dir", "data.split", "data.seed"),
)
"""Paths of fields that the build does not read. Configurations that differ only in these fields share one build."""

SKIPPED = "the models were not built (--no-build); `recipes check` with the same changes builds them"


@dataclass(frozen=True)
class BuildOutcome:
    """The result of building the models of three ranks."""

    refused: tuple[str, ...] = ()
    """Errors of Megatron, Transformer Engine or NeMo, one line each."""
    not_built: str = ""
    """What this machine lacks for building the models, or ""."""


def require(runs: Sequence[ResolvedRun], *, build: bool = True) -> list[str]:
    """Require that the models of resolved runs can be built. One process builds those that are not in the cache.

    Args:
        runs: the runs of one command; a sweep has several.
        build: whether to build models; False with `--no-build`.

    Returns:
        Notes for the user about models that were not built.

    Raises:
        UserError: models cannot be built; the message contains the libraries' errors for each run.
        CheckProcessError: the process that builds the models failed.
    """
    if installed.missing_package():
        return []  # deferred.NO_NEMO_NOTE tells the user
    changed = [run for run in runs if is_changed(run.request)]
    if not changed:
        return []
    if not build:
        return [SKIPPED]
    outcomes = build_or_read([_add_lines(run) for run in changed])
    errors: list[str] = []
    for run, outcome in zip(changed, outcomes, strict=True):
        prefix = f"{' '.join(run.request.overrides)}: " if len(runs) > 1 else ""
        errors += [prefix + error for error in outcome.refused]
    if errors:
        raise UserError(
            "\n".join(dict.fromkeys(errors)),
            "`recipes check` with the same changes shows all details; --no-build skips this check",
        )
    notes = [f"models not built on this machine: {outcome.not_built}" for outcome in outcomes if outcome.not_built]
    return list(dict.fromkeys(notes))


def is_changed(request: Request) -> bool:
    """Return whether a request may have a different model, layout or precision than the recipe that was proven."""
    from superpod.collection.registry import find

    recipe = request.sized_recipe()
    if deferred.is_user_recipe(recipe) or not set(recipe.nodes) <= set(find(request.recipe).nodes):
        return True
    if request.seq or request.gbs or request.batch_tokens or request.layout or request.best_layout:
        return True
    return any(not _is_unread(path_of(text)) for text in request.overrides)


def _is_unread(path: str) -> bool:
    """Return whether the field at `path`, or a field that contains it, is one of `UNREAD_OVERRIDES`."""
    return any(f"{path}.".startswith(f"{name}.") or path.startswith(f"{name}[") for name in UNREAD_OVERRIDES)


def _add_lines(run: ResolvedRun) -> ResolvedRun:
    """Return the run with the lines of its configuration; a run with deferred data is resolved without the data."""
    if not run.is_deferred:
        return run
    return resolve.resolve_cached(deferred.without_deferred_data(run.request))


def build_or_read(runs: Sequence[ResolvedRun]) -> list[BuildOutcome]:
    """Return the build outcome of each run, from the cache or from one process that builds all others.

    Raises:
        CheckProcessError: the process that builds the models failed.
    """
    paths = [_cache_path(run) for run in runs]
    cached_answers = {path: _read_cache(path) for path in paths}
    missing_requests = {
        path: run.request for path, run in zip(paths, runs, strict=True) if cached_answers[path] is None
    }
    if missing_requests:
        answers = configuration_check.check_all_in_subprocess(list(missing_requests.values()))
        for path, answer in zip(missing_requests, answers, strict=True):
            outcome = _to_outcome(answer)
            cached_answers[path] = outcome
            if not outcome.refused:  # errors are not cached, because this machine may have caused them
                _write_cache(path, outcome)
    return [cached_answers[path] or BuildOutcome() for path in paths]


def is_cached(run: ResolvedRun) -> bool:
    """Return whether `require` can accept this run without building its models."""
    if installed.missing_package() or not is_changed(run.request):
        return True
    return _read_cache(_cache_path(_add_lines(run))) is not None


def _to_outcome(answer: configuration_check.CheckReport | UserError) -> BuildOutcome:
    if isinstance(answer, UserError):
        return BuildOutcome((str(answer),))
    refusals = [violation.message for violation in answer.broken]
    if answer.build_error:
        refusals.append(f"the model cannot be built: {answer.build_error}")
    return BuildOutcome(tuple(refusals), answer.not_built)


def _cache_path(run: ResolvedRun) -> Path:
    """Return the path of a run's cache file; its name is a digest of all inputs of the build."""
    read_lines = [line for line in run.lines if not _is_unread(line.partition(" = ")[0])]
    inputs = [run.request.recipe, run.job.node.gpu.name, read_lines, versions.versions()]
    digest = hashlib.sha256(json.dumps(inputs, default=str).encode())
    digest.update(resolve.hash_sources((*resolve.SOURCES, "rehearsal")))
    return resolve.cache_folder().with_name("builds") / f"{digest.hexdigest()[:32]}.json"


def _read_cache(path: Path) -> BuildOutcome | None:
    """Return the outcome in a cache file, or None if the file is missing or unreadable."""
    not_built = (read_json(path) or {}).get("not_built")
    return BuildOutcome(not_built=not_built) if isinstance(not_built, str) else None


def _write_cache(path: Path, outcome: BuildOutcome) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"not_built": outcome.not_built})
    except OSError:
        pass  # without a writable home directory, the next command builds again
