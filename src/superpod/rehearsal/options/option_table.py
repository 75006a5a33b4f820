"""Executes every `with=` option on a recipe of each kind in each precision.

    python -m superpod.rehearsal.options.option_table            all cases; what was rehearsed and is the same not again
    python -m superpod.rehearsal.options.option_table KEY ...    these, such as fsdp/dense/bf16
    python -m superpod.rehearsal.options.option_table --write    the table in docs/rehearsal.md; execute nothing

Results go into docs/options.json as soon as they are known. Rehearsals are forks of a process that has NeMo with a
rehearsal's patches; builds run in another, with Transformer Engine's layers.
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

from superpod.common.files import read_json
from superpod.rehearsal import result_files, table
from superpod.rehearsal.options import option_trials
from superpod.rehearsal.options.option_cases import GPUS, OptionCase, cases
from superpod.rehearsal.options.option_trials import (
    BUILT,
    FAILED,
    REFUSED,
    REHEARSED,
    TO_BUILD,
    TO_REHEARSE,
    UNCHANGED,
    Result,
)

RESULTS = table.DOCS / "options.json"
BEGIN, END = "<!-- generated: python -m superpod.rehearsal.options.option_table --write -->", "<!-- end of options -->"
WORDS = {REHEARSED: "rehearsed", BUILT: "built", UNCHANGED: "variables", REFUSED: "refused", FAILED: "**failed**"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Execute the cases that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", help="option/kind/precision; default: all")
    parser.add_argument("--write", action="store_true", help="write the table, and execute nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--build", action="store_true", help=argparse.SUPPRESS)  # in the process that builds
    options = parser.parse_args(arguments)
    if options.write:
        table.PAGE.write_text(with_table(table.PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    chosen = [case for case in cases() if not options.keys or case.key in options.keys]
    if options.build:
        _build(chosen, options.out)
        return
    _execute(chosen, options.out, again=bool(options.keys))
    results = read_json(options.out) or {}
    failed = [case.key for case in chosen if results[case.key]["outcome"] == FAILED]
    print(f"{len(chosen)} cases, failed: {', '.join(failed) or 'none'}", flush=True)
    sys.exit(1 if failed else 0)


def _execute(chosen: Sequence[OptionCase], out: Path, *, again: bool) -> None:
    """Judge the cases, rehearse those that a rehearsal can show, and have all that are not refused built."""
    table.import_nemo()
    known: dict[str, Result] = read_json(out) or {}
    everything = {case.key for case in cases()}
    to_build = []
    for case in chosen:
        judgement, before = option_trials.judged(case), known.get(case.key, {})
        done = before.get("outcome") in (REHEARSED, BUILT) and not again and _same(judgement, before)
        if done:
            result = before | {name: judgement[name] for name in ("reason",) if name in judgement}
        elif judgement["outcome"] == TO_REHEARSE:
            result = judgement | _rehearse(case)
        else:
            result = judgement
            to_build += [case.key] * (judgement["outcome"] == TO_BUILD)
        known = {key: value for key, value in (read_json(out) or {}).items() if key in everything}
        _write(out, known | {case.key: result})
    if to_build:
        words = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "superpod.rehearsal.options.option_table",
            "--build",
            "--out",
            str(out),
        ]
        subprocess.run([*words, *to_build], check=True)


def _same(judgement: Result, before: Result) -> bool:
    return all(before.get(name) == judgement[name] for name in ("recipe", "overrides", "changes"))


def _rehearse(case: OptionCase) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="recipes-rehearse-"))
    result = table.in_fork(lambda: option_trials.rehearsed(case, folder), folder)
    result = {"outcome": FAILED, "reason": result["error"]} if "error" in result else result
    if result["outcome"] == REHEARSED:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{case.key}: {result['outcome']} {result['reason']} ({result.get('seconds')} s, {folder})", flush=True)
    return result


def _build(chosen: Sequence[OptionCase], out: Path) -> None:
    from superpod.rehearsal.proof import rank_models

    rank_models.start()
    for case in chosen:
        result = option_trials.built(case)
        print(f"{case.key}: {result['outcome']} {result.get('reason', '')}", flush=True)
        known = read_json(out) or {}
        _write(out, known | {case.key: known[case.key] | result})


def _write(out: Path, results: Mapping[str, Result]) -> None:
    result_files.write(out, dict(sorted(results.items())), levels=1)


def table_of(results: Mapping[str, Result]) -> str:
    """The results as Markdown: a line for each option and kind, a column for each precision, then the reasons."""
    lines = ["| option | recipe | " + " | ".join(GPUS) + " |", "|---" * (2 + len(GPUS)) + "|"]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for case in cases():
        rows.setdefault((case.option, case.kind), {})[case.precision] = WORDS[results[case.key]["outcome"]]
    for (option, kind), words in rows.items():
        cells = [words.get(precision, "") for precision in GPUS]
        lines.append(f"| `{option}` | {kind} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_reasons(results)])


def _reasons(results: Mapping[str, Result]) -> Iterator[str]:
    """Why a case was refused or not rehearsed, each reason once with its cases."""
    keys: dict[tuple[str, str], dict[str, None]] = {}
    for case in cases():
        result = results[case.key]
        if result["outcome"] != REHEARSED:
            keys.setdefault((WORDS[result["outcome"]], result["reason"]), {})[f"`{case.option}`"] = None
    for (word, reason), options in keys.items():
        yield f"- {word}, {', '.join(options)}: {' '.join(reason.split())}"


def with_table(page: str, results: Mapping[str, Result]) -> str:
    """`page` with the table between its marks renewed."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table_of(results)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    main()
