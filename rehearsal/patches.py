"""The table of the patches: ``python -m superpod.rehearsal.patches``; docs/rehearsal.md holds it.

With ``--write FILE``, the table between the two marks of FILE is replaced.
"""

import sys
from pathlib import Path

from superpod.rehearsal.registry import patches
from superpod.rehearsal.settings import GPU_ONLY

BEGIN, END = "<!-- generated: python -m superpod.rehearsal.patches -->", "<!-- end generated -->"


def table() -> str:
    """Every patch, and every setting that is switched off, as two Markdown tables."""
    lines = ["| patch | of | because |", "|---|---|---|"]
    lines += [f"| `{each.name}` | {each.target} | {each.reason} |" for each in patches()]
    lines += ["", "| setting switched off | set to | because |", "|---|---|---|"]
    lines += [f"| `{name}` | `{neutral}` | {reason} |" for name, (neutral, reason) in GPU_ONLY.items()]
    return "\n".join(lines)


def with_table(text: str) -> str:
    """``text`` with the table between its marks renewed."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _main(arguments: list[str]) -> None:
    if arguments[:1] == ["--write"]:
        page = Path(arguments[1])
        page.write_text(with_table(page.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    _main(sys.argv[1:])
