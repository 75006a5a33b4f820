"""Writes docs/nemo_recipes.md: what `recipes check` finds in the recipes that NeMo ships.

    python scripts/nemo_recipes.py            judges every one: about 15 minutes on two cores
    python scripts/nemo_recipes.py llama3_8b  judges these files anew, and leaves the page's other rows as they are

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
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from superpod.planner.rules.rules import Violation

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


def judged(name: str, nodes: int | None = None) -> Row:
    """Judge one recipe, in this process: at NeMo's size, and where that is too small, at one that fits its layout."""
    from superpod.errors import UserError
    from superpod.rehearsal import judge
    from superpod.requests.request import Request

    try:
        judgement = judge.judge(Request(f"nemo:{name}", num_nodes=nodes), confirm=True)
    except UserError as refused:
        return Row(name, "-", "no: no whole recipe", str(refused))
    except Exception as error:  # a row of the table, not the end of it
        return Row(name, "-", "not judged", f"{type(error).__name__}: {error}"[:300])
    run = judgement.title or "-"
    if judgement.broken and nodes is None and (least := _least_nodes(judgement.broken)):
        there = judged(name, least)
        why = f"{judgement.broken[0].message}; with num_nodes={least}: {there.starts}"
        return Row(name, run, "no: a rule", why, judgement.build_error)
    if judgement.broken:
        return Row(name, run, "no: a rule", "; ".join(b.message for b in judgement.broken), judgement.build_error)
    if judgement.build_error:
        return Row(name, run, "no: the libraries", judgement.build_error, judgement.build_error)
    if judgement.verdict == "oom":
        return Row(name, run, "no: memory, as planned", judgement.short)
    if judgement.not_built:
        return Row(name, run, "yes, not built here", judgement.not_built)
    if judgement.verdict == "unknown":
        return Row(name, run, "yes, as far as it is built", judgement.unplanned)
    return Row(name, run, "yes", "; ".join(w.message for w in judgement.warnings[:1]))


def _least_nodes(broken: list[Violation]) -> int | None:
    """Nodes of 8 GPUs for a layout that is larger than the run; None where the layout is refused for another reason."""
    match = re.search(r"= (\d+) must divide the number of GPUs, which is (\d+)", broken[0].message)
    return int(match[1]) // 8 if match and int(match[1]) > int(match[2]) and int(match[1]) % 8 == 0 else None


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


def _merged(rows: list[Row]) -> list[Row]:
    """The page's rows, with these in their places."""
    new = {row.name: row for row in rows}
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGE.read_text().splitlines() if "/" in line[:60]]
    old = [Row(*(cell.strip().replace("\\|", "|") for cell in cells)) for cells in lines if len(cells) == 5]
    return [new.get(row.name, row._replace(raised="" if row.raised == "-" else row.raised)) for row in old]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="NeMo's files; none = all, and the page is written")
    wanted = parser.parse_args().files
    from superpod.rehearsal import judge
    from superpod.requests.subject import nemo_recipes

    judge.prepare()
    import superpod.nemo2.build.partial  # noqa: F401 - NeMo, once for all

    tasks_of = nemo_recipes()
    names = [f"{file}/{task}" for file, tasks in tasks_of.items() for task in tasks if not wanted or file in wanted]
    rows = []
    for number, name in enumerate(names, 1):
        rows.append(forked(name))
        print(f"{number}/{len(names)} {rows[-1].line()}", file=sys.stderr, flush=True)
    PAGE.write_text(page(_merged(rows) if wanted else rows, len(tasks_of)))


if __name__ == "__main__":
    main()
