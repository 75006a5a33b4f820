"""Executes every `with=` option for each kind of recipe in each precision.

    python -m superpod.rehearsal.options.option_table            all cases that are new or have changed
    python -m superpod.rehearsal.options.option_table KEY ...    these cases, such as fsdp/dense/bf16
    python -m superpod.rehearsal.options.option_table --write    update docs/rehearsal.md without executing anything

Results are written to docs/options.json as soon as they are complete. Rehearsals run in forks of a process that has
imported NeMo with the patches; builds run in another process, with Transformer Engine's layers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from superpod.common.json_files import read_json
from superpod.rehearsal import feature_table, result_files
from superpod.rehearsal.options import option_outcomes
from superpod.rehearsal.options.option_cases import GPUS, OptionCase, list_cases
from superpod.rehearsal.options.option_outcomes import (
    BUILT,
    FAILED,
    REFUSED,
    REHEARSED,
    TO_BUILD,
    TO_REHEARSE,
    UNCHANGED,
    Result,
)

RESULTS = feature_table.DOCS / "options.json"
BEGIN, END = "<!-- generated: python -m superpod.rehearsal.options.option_table --write -->", "<!-- end of options -->"
CELLS = {REHEARSED: "rehearsed", BUILT: "built", UNCHANGED: "variables", REFUSED: "refused", FAILED: "**failed**"}
"""Outcome -> text in the table."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Execute the cases named on the command line; exit with code 1 if a case fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", help="Keys such as fsdp/dense/bf16. Default: all.")
    parser.add_argument("--write", action="store_true", help="Write the table without executing any case.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="File for the results. Default: docs/options.json.")
    parser.add_argument("--build", action="store_true", help=argparse.SUPPRESS)  # for the process that builds
    options = parser.parse_args(arguments)
    if options.write:
        feature_table.PAGE.write_text(update_table(feature_table.PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    cases = [case for case in list_cases() if not options.keys or case.key in options.keys]
    if options.build:
        _build(cases, options.out)
        return
    _execute(cases, options.out, repeat=bool(options.keys))
    results = read_json(options.out) or {}
    failed_keys = [case.key for case in cases if results[case.key]["outcome"] == FAILED]
    print(f"{len(cases)} cases, failed: {', '.join(failed_keys) or 'none'}", flush=True)
    sys.exit(1 if failed_keys else 0)


def _execute(cases: Sequence[OptionCase], out: Path, *, repeat: bool) -> None:
    """Check the cases, rehearse those that a CPU can execute, and build the others that no rule rejects.

    The results are written to `out`. Without `repeat`, unchanged cases that were executed before are skipped.
    """
    feature_table.import_nemo()
    known_results: dict[str, Result] = read_json(out) or {}
    all_keys = {case.key for case in list_cases()}
    to_build = []
    for case in cases:
        result, before = option_outcomes.check_case(case), known_results.get(case.key, {})
        if not repeat and before.get("outcome") in (REHEARSED, BUILT) and _is_same(result, before):
            result = before | {"reason": result.get("reason", before["reason"])}
        elif result["outcome"] == TO_REHEARSE:
            result |= _rehearse(case)
        elif result["outcome"] == TO_BUILD:
            to_build.append(case.key)
        known_results = {key: value for key, value in (read_json(out) or {}).items() if key in all_keys}
        _write(out, known_results | {case.key: result})
    if to_build:
        module = ["-m", "superpod.rehearsal.options.option_table", "--build", "--out", str(out)]
        subprocess.run([sys.executable, "-W", "ignore", *module, *to_build], check=True)


def _is_same(result: Result, before: Result) -> bool:
    """Return whether an earlier result is of the same recipe, overrides and changes."""
    return all(before.get(name) == result[name] for name in ("recipe", "overrides", "changes"))


def _rehearse(case: OptionCase) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="recipes-rehearse-"))
    result = feature_table.run_in_fork(lambda: option_outcomes.rehearse_case(case, folder), folder)
    if "error" in result:
        result = {"outcome": FAILED, "reason": result["error"]}
    if result["outcome"] == REHEARSED:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{case.key}: {result['outcome']} {result['reason']} ({result.get('seconds')} s, {folder})", flush=True)
    return result


def _build(cases: Sequence[OptionCase], out: Path) -> None:
    from superpod.rehearsal.proof import rank_models

    rank_models.start()
    for case in cases:
        result = option_outcomes.build_case(case)
        print(f"{case.key}: {result['outcome']} {result.get('reason', '')}", flush=True)
        known_results = read_json(out) or {}
        _write(out, known_results | {case.key: known_results[case.key] | result})


def _write(out: Path, results: Mapping[str, Result]) -> None:
    result_files.write(out, dict(sorted(results.items())), levels=1)


def format_table(results: Mapping[str, Result]) -> str:
    """Format results ({key of a case: result}) as Markdown: a table of outcomes, then a list of their reasons.

    The table has a row per option and kind of recipe, and a column per precision.
    """
    lines = ["| option | recipe | " + " | ".join(GPUS) + " |", "|---" * (2 + len(GPUS)) + "|"]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for case in list_cases():
        rows.setdefault((case.option, case.kind), {})[case.precision] = CELLS[results[case.key]["outcome"]]
    for (option, kind), by_precision in rows.items():
        cells = [by_precision.get(precision, "") for precision in GPUS]
        lines.append(f"| `{option}` | {kind} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_list_reasons(results)])


def _list_reasons(results: Mapping[str, Result]) -> Iterator[str]:
    """Yield a Markdown list item for each reason why cases were not rehearsed, with the options of these cases."""
    options: dict[tuple[str, str], dict[str, None]] = {}
    for case in list_cases():
        result = results[case.key]
        if result["outcome"] != REHEARSED:
            options.setdefault((CELLS[result["outcome"]], result["reason"]), {})[f"`{case.option}`"] = None
    for (outcome, reason), names in options.items():
        yield f"- {outcome}, {', '.join(names)}: {' '.join(reason.split())}"


def update_table(page: str, results: Mapping[str, Result]) -> str:
    """Return the text of a Markdown page with the table of these results."""
    return result_files.replace_section(page, BEGIN, END, format_table(results))


if __name__ == "__main__":
    main()
