"""`recipes why`: find the root cause of a failed run in its logs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.options.request_options import AsJson, resolve_runs
from superpod.common.units import format_ranks
from superpod.errors import readable

if TYPE_CHECKING:
    from superpod.diagnosis.verdict import Evidence, Finding, Verdict
    from superpod.reports.why import Diagnosis

SUBJECTS = "Runs, logs (also compressed) or folders of logs, from any launcher; `last` is the newest run."


def why(
    subjects: Annotated[list[str], typer.Argument(metavar="RUN|LOG...", help=SUBJECTS, callback=resolve_runs)],
    attempt: Annotated[str, typer.Option("--attempt", help="Attempt of the run. Default: the latest.")] = "",
    as_json: AsJson = False,
) -> None:
    """Explain why a run failed: root cause, its consequences, evidence and fix; exit 1 if the cause is unknown."""
    from superpod.diagnosis.verdict import UNKNOWN
    from superpod.reports import why as reasons

    answers = reasons.diagnose_paths([Path(subject) for subject in subjects], attempt)
    if as_json:
        tables.print_json(
            [
                {"schema": 1, "subject": one.subject, "attempt": one.attempt, **dataclasses.asdict(one.verdict)}
                for one in answers
            ]
        )
    else:
        for answer in answers:
            _print(answer)
    if any(answer.verdict.state == UNKNOWN for answer in answers):
        raise typer.Exit(1)


def _print(answer: Diagnosis) -> None:
    verdict = answer.verdict
    attempt = f", attempt {answer.attempt}" if answer.attempt else ""
    _print_line(f"{answer.subject}{attempt}")
    if verdict.root:
        _print_root(verdict.root, verdict.state, verdict.ended_with)
    else:
        _print_without_root(verdict)
    for finding in verdict.follows:
        _print_line(f"follows  {finding.name}{_ranks(finding)}: {finding.means}")
        for evidence in finding.evidence[:1]:
            _print_evidence(evidence)
    for finding in verdict.others:
        meaning = finding.detail or finding.means
        _print_line(f"also     {finding.name}{_ranks(finding)}: {meaning} ({finding.confidence})")
        for evidence in finding.evidence[:1]:
            _print_evidence(evidence)
    for note in verdict.notes:
        _print_line(f"note     {note}")


def _print_without_root(verdict: Verdict) -> None:
    from superpod.diagnosis.verdict import NO_FAILURE, UNKNOWN

    if verdict.state == NO_FAILURE:
        _print_line(f"no failure found  {verdict.words}")
        if verdict.first_error:
            _print_line("         this line may report an error:")
            _print_evidence(verdict.first_error)
    elif verdict.first_error:
        _print_line("unknown  the cause is not known; first error of the rank that failed first:")
        _print_evidence(verdict.first_error, with_frame=True)
        _print_line("next     read the lines before it; to have this cause detected, open an issue with this log")
    elif verdict.state == UNKNOWN and verdict.words:
        _print_line(f"unknown  {verdict.words}")
        _print_line("next     pass a non-empty log of the ranks or of srun, or the run folder")
    elif verdict.state == UNKNOWN:
        _print_line("unknown  the run failed, but its logs contain no error")
    else:
        _print_line(f"healthy  {verdict.words}")


def _print_root(root: Finding, state: str, ended_with: Evidence | None) -> None:
    head = "suspect" if state == "suspect" else "cause"
    _print_line(f"{head:8} {root.name}{_ranks(root)}: {root.means} ({root.confidence})")
    if root.detail:
        _print_line(f"         {root.detail}")
    for evidence in root.evidence:
        _print_evidence(evidence, with_frame=root.confidence == "possible")
    if ended_with:
        _print_line("ended    with a different exception, raised while the first one was handled:")
        _print_evidence(ended_with)
    _print_line(f"next     {root.fix}")


def _ranks(finding: Finding) -> str:
    return f", {format_ranks(finding.ranks)}" if finding.ranks else ""


def _print_evidence(evidence: Evidence, with_frame: bool = False) -> None:
    rank = f" rank {evidence.rank}" if evidence.rank is not None else ""
    _print_line(f"         {evidence.location}{rank}: {evidence.text}")
    if with_frame and evidence.frame:
        _print_line(f"         raised in {evidence.frame}")


def _print_line(text: str) -> None:
    # Quoted logs may contain control characters of a terminal, which `readable` replaces.
    print(readable(text))
