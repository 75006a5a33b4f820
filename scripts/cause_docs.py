"""Write docs/causes.md: every cause that `recipes why` knows, from its table (`superpod/diagnosis/causes`)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from superpod.diagnosis import causes

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "causes.md"
CORPUS = ROOT / "tests" / "diagnosis" / "why_corpus"

HEAD = """# Why runs fail

The {count} causes that `recipes why RUN|LOG...` knows, as its table has them (`scripts/cause_docs.py` writes this).
How it tells the root from what follows: [troubleshooting.md](troubleshooting.md#why-did-it-fail). A cause of depth
*echo* only follows from others; *ending* comes from outside, or after waiting; *program* is what the run was given or
is made of; *ground* is the machine, a disk or a network. The last column counts the logs of
`tests/diagnosis/why_corpus` that have it as their root.
"""
COLUMNS = "| cause | depth | what it means | what to do | logs |\n|---|---|---|---|---|\n"
DEPTHS = ("echo", "ending", "program", "ground")


def logs() -> Counter[str]:
    """How many logs of the corpus have a cause."""
    firsts = (path.read_text().partition("\n")[0] for path in CORPUS.rglob("*.log"))
    return Counter(first.removeprefix("#: cause ") for first in firsts)


def page() -> str:
    """The whole page."""
    counts = logs()
    parts = [HEAD.format(count=len(causes.ALL))]
    for table in causes.TABLES:
        title = (table.__doc__ or "").partition(":")[2].partition("\n")[0].strip().rstrip(".")
        parts.append(f"\n## {title[:1].upper()}{title[1:]}\n\n{COLUMNS}")
        for cause in table.CAUSES:
            cells = (f"`{cause.name}`", DEPTHS[cause.depth], cause.means, cause.fix, str(counts[cause.name] or ""))
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
