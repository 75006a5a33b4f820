"""`recipes ckpt`: list, verify and prune checkpoints; convert them from and to Hugging Face."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.request_options import newest_folder
from superpod.cli.options.shared_options import NoForwardCheck
from superpod.cli.verbs import Verbs
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.reports.runs.checkpoints import Checkpoint

app = typer.Typer(cls=Verbs, no_args_is_help=True, help="Checkpoints: list, verify, prune, convert.")

Where = Annotated[
    Path,
    typer.Argument(help="A run folder or `last`, a folder of checkpoints, or a checkpoint.", callback=newest_folder),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command("list")
def list_(where: Where, as_json: AsJson = False) -> None:
    """List checkpoints: whether each is verified or damaged, its step, layout, size and validation loss."""
    from superpod.reports.runs import checkpoints

    listed = checkpoints.at(where)
    if as_json:
        import json

        print(json.dumps([checkpoints.facts(checkpoint) for checkpoint in listed], indent=1))
    else:
        _table(listed)
        _print_set_aside(where)


@app.command()
def verify(where: Where, as_json: AsJson = False) -> None:
    """Read every file and check that no byte is missing or changed since it was written; exit 1 if one is."""
    from superpod.reports.runs import checkpoints
    from superpod.runtime.checkpoints import checkpoint_files

    listed = checkpoints.at(where)
    crossed = {c.path: checkpoints.cross_checked(c, listed) for c in listed}
    damages = {c.path: checkpoint_files.damages(c.path) if c.resumes else [] for c in listed}
    found = {c.path: [*c.problems, *damages[c.path], *crossed[c.path].problems] for c in listed}
    problems = {path: [problem.text for problem in wrong] for path, wrong in found.items()}
    state = {c.path: "verified" if c.verified else _unverified(crossed[c.path].doubt) for c in listed}
    if as_json:
        import json

        print(json.dumps({str(path): reasons for path, reasons in problems.items()}, indent=1))
    for path, reasons in problems.items() if not as_json else []:
        print("\n  ".join([f"{path.name}: {'DAMAGED' if reasons else state[path]}", *reasons]))
    if not listed:
        raise UserError(f"{where} holds no checkpoint yet")
    if not as_json:
        _print_resumed(where)
    if any(problems.values()):
        raise typer.Exit(1)


@app.command()
def prune(
    where: Where,
    keep: Annotated[int, typer.Option(help="Newest intact checkpoints to keep; the best one stays too.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
) -> None:
    """Remove all but the newest checkpoints, and damaged ones."""
    from superpod.common import units
    from superpod.reports.runs import checkpoints
    from superpod.runtime.runs import owner

    run = checkpoints.run_of(where)
    if run and not dry_run:
        owner.refuse_others(run.path, "remove its checkpoints")
    with run.lock() if run and not dry_run else nullcontext():
        listed = checkpoints.at(where)
        removable = checkpoints.spare(listed, keep)
        for checkpoint in removable:
            verb = "would remove" if dry_run else "removing"
            print(f"{verb} {checkpoint.name}: {units.size(checkpoint.bytes)}, {_why(checkpoint)}")
            if not dry_run:
                checkpoints.remove(checkpoint)
    freed = units.size(sum(checkpoint.bytes for checkpoint in removable))
    print(f"{len(removable)} of {len(listed)} checkpoints, {freed}{' would be' if dry_run else ''} freed")
    if not dry_run:
        _print_resumed(where)


@app.command()
def reset(where: Where) -> None:
    """Let a run start over at step 1: its checkpoints and metrics are renamed, nothing is deleted."""
    from superpod.reports.runs import checkpoints
    from superpod.runtime.checkpoints import training_records
    from superpod.runtime.runs import owner

    run = checkpoints.run_of(where)
    if run is None or run.path != where.absolute():
        raise UserError(f"{where} is not a run folder", "name the folder RUNS/RECIPE/TIME-ID of the run")
    owner.refuse_others(run.path, "let it start over")
    with run.lock():
        moved = training_records.reset(run)
    for path in moved:
        print(f"kept   {path}")
    print(f"{run.path} starts over at step 1 with its next attempt; to continue it, {run.resume_hint}")


def _unverified(doubt: str) -> str:
    """The state of a checkpoint of which every byte was read and that has no complete manifest."""
    reason = doubt or "it has no complete manifest, and torch's checksums do not distinguish one save from another"
    return f"complete, but unverified: {reason}"


def _print_set_aside(where: Path) -> None:
    from superpod.common import units
    from superpod.reports.runs import checkpoints
    from superpod.runtime.checkpoints import checkpoint_files

    if aside := checkpoints.set_aside(where):
        size = units.size(sum(checkpoint_files.bytes_of(folder) for folder in aside))
        names = ", ".join(folder.name for folder in aside)
        print(f"{len(aside)} set aside in {aside[0].parent.name}/, {size}, damaged; remove them yourself: {names}")


def _print_resumed(where: Path) -> None:
    from superpod.reports.runs import checkpoints

    if words := checkpoints.resumed_from(where):
        print(words)


def _why(checkpoint: Checkpoint) -> str:
    return "older" if checkpoint.whole else checkpoint.problems[0].text


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A Hugging Face folder, or a NeMo checkpoint.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    like: Annotated[
        Path | None,
        typer.Option(help="Hugging Face folder that the model came from.", show_default="as kept by the import"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Number format to export.", show_default="as in --like")] = "",
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter alone, in PEFT's format.")] = False,
    no_forward_check: NoForwardCheck = False,
    cluster: Annotated[
        str, typer.Option(help="Profile of the cluster that runs it as a Slurm job.", show_default="this machine")
    ] = "",
) -> None:
    """Convert Hugging Face to NeMo, or NeMo to Hugging Face with adapters merged; SOURCE decides which.

    It ends with one forward pass of the NeMo model held against transformers; where they differ, nothing is written.
    """
    from superpod.cli.running.progress import on_stderr, waiting
    from superpod.common import atomic_folder
    from superpod.launch import convert, subprocess_call

    source, out, like = source.absolute(), out.absolute(), like.absolute() if like else None
    for folder in atomic_folder.remove_dead(out):
        print(f"removed {folder}: what a conversion that was killed had written", file=sys.stderr)
    job = convert.plan_conversion(source, out, like, dtype, adapter, not no_forward_check)
    if cluster:
        more = [*(["--like", str(like)] if like else []), *(["--adapter"] if adapter else [])]
        more += ["--dtype", dtype] if dtype else []
        more += ["--no-forward-check"] if no_forward_check else []
        _queue(cluster, out, [str(source), str(out), *more])
        return
    convert.require_memory(job.gib, source.name)
    with waiting(on_stderr(), f"converting {source.name}, which takes minutes"):
        outcome = subprocess_call.call_once(job.function, **job.arguments)
    print(f"{job.title}: {out}" + (f", {outcome['merged']} matrices merged" if outcome.get("merged") else ""))
    if checked := outcome.get("forward_check"):
        print(
            f"checked against transformers: on {checked['tokens']} tokens the logits differ by "
            f"{checked['difference']:.1e} of the largest ({checked['tolerance']:.0e} allowed)"
        )
    if served := outcome.get("served"):
        print(served)
    for note in outcome.get("notes", []):
        print(f"note: {note}")


def _queue(cluster: str, out: Path, words: list[str]) -> None:
    from superpod.slurm.profiles import profiles
    from superpod.slurm.submission import connection, submit

    profile, log = profiles.load(cluster), f"{out}.log"
    job = submit.queue_command(connection.connect(profile), profile, "convert", ["ckpt", "convert", *words], log)
    print(f"job    {job}: writes {out}")
    print(f"log    {log}")


def _table(listed: list[Checkpoint]) -> None:
    from rich.table import Table

    from superpod.cli import tables
    from superpod.common import units

    table = Table(box=None, pad_edge=False)
    for name in ("checkpoint", "step", "state", "holds", "layout", "size", "val loss"):
        table.add_column(name, justify="right" if name in ("step", "size", "val loss") else "left", overflow="fold")
    for checkpoint in listed:
        holds = f"{'adapter' if checkpoint.adapter else 'model'}{', optimizer' if checkpoint.optimizer else ''}"
        layout = " ".join(f"{name}{value}" for name, value in checkpoint.layout.items() if value > 1 or name == "ranks")
        loss = "" if checkpoint.val_loss is None else f"{checkpoint.val_loss:.4f}"
        size = units.size(checkpoint.bytes)
        table.add_row(checkpoint.name, str(checkpoint.step or ""), checkpoint.state, holds, layout, size, loss)
    tables.show(table)
