"""`recipes why`: why a run failed: the root, what follows from it, the lines that show it, and the next command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.request_options import AsJson, newest_runs
from superpod.errors import readable

if TYPE_CHECKING:
    from superpod.diagnosis.verdict import Evidence, Finding, Verdict
    from superpod.reports.why import Answer

SUBJECTS = "Runs, log files or folders of logs, of any launcher, packed too; `last` is the newest run."


def why(
    subjects: Annotated[list[str], typer.Argument(metavar="RUN|LOG...", help=SUBJECTS, callback=newest_runs)],
    attempt: Annotated[str, typer.Option("--attempt", help="This attempt of a run; default: the newest.")] = "",
    as_json: AsJson = False,
) -> None:
    """Name why a run failed: the root, what follows from it, the evidence, and the fix; exit 1 if nobody knows."""
    from superpod.diagnosis.verdict import UNKNOWN
    from superpod.reports import why as reasons

    answers = reasons.answers([Path(subject) for subject in subjects], attempt)
    if as_json:
        print(json.dumps([_facts(answer) for answer in answers], indent=1))
    else:
        for answer in answers:
            _print(answer)
    if any(answer.verdict.state == UNKNOWN for answer in answers):
        raise typer.Exit(1)


def _facts(answer: Answer) -> dict[str, object]:
    return {"schema": 1, "subject": answer.subject, "attempt": answer.attempt, **dataclasses.asdict(answer.verdict)}


def _print(answer: Answer) -> None:
    verdict = answer.verdict
    where = f", attempt {answer.attempt}" if answer.attempt else ""
    _say(f"{answer.subject}{where}")
    if verdict.root:
        _print_root(verdict.root, verdict.state, verdict.ended_with)
    else:
        _print_without_root(verdict)
    for finding in verdict.follows:
        _say(f"follows  {finding.name}{_of_ranks(finding)}: {finding.means}")
        for evidence in finding.evidence[:1]:
            _print_evidence(evidence)
    for finding in verdict.others:
        _say(f"also     {finding.name}{_of_ranks(finding)}: {finding.detail or finding.means} ({finding.confidence})")
        for evidence in finding.evidence[:1]:
            _print_evidence(evidence)
    for note in verdict.notes:
        _say(f"note     {note}")


def _print_without_root(verdict: Verdict) -> None:
    from superpod.diagnosis.verdict import NO_FAILURE

    if verdict.first_error:
        _say("unknown  it failed, and no cause is known; the first error of the rank that failed first:")
        _print_evidence(verdict.first_error)
        _say("next     look at the lines above it: an error that should be known is worth an issue with this log")
    elif verdict.state == "unknown" and verdict.words:
        _say(f"unknown  {verdict.words}")
        _say("next     name a log with lines: of the ranks, of srun, or the run's folder")
    elif verdict.state == "unknown":
        _say("unknown  it failed, and its logs name no error")
    elif verdict.state == NO_FAILURE:
        _say(f"no failure found  {verdict.words}; the end of the training is not in the log")
    else:
        _say(f"healthy  {verdict.words}")


def _print_root(root: Finding, state: str, ended_with: Evidence | None) -> None:
    head = "suspect" if state == "suspect" else "cause"
    _say(f"{head:8} {root.name}{_of_ranks(root)}: {root.means} ({root.confidence})")
    if root.detail:
        _say(f"         {root.detail}")
    for evidence in root.evidence:
        _print_evidence(evidence)
    if ended_with:
        _say("ended    with another exception, raised while that one was handled:")
        _print_evidence(ended_with)
    _say(f"next     {root.fix}")


def _of_ranks(finding: Finding) -> str:
    from superpod.common.units import of_ranks

    return f", {of_ranks(finding.ranks)}" if finding.ranks else ""


def _print_evidence(evidence: Evidence) -> None:
    rank = f" rank {evidence.rank}" if evidence.rank is not None else ""
    _say(f"         {evidence.place}{rank}: {evidence.text}")


def _say(text: str) -> None:
    """Logs of others are cited: their codes steer no terminal here."""
    print(readable(text))
