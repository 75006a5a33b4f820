"""Compare the planner with published and measured runs: memory, step time, other software, and `recipes calibrate`.

    python benchmarks/planner_accuracy.py [FOLDER]      default: benchmarks/reference

The table of each group includes its bounds, which `tests/planner/accuracy/test_accuracy.py` tests.
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
        print(f"{reference} has no memory.csv: pass the folder of memory.csv and step_time.csv", file=sys.stderr)
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
