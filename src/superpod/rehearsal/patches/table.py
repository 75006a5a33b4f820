"""Prints the tables of patches in docs/rehearsal.md: ``python -m superpod.rehearsal.patches.table``.

``--write FILE`` updates them in FILE.
"""

import sys
from pathlib import Path

from superpod.rehearsal import result_files
from superpod.rehearsal.patches.gpu_settings import GPU_ONLY
from superpod.rehearsal.patches.registry import patches

BEGIN, END = "<!-- generated: python -m superpod.rehearsal.patches.table -->", "<!-- end generated -->"


def format_tables() -> str:
    """Format all patches, and all settings that a rehearsal switches off, as two Markdown tables."""
    lines = ["| patch | target | reason |", "|---|---|---|"]
    lines += [f"| `{patch.name}` | {patch.target} | {patch.reason} |" for patch in patches()]
    lines += ["", "| setting switched off | set to | reason |", "|---|---|---|"]
    lines += [f"| `{name}` | `{neutral}` | {reason} |" for name, (neutral, reason) in GPU_ONLY.items()]
    return "\n".join(lines)


def update_tables(text: str) -> str:
    """Return the text of docs/rehearsal.md with the current tables."""
    return result_files.replace_section(text, BEGIN, END, format_tables())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        page = Path(sys.argv[2])
        page.write_text(update_tables(page.read_text()))
    else:
        print(format_tables())
