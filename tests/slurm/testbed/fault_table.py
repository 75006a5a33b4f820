"""The table of faults in docs/slurm.md; tests write its lines with --update-goldens."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from superpod.runtime.runs.run_folder import Attempt
    from tests.slurm.testbed.runs import BedRun

DOCS = Path(__file__).parents[3] / "docs" / "slurm.md"
BLOCK = re.compile(r"<!-- faults -->\n.*?<!-- end faults -->", re.DOTALL)
HEAD = ["| fault | training | what the run did | attempts | steps repeated |", "|---|---|---|---|---|"]
LONGEST = 130


@dataclass(frozen=True)
class Line:
    """What one training run did under one fault."""

    fault: str
    training: str
    did: str
    attempts: int
    repeated: int

    @classmethod
    def from_run(cls, fault: str, training: str, run: BedRun) -> Line:
        """As the run's own folder tells it."""
        return cls(fault, training, _deeds(run.run.attempts), len(run.run.attempts), sum(run.lost()))

    def __str__(self) -> str:
        did = self.did.replace("|", "/")
        return f"| {self.fault} | {self.training} | {did} | {self.attempts} | {self.repeated} |"


def _deeds(attempts: list[Attempt]) -> str:
    """Describe how each attempt ended and where the next one resumed."""
    if len(attempts) == 1:
        return "went on, in the same job"
    deeds = []
    for attempt, following in itertools.pairwise(attempts):
        resume = following.resume
        aside = [f"step {d['step']}" for d in resume.get("set_aside", [])]
        deed = f"{_end(attempt)}; {' and '.join(aside)} set aside" if aside else _end(attempt)
        deeds.append(f"{deed}; resumes from step {resume['step']}" if resume else deed)
    if attempts[-1].result.get("state") != "done":
        deeds.append(f"{_end(attempts[-1])}; no job follows")
    return ". ".join(deed[0].upper() + deed[1:] for deed in dict.fromkeys(deeds))


def _end(attempt: Attempt) -> str:
    """Format an attempt's state and message without parts that differ between runs."""
    message = re.split("; (?:resumes from|goes on from|no checkpoint yet)", str(attempt.result.get("message", "")))[0]
    message = message.replace(str(attempt.path.parents[1]), "RUN")
    message = re.sub(r"\(Killed; [^)]*\)", "(Killed)", re.sub(r" \[\w+\](?=\)?$)", "", message))  # a cause's name
    cut = message if len(message) <= LONGEST else message[: LONGEST - 3] + "..."
    return f"{attempt.result.get('state')}: {cut}" if cut else str(attempt.result.get("state"))


def lines(text: str) -> dict[tuple[str, str], str]:
    """The lines of the table in `text`, by fault and training."""
    block = BLOCK.search(text)
    assert block, f"no <!-- faults --> in {DOCS}"
    rows = [line for line in block[0].splitlines() if line.startswith("| ")][1:]
    return {(cells[1].strip(), cells[2].strip()): row for row in rows if (cells := row.split("|"))}


def with_line(text: str, line: Line) -> str:
    """`text` with the line in its table, in place of an older one of the same case; other lines stay."""
    rows = lines(text) | {(line.fault, line.training): str(line)}
    faults = list(dict.fromkeys(fault for fault, _ in rows))
    ordered = sorted(rows, key=lambda key: (faults.index(key[0]), key[1] != "toy"))
    block = ["<!-- faults -->", *HEAD, *(rows[key] for key in ordered), "<!-- end faults -->"]
    return BLOCK.sub(lambda _: "\n".join(block), text)


def write(line: Line) -> None:
    """Put a line into docs/slurm.md."""
    DOCS.write_text(with_line(DOCS.read_text(), line))
