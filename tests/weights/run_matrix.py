"""run_matrix.py FOLDER NAME...: import and export cases of the matrix in one process; writes FOLDER/answer.json."""

import json
import sys
import time
import traceback
from pathlib import Path


def main(root: Path, names: list[str]) -> None:
    from superpod.rehearsal import install

    install()
    from tests.weights import matrix_cases, matrix_runs

    answers = {}
    for name in names or matrix_cases.CASES:
        began = time.monotonic()
        try:
            answers[name] = matrix_runs.result(root, name)
        except Exception as error:
            traceback.print_exc()
            answers[name] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"{time.monotonic() - began:.1f} s {name}: {answers[name]}", flush=True)
    (root / "answer.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    root.mkdir(exist_ok=True)
    main(root, [name.replace("_~", " ") for name in sys.argv[2:]])
