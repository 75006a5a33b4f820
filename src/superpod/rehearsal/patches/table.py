"""Prints the tables of patches in docs/rehearsal.md: ``python -m superpod.rehearsal.patches.table``.

``--write FILE`` replaces the text between the two marks of FILE.
"""

import sys
from pathlib import Path

from superpod.rehearsal.patches.gpu_settings import GPU_ONLY
from superpod.rehearsal.patches.registry import patches

BEGIN, END = "<!-- generated: python -m superpod.rehearsal.patches.table -->", "<!-- end generated -->"


def table() -> str:
    """All patches, and all settings that a rehearsal switches off, as two Markdown tables."""
    lines = ["| patch | of | because |", "|---|---|---|"]
    lines += [f"| `{patch.name}` | {patch.target} | {patch.reason} |" for patch in patches()]
    lines += ["", "| setting switched off | set to | because |", "|---|---|---|"]
    lines += [f"| `{name}` | `{neutral}` | {reason} |" for name, (neutral, reason) in GPU_ONLY.items()]
    return "\n".join(lines)


def with_table(text: str) -> str:
    """``text`` with new tables between its marks."""
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
