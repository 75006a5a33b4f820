"""Write the output of commands, and of the newest quickstart run, into the README: `make figures`."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "list": "recipes list llama3_70b_16k pretrain h100",
    "plan": "recipes plan llama3_70b --gpu h100 --gpus 64 --gbs 128 --top 3",
    "check": "recipes check llama3_70b --gpu h100 --nodes 6 --layout tp=8,pp=4,cp=2",
}
"""Name of a block of the README, marked by `<!-- figures: NAME -->` -> its command."""
MOST_LINES = {"plan": 8, "quickstart": 11}
"""Block of the README -> maximum number of lines of output that it shows."""
TABLES = {
    "left_out": "python benchmarks/left_out.py benchmarks/reference",
    "accuracy": "python benchmarks/planner_accuracy.py",
    "unseen": "python benchmarks/unseen_runs.py benchmarks/reference",
}
"""Block of docs/accuracy.md -> the command whose output it shows."""
SHOWN = ("troubleshooting.md",)
"""Pages in which every block that begins with `$ recipes` shows the output of its command, 200 columns wide."""


def main() -> None:
    """Write README.md, docs/accuracy.md and docs/troubleshooting.md."""
    from superpod.runtime.runs.run_folder import RunFolder

    readme = ROOT / "README.md"
    text = readme.read_text()
    for name, command in COMMANDS.items():
        text = filled(text, name, command)
    run = RunFolder.latest(ROOT / "runs", "tiny_llama3")
    if run is None:
        print(
            "runs/ has no run of tiny_llama3, so its block stays unchanged; to train one: make quickstart",
            file=sys.stderr,
        )
    else:
        text = filled(text, "quickstart", f"recipes report {run.path.relative_to(ROOT)}")
    readme.write_text(text)
    page = ROOT / "docs" / "accuracy.md"
    for name, command in TABLES.items():
        page.write_text(filled(page.read_text(), name, command))
    for name in SHOWN:
        page = ROOT / "docs" / name
        block = re.compile(r"^(```\n\$ (recipes .*)\n)(?:.*\n)*?(?=```$)", re.MULTILINE)
        page.write_text(block.sub(lambda match: match[1] + run_command(match[2], 200), page.read_text()))


def filled(text: str, name: str, command: str) -> str:
    """Return `text` with the content of block `name` replaced by the command and its output (the first lines)."""
    block = re.compile(rf"(<!-- figures: {name} -->\n```\n).*?(```)", re.DOTALL)
    if not block.search(text):
        sys.exit(f"there is no block {name}: write <!-- figures: {name} --> above a fenced code block")
    output = run_command(command, 100)
    lines = output.splitlines(keepends=True)
    if len(lines) > MOST_LINES.get(name, len(lines)):
        output = "".join([*lines[: MOST_LINES[name]], "...\n"])
    shown = f"$ {command}\n{output}"
    return block.sub(lambda match: match[1] + shown + match[2], text)


def run_command(command: str, columns: int) -> str:
    """Return the output of a command in a terminal with `columns` columns."""
    words = shlex.split(command)
    environment = {**os.environ, "COLUMNS": str(columns)}
    program = Path(sys.executable).parent / words[0]
    done = subprocess.run(
        [program, *words[1:]], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return "".join(f"{line.rstrip().replace(f'{ROOT}/', '')}\n" for line in done.stdout.splitlines())


if __name__ == "__main__":
    main()
