"""Rehearses a recipe of every shape, one after the other: `python -m superpod.rehearsal.table [SHAPE ...]`.

Each result goes into docs/rehearsals.json as soon as it is known; docs/rehearsal.md shows them as a table. `--write`
renews that table and rehearses nothing. NeMo is imported once, and each rehearsal runs in a fork.
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

from superpod.common.files import read_json, write_json
from superpod.rehearsal import result_files
from superpod.rehearsal.proof import shapes
from superpod.rehearsal.proof.shapes import SHAPES, Shape

DOCS = Path(__file__).resolve().parents[3] / "docs"
RESULTS, PAGE = DOCS / "rehearsals.json", DOCS / "rehearsal.md"
BEGIN, END = "<!-- generated: python -m superpod.rehearsal.table --write -->", "<!-- end of rehearsals -->"
HEAD = ("shape", "recipe", "nodes", "ranks, topology", "loss", "fp32, to one rank", "own precision", "s")
Result = dict[str, Any]
"""`trial.facts` of a rehearsal, without its long parts; with `error` where it broke."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Rehearse the shapes that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help="default: all; they are listed in shapes.py")
    parser.add_argument("--write", action="store_true", help="write the table, and rehearse nothing")
    parser.add_argument("--folder", type=Path, help="for results, a file each, instead of docs/")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(arguments)
    if options.write:
        PAGE.write_text(with_table(PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    chosen = [shape for shape in SHAPES if not options.shapes or shape.key in options.shapes]
    import_nemo()
    sys.exit(0 if all([_rehearse_and_keep(shape, options.folder, options.steps) for shape in chosen]) else 1)


def import_nemo() -> None:
    """Give this process NeMo with a rehearsal's patches, for all its forks."""
    started = time.time()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("superpod.rehearsal.entry", "superpod.nemo2.build.partial"):  # the patches, NeMo and all of ours
        importlib.import_module(name)
    print(f"importing NeMo: {time.time() - started:.0f} s", flush=True)


def _rehearse_and_keep(shape: Shape, results: Path | None, steps: int) -> bool:
    """Rehearse a recipe of the shape, and write its result; returns whether it passed."""
    folder = Path(tempfile.mkdtemp(prefix="recipes-rehearse-"))
    result = _rehearse(shape, folder, steps)
    if result["passed"]:
        shutil.rmtree(folder, ignore_errors=True)
    if results:
        write_json(results / f"{shape.key}.json", result)
    else:
        every = (read_json(RESULTS) or {}) | {shape.key: result}
        result_files.write(RESULTS, dict(sorted(every.items())), levels=3)
    verdict = "passed" if result["passed"] else f"FAILED {_failures(result)} ({folder})"
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.get("seconds", {}).items())
    print(f"{shape.what}: {result['recipe']} at {result['nodes']} nodes {verdict}; {spent}", flush=True)
    return result["passed"]


def _rehearse(shape: Shape, folder: Path, steps: int) -> Result:
    failed: Result = {"recipe": shape.recipes, "nodes": 0, "passed": False}
    result = in_fork(lambda: _facts(shape, folder, steps), folder)
    return failed | result if "error" in result else result


def in_fork(work: Callable[[], Result], folder: Path) -> Result:
    """What `work` returns in a fork, which leaves nothing behind for the next one; {"error": ...} where it broke."""
    from superpod.common.quiet import quietly

    file = folder / "result.json"
    pid = os.fork()
    if not pid:
        try:
            with quietly(folder / "rehearse.log"):
                write_json(file, work())
        except BaseException as error:
            traceback.print_exc()
            write_json(file, {"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return read_json(file) or {"error": "it ended without a result"}


def _facts(shape: Shape, folder: Path, steps: int) -> Result:
    from superpod.rehearsal import trial

    example = shapes.find(shape)
    planned = trial.plan(example.recipe, example.nodes, shapes.MOST_RANKS)
    facts = trial.facts(trial.conduct(planned, folder, steps))
    return {name: fact for name, fact in facts.items() if name not in ("shrunk", "dropped", "losses")}


def _failures(result: Result) -> str:
    failed = [f"{check['name']}: {check['message']}" for check in result.get("checks", []) if not check["passed"]]
    return result.get("error") or "; ".join(failed)


def table(results: Mapping[str, Result]) -> str:
    """The rehearsals as Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    rows = [_row(shape, results[shape.key]) for shape in SHAPES if shape.key in results]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _row(shape: Shape, result: Result) -> list[str]:
    start = [shape.what, f"`{result['recipe']}`", str(result["nodes"])]
    if not result["passed"]:
        return [*start, f"**failed**: {_failures(result)}", "", "", "", ""]
    messages = {check["name"]: check["message"] for check in result["checks"]}
    # {"fp32": "1.1e-07", "bf16": "4.4e-04"}: of "one rank's losses, fp32": "relative difference 1.1e-07 over ..."
    differences = {
        name.rpartition(", ")[2]: message.removeprefix("relative difference ").partition(" over ")[0]
        for name, message in messages.items()
        if name.startswith("one rank's losses")
    }
    fp32 = differences.pop("fp32")
    own = ", ".join(f"{difference} in {precision}" for precision, difference in differences.items())
    seconds = sum(value for name, value in result["seconds"].items() if name != "import and build")
    loss = messages["loss falls"].partition(" in ")[0]
    return [*start, f"{result['ranks']}: {result['topology']}", loss, fp32, own, f"{seconds:.0f}"]


def with_table(page: str, results: Mapping[str, Result]) -> str:
    """`page` with the table between its marks renewed."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    main()
