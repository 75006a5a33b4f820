"""Recipes of every shape rehearsed, one after the other: `python -m superpod.rehearsal.table [SHAPE ...]`.

Each result goes into docs/rehearsals.json as soon as it is there, and the table of docs/rehearsal.md is made of them;
`--write` makes that table and rehearses nothing. NeMo is imported once, and each rehearsal is forked from there.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from superpod.node.files import read_json, write_json
from superpod.rehearsal import shapes
from superpod.rehearsal.shapes import SHAPES, Shape

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS, PAGE = DOCS / "rehearsals.json", DOCS / "rehearsal.md"
BEGIN, END = "<!-- generated: python -m superpod.rehearsal.table --write -->", "<!-- end of rehearsals -->"
HEAD = ("shape", "recipe", "nodes", "ranks, topology", "loss", "fp32, to one rank", "own precision", "s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Rehearse what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help="default: all; they are listed in shapes.py")
    parser.add_argument("--write", action="store_true", help="write the table, and rehearse nothing")
    parser.add_argument("--folder", type=Path, help="for results, a file each, instead of docs/")
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args(arguments)
    if asked.write:
        PAGE.write_text(with_table(PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    wanted = [shape for shape in SHAPES if not asked.shapes or shape.key in asked.shapes]
    _import_once()
    sys.exit(0 if all([_keep(shape, asked.folder, asked.steps) for shape in wanted]) else 1)


def _import_once() -> None:
    started = time.time()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("superpod.rehearsal.entry", "superpod.recipes.partial"):  # the patches, NeMo and all of ours
        importlib.import_module(name)
    print(f"importing NeMo: {time.time() - started:.0f} s", flush=True)


def _keep(shape: Shape, results: Path | None, steps: int) -> bool:
    """Rehearse a recipe of the shape, and write down how it went."""
    folder = Path(tempfile.mkdtemp(prefix="recipes-rehearse-"))
    found = _rehearse(shape, folder, steps)
    if found["passed"]:
        shutil.rmtree(folder, ignore_errors=True)
    if results:
        write_json(results / f"{shape.key}.json", found)
    else:
        write_json(RESULTS, dict(sorted(((read_json(RESULTS) or {}) | {shape.key: found}).items())))
    said = "passed" if found["passed"] else f"FAILED {_why(found)} ({folder})"
    spent = ", ".join(f"{name} {value:.0f} s" for name, value in found.get("seconds", {}).items())
    print(f"{shape.what}: {found['recipe']} at {found['nodes']} nodes {said}; {spent}", flush=True)
    return found["passed"]


def _rehearse(shape: Shape, folder: Path, steps: int) -> dict[str, Any]:
    """In a fork, so that one leaves nothing behind for the next."""
    what: dict[str, Any] = {"recipe": shape.recipes, "nodes": 0, "passed": False}
    pid = os.fork()
    if not pid:
        try:
            _in_fork(shape, folder, steps)
        except BaseException as error:
            traceback.print_exc()
            write_json(folder / "result.json", what | {"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return read_json(folder / "result.json") or what | {"error": "it ended without a result"}


def _in_fork(shape: Shape, folder: Path, steps: int) -> None:
    from superpod.lifecycle.quiet import quietly
    from superpod.rehearsal import trial

    found = shapes.find(shape)
    with quietly(folder / "rehearse.log"):
        done = trial.facts(trial.conduct(trial.plan(found.recipe, found.nodes, shapes.MOST_RANKS), folder, steps))
    write_json(folder / "result.json", {k: v for k, v in done.items() if k not in ("shrunk", "dropped", "losses")})


def _why(found: dict[str, Any]) -> str:
    bad = [f"{each['name']}: {each['said']}" for each in found.get("checks", []) if not each["passed"]]
    return found.get("error") or "; ".join(bad)


def table(results: dict[str, Any]) -> str:
    """The rehearsals as Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    rows = [_row(shape, results[shape.key]) for shape in SHAPES if shape.key in results]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _row(shape: Shape, found: dict[str, Any]) -> list[str]:
    start = [shape.what, f"`{found['recipe']}`", str(found["nodes"])]
    if not found["passed"]:
        return [*start, f"**failed**: {_why(found)}", "", "", "", ""]
    said = {check["name"]: check["said"] for check in found["checks"]}
    near = {name.rpartition(", ")[2]: text for name, text in said.items() if name.startswith("one rank's losses")}
    apart = {name: text.partition(" apart")[0] for name, text in near.items()}
    fp32, own = apart.pop("fp32"), ", ".join(f"{value} in {name}" for name, value in apart.items())
    seconds = sum(value for name, value in found["seconds"].items() if name != "import and build")
    loss = said["loss falls"].partition(" in ")[0]
    return [*start, f"{found['ranks']}: {found['topology']}", loss, fp32, own, f"{seconds:.0f}"]


def with_table(page: str, results: dict[str, Any]) -> str:
    """`page` with the table between its marks renewed."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    main()
