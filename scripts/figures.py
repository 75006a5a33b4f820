"""Put the newest quickstart run into the README: its numbers and its loss curve. `make figures`, after a quickstart."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- figures: quickstart -->\n```\n).*?(```)", re.DOTALL)


def main() -> None:
    """Write README.md and docs/quickstart.png."""
    from superpod.launchers.rundir import RunDir

    run = RunDir.latest(ROOT / "runs", "tiny_llama3")
    if run is None:
        sys.exit("no run of tiny_llama3 in runs/: make quickstart")
    short = run.path.relative_to(ROOT)
    command = [Path(sys.executable).parent / "recipes", "report", str(short)]
    environment = {**os.environ, "COLUMNS": "100"}
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    lines = [line.rstrip().replace(f"{ROOT}/", "") for line in shown.splitlines()]
    block = "\n".join([f"$ recipes report {short}", *lines]) + "\n"
    readme = ROOT / "README.md"
    readme.write_text(BLOCK.sub(lambda match: match[1] + block + match[2], readme.read_text()))
    shutil.copy(run.path / "loss.png", ROOT / "docs" / "quickstart.png")


if __name__ == "__main__":
    main()
