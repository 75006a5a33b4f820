"""Rehearses one recipe for each feature: `python -m superpod.rehearsal.feature_table [FEATURE ...]`.

Each result is written to docs/rehearsals.json as soon as it is complete; docs/rehearsal.md shows them as a table.
`--write` updates that table without rehearsing. NeMo is imported once; each rehearsal runs in a forked process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from superpod.common.json_files import read_json, write_json
from superpod.rehearsal import features, result_files
from superpod.rehearsal.features import FEATURES, Feature

DOCS = Path(__file__).resolve().parents[3] / "docs"
RESULTS, PAGE = DOCS / "rehearsals.json", DOCS / "rehearsal.md"
BEGIN, END = "<!-- generated: python -m superpod.rehearsal.feature_table --write -->", "<!-- end of rehearsals -->"
HEAD = ("feature", "recipe", "nodes", "ranks, topology", "loss", "fp32, to one rank", "own precision", "s")
Result = dict[str, Any]
"""The result of `rehearsal_run.to_json` without its long parts, or with `error` if the rehearsal failed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Rehearse the features named on the command line; exit with code 1 if a rehearsal fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", nargs="*", help="Keys from features.py. Default: all.")
    parser.add_argument("--write", action="store_true", help="Write the table without rehearsing.")
    parser.add_argument("--folder", type=Path, help="Write each result to a file in this folder instead of docs/.")
    parser.add_argument("--steps", type=int, default=10, help="Training steps of each run. Default: 10.")
    options = parser.parse_args(arguments)
    if options.write:
        PAGE.write_text(update_table(PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    features = [feature for feature in FEATURES if not options.features or feature.key in options.features]
    import_nemo()
    outcomes = [_rehearse_and_write(feature, options.folder, options.steps) for feature in features]
    sys.exit(0 if all(outcomes) else 1)


def import_nemo() -> None:
    """Import NeMo with the patches of a rehearsal, once for all forked processes."""
    start_time = time.time()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("superpod.rehearsal.entry", "superpod.nemo2.build.partial"):  # patches first
        importlib.import_module(name)
    print(f"importing NeMo: {time.time() - start_time:.0f} s", flush=True)


def _rehearse_and_write(feature: Feature, results: Path | None, steps: int) -> bool:
    """Rehearse a recipe with the feature, write the result to `results` or docs/, and return whether it passed."""
    folder = Path(tempfile.mkdtemp(prefix="recipes-rehearse-"))
    result = run_in_fork(lambda: _rehearse(feature, folder, steps), folder)
    if "error" in result:
        result = {"recipe": feature.recipes, "nodes": 0, "passed": False} | result
    if results:
        write_json(results / f"{feature.key}.json", result)
    else:
        every = (read_json(RESULTS) or {}) | {feature.key: result}
        result_files.write(RESULTS, dict(sorted(every.items())), levels=3)

    outcome = f"FAILED {_list_failures(result)} ({folder})"
    if result["passed"]:
        shutil.rmtree(folder, ignore_errors=True)
        outcome = "passed"
    durations = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.get("seconds", {}).items())
    print(f"{feature.title}: {result['recipe']} on {result['nodes']} nodes {outcome}; {durations}", flush=True)
    return result["passed"]


def run_in_fork(work: Callable[[], Result], folder: Path) -> Result:
    """Run `work` in a forked process, and return its result, or {"error": message} if it raises.

    `folder` receives the log and the result.
    """
    from superpod.common.quiet import silence_libraries

    file = folder / "result.json"
    pid = os.fork()
    if not pid:
        try:
            with silence_libraries(folder / "rehearse.log"):
                write_json(file, work())
        except BaseException as error:
            traceback.print_exc()
            write_json(file, {"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return read_json(file) or {"error": "the process exited without a result"}


def _rehearse(feature: Feature, folder: Path, steps: int) -> Result:
    from superpod.rehearsal import rehearsal_run
    from superpod.requests.request import Request

    example = features.find_recipe(feature)
    request = Request(example.recipe, num_nodes=example.nodes)
    rehearsal = rehearsal_run.plan_rehearsal(request, features.MOST_RANKS)
    result = rehearsal_run.to_json(rehearsal_run.run_rehearsal(rehearsal, folder, steps))
    return {name: value for name, value in result.items() if name not in ("shrunk", "dropped", "losses")}


def _list_failures(result: Result) -> str:
    failed_checks = [
        f"{check['name']}: {check['message']}" for check in result.get("checks", []) if not check["passed"]
    ]
    return result.get("error") or "; ".join(failed_checks)


def format_table(results: Mapping[str, Result]) -> str:
    """Format results ({key of a feature: result}) as a Markdown table with one row per feature."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    rows = [_format_row(feature, results[feature.key]) for feature in FEATURES if feature.key in results]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _format_row(feature: Feature, result: Result) -> list[str]:
    start = [feature.title, f"`{result['recipe']}`", str(result["nodes"])]
    if not result["passed"]:
        return [*start, f"**failed**: {_list_failures(result)}", "", "", "", ""]
    messages = {check["name"]: check["message"] for check in result["checks"]}
    # {"fp32": "1.1e-07", "bf16": "4.4e-04"}, from "one rank's losses, fp32": "relative difference 1.1e-07 over ..."
    differences = {
        name.rpartition(", ")[2]: message.removeprefix("relative difference ").partition(" over ")[0]
        for name, message in messages.items()
        if name.startswith("one rank's losses")
    }
    fp32 = differences.pop("fp32")
    own_differences = ", ".join(f"{difference} in {precision}" for precision, difference in differences.items())
    seconds = sum(value for name, value in result["seconds"].items() if name != "import and build")
    loss = messages["loss falls"].partition(" in ")[0]
    return [*start, f"{result['ranks']}: {result['topology']}", loss, fp32, own_differences, f"{seconds:.0f}"]


def update_table(page: str, results: Mapping[str, Result]) -> str:
    """Return the text of a Markdown page with the table of these results."""
    return result_files.replace_section(page, BEGIN, END, format_table(results))


if __name__ == "__main__":
    main()
