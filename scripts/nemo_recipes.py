"""Writes docs/nemo_recipes.md: what `recipes check` finds in the recipes that NeMo ships.

    python scripts/nemo_recipes.py            judges every one: about 15 minutes on two cores
    python scripts/nemo_recipes.py llama3_8b  prints the rows of these files only

One process imports Transformer Engine's Python and NeMo, and forks for each recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "nemo_recipes.md"
LIMIT_S = 300
"""Seconds for one recipe."""


class Row(NamedTuple):
    """A recipe of NeMo's, and what is known of it before it trains."""

    name: str
    run: str
    """GPUs, precision and layout."""
    starts: str
    """yes, or no and by whom: a rule, the planner's memory, the libraries themselves."""
    why: str
    raised: str = ""
    """What building the model of a rank raised."""

    def line(self) -> str:
        """As a row of the table."""
        return f"| {' | '.join(_cell(text) for text in self)} |"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|") or "-"


def judged(name: str) -> Row:
    """Judge one recipe, in this process."""
    from superpod.errors import UserError
    from superpod.lifecycle.request import Request
    from superpod.rehearsal import judge

    try:
        found = judge.judge(Request(f"nemo:{name}"), confirm=True)
    except UserError as refused:
        return Row(name, "-", "no: no whole recipe", str(refused))
    except Exception as error:  # a row of the table, not the end of it
        return Row(name, "-", "not judged", f"{type(error).__name__}: {error}"[:300])
    run = found.title or "-"
    if found.broken:
        return Row(name, run, "no: a rule", "; ".join(b.message for b in found.broken), found.build_error)
    if found.build_error:
        return Row(name, run, "no: the libraries", found.build_error, found.build_error)
    if found.verdict == "oom":
        return Row(name, run, "no: memory, as planned", found.short)
    if found.verdict == "unknown":
        return Row(name, run, "yes, as far as it is built", found.unplanned)
    return Row(name, run, "yes", "; ".join(w.message for w in found.warnings[:1]))


def forked(name: str) -> Row:
    """The same in a fork: what one recipe leaves behind is not the next one's."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        child = os.fork()
        if not child:
            import signal

            signal.alarm(LIMIT_S)
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            Path(answer.name).write_text(json.dumps(judged(name)))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = Path(answer.name).read_text()
        return Row(*json.loads(text)) if text else Row(name, "-", "not judged", f"its process ended with code {code}")


def page(rows: list[Row], files: int) -> str:
    """The whole page."""
    from importlib import metadata

    head = (ROOT / "docs" / "nemo_recipes_head.md").read_text()
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.starts] = counts.get(row.starts, 0) + 1
    listed = "\n".join(f"| {starts} | {count} |" for starts, count in sorted(counts.items(), key=lambda c: -c[1]))
    confirmed = [row for row in rows if row.starts == "no: a rule" and row.raised]
    return head.format(
        version=metadata.version("nemo_toolkit"),
        files=files,
        recipes=len(rows),
        counts=listed,
        confirmed=len(confirmed),
        rows="\n".join(row.line() for row in rows),
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="NeMo's files; none = all, and the page is written")
    wanted = parser.parse_args().files
    from superpod.lifecycle.subject import nemo_recipes
    from superpod.rehearsal import judge

    judge.prepare()
    import superpod.recipes.partial  # noqa: F401 - NeMo, once for all

    tasks_of = nemo_recipes()
    names = [f"{file}/{task}" for file, tasks in tasks_of.items() for task in tasks if not wanted or file in wanted]
    rows = []
    for number, name in enumerate(names, 1):
        rows.append(forked(name))
        print(f"{number}/{len(names)} {rows[-1].line()}", file=sys.stderr, flush=True)
    if wanted:
        print("\n".join(row.line() for row in rows))
    else:
        PAGE.write_text(page(rows, len(tasks_of)))


if __name__ == "__main__":
    main()
