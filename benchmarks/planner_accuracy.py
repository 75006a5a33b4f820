"""How far the planner is from published and measured runs: memory, step time, runs of other software, and times after
`recipes calibrate`.

    python benchmarks/planner_accuracy.py [FOLDER]      default: benchmarks/reference

The bounds of each group stand beside its figures; `tests/planner/accuracy/test_accuracy.py` holds them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import accuracy_calibration
import accuracy_memory
import accuracy_time
import unseen_runs

REFERENCE = Path(__file__).parent / "reference"


def main() -> int:
    reference = Path(sys.argv[1]) if len(sys.argv) > 1 else REFERENCE
    if not (reference / "memory.csv").is_file():
        print(f"no memory.csv and step_time.csv in {reference}: name their folder", file=sys.stderr)
        return 2
    memory = accuracy_memory.main(reference)
    print()
    time = accuracy_time.main(reference)
    print()
    unseen = unseen_runs.main(REFERENCE)
    print()
    return max(memory, time, unseen, accuracy_calibration.main(reference))


if __name__ == "__main__":
    sys.exit(main())
