"""Score the verdicts of `submit` and `render`: `python -m benchmarks.override_cases CASES.jsonl [OUT.txt]`.

One case per line: {id, recipe, nodes, overrides, expect: "ok" | "refuse", why, source}. Each is processed like in
`recipes render`: the request is checked, resolved with NeMo, compared with the GPU, and its models are built. This
process and one child process run all cases, because importing NeMo takes 10 to 17 s.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.requests.request import Request
from superpod.requests.resolve import ResolvedRun, resolve


def main() -> None:
    """Score the cases of a file, and print the cases with a wrong verdict."""
    cases = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines() if line.strip()]
    answers = check_all(cases)
    lines = [
        f"{'right' if got == case['expect'] else 'WRONG'} {case['id']} expected {case['expect']}, got {got}: "
        f"{case['recipe']} {' '.join(case['overrides'])}: {message[:300]!r} ({case['why']})"
        for case, (got, message) in zip(cases, answers, strict=True)
    ]
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text("\n".join(lines) + "\n")
    print("\n".join(line for line in lines if line.startswith("WRONG")))
    print(f"{sum(line.startswith('right') for line in lines)} of {len(lines)} verdicts are right")


def check_all(cases: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (`ok`, `refuse` or `crash`; message) of each case."""
    from superpod.rehearsal import validation

    answers: dict[int, tuple[str, str]] = {}
    runs: dict[int, ResolvedRun] = {}
    for number, case in enumerate(cases):
        try:
            run = _resolve_case(case)
        except UserError as refused:
            answers[number] = "refuse", str(refused)
            continue
        except Exception as fault:  # a traceback is never the right answer
            answers[number] = "crash", repr(fault)
            continue
        if validation.is_changed(run.request):
            runs[number] = run
        else:
            answers[number] = "ok", "nothing to build"
    for number, outcome in zip(runs, validation.build_or_read(list(runs.values())), strict=True):
        answers[number] = ("refuse", "; ".join(outcome.refused)) if outcome.refused else ("ok", outcome.not_built)
    return [answers[number] for number in range(len(cases))]


def _resolve_case(case: dict[str, Any]) -> ResolvedRun:
    """Return the resolved run of a case. Raises UserError if `render` would refuse it before it builds models."""
    from superpod.slurm.preflight import preflight
    from superpod.slurm.profiles import profiles
    from superpod.slurm.submission.submit import Submission

    request = Request(case["recipe"], tuple(case["overrides"]), None, case.get("nodes"))
    request.check()
    request.require_legal_layout()
    run = resolve(request.with_resolved_size()).export()
    cluster = profiles.load(f"dgx_{run.job.node.gpu.name}")
    preflight.refuse_unfit(Submission(run, cluster, "", ""))
    return run


if __name__ == "__main__":
    main()
