"""`recipes ckpt`: list, verify, prune, reset and convert checkpoints."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.options.request_options import AsJson, resolve_folder
from superpod.cli.options.shared_options import NoForwardCheck
from superpod.cli.verbs import CommandGroup
from superpod.common import units
from superpod.errors import UserError, counted

if TYPE_CHECKING:
    from superpod.reports.runs.checkpoint_list import Checkpoint

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="List, verify, prune, reset and convert checkpoints.")

Where = Annotated[
    Path,
    typer.Argument(help="Run folder, `last`, folder of checkpoints, or checkpoint.", callback=resolve_folder),
]


@app.command("list")
def list_(where: Where, as_json: AsJson = False) -> None:
    """List checkpoints with their step, state (verified, damaged, ...), layout, size and validation loss."""
    from superpod.reports.runs import checkpoint_list

    found = checkpoint_list.list_checkpoints(where)
    if as_json:
        tables.print_json([checkpoint_list.as_json(checkpoint) for checkpoint in found])
    else:
        _print_table(found)
        _print_set_aside(where)


@app.command()
def verify(where: Where, as_json: AsJson = False) -> None:
    """Read all files of checkpoints; exit 1 if a byte is missing or has changed since it was written."""
    from superpod.reports.runs import checkpoint_list
    from superpod.runtime.checkpoints import checkpoint_files

    found = checkpoint_list.list_checkpoints(where)
    cross_checks = {c.path: checkpoint_list.run_cross_check(c, found) for c in found}
    damages = {c.path: checkpoint_files.check_all_bytes(c.path) if c.can_resume else [] for c in found}
    reasons = {c.path: [*c.problems, *damages[c.path], *cross_checks[c.path].problems] for c in found}
    problems = {path: [problem.text for problem in wrong] for path, wrong in reasons.items()}
    state = {c.path: "verified" if c.verified else _describe_unverified(cross_checks[c.path].doubt) for c in found}
    if as_json:
        tables.print_json({str(path): reasons for path, reasons in problems.items()})
    else:
        for path, reasons in problems.items():
            print("\n  ".join([f"{path.name}: {'DAMAGED' if reasons else state[path]}", *reasons]))
    if not found:
        raise UserError(f"{where} contains no checkpoint yet")
    if not as_json:
        _print_resumed(where)
    if any(problems.values()):
        raise typer.Exit(1)


@app.command()
def prune(
    where: Where,
    keep: Annotated[int, typer.Option(help="Number of newest intact checkpoints to keep, besides the best.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the checkpoints to remove; remove none.")] = False,
) -> None:
    """Remove corrupt checkpoints, and intact ones except the newest and the best."""
    from superpod.reports.runs import checkpoint_list
    from superpod.runtime.runs import owner

    run = checkpoint_list.find_run(where)
    if run and not dry_run:
        owner.refuse_others(run.path, "remove its checkpoints")
    with run.lock() if run and not dry_run else nullcontext():
        found = checkpoint_list.list_checkpoints(where)
        removable = checkpoint_list.choose_removable(found, keep)
        for checkpoint in removable:
            verb = "would remove" if dry_run else "removing"
            reason = "older" if checkpoint.is_intact else checkpoint.problems[0].text
            print(f"{verb} {checkpoint.name}: {units.size(checkpoint.bytes)}, {reason}")
            if not dry_run:
                checkpoint_list.remove_checkpoint(checkpoint)
    freed_size = units.size(sum(checkpoint.bytes for checkpoint in removable))
    verb = "would free" if dry_run else "freed"
    print(f"{verb} {freed_size}: {len(removable)} of {len(found)} checkpoints")
    if not dry_run:
        _print_resumed(where)


@app.command()
def reset(where: Where) -> None:
    """Restart a run at step 1; its checkpoints and metrics are renamed, not deleted."""
    from superpod.reports.runs import checkpoint_list
    from superpod.runtime.checkpoints import training_records
    from superpod.runtime.runs import owner

    run = checkpoint_list.find_run(where)
    if run is None or run.path != where.absolute():
        raise UserError(f"{where} is not a run folder", "pass the run folder, RUNS/RECIPE/TIME-ID")
    owner.refuse_others(run.path, "let it start over")
    with run.lock():
        moved_paths = training_records.reset(run)
    for path in moved_paths:
        print(f"kept   {path}")
    print(f"the next attempt of {run.path} starts at step 1\n  next: {run.resume_hint}")


def _describe_unverified(doubt: str) -> str:
    """Return the state of a readable but unverified checkpoint; `doubt` is the reason if it is known, else ""."""
    reason = doubt or "it has no complete manifest, and torch's checksums do not detect files of another save"
    return f"complete, but unverified: {reason}"


def _print_set_aside(where: Path) -> None:
    """Print the corrupt checkpoints that an attempt has moved out of the way, if any."""
    from superpod.reports.runs import checkpoint_list
    from superpod.runtime.checkpoints import checkpoint_files

    set_aside = checkpoint_list.list_set_aside(where)
    if set_aside:
        size = units.size(sum(checkpoint_files.total_bytes(folder) for folder in set_aside))
        names = ", ".join(folder.name for folder in set_aside)
        corrupt = counted(len(set_aside), "corrupt checkpoint")
        print(f"{corrupt} ({size}) in {set_aside[0].parent.name}/, which must be removed manually: {names}")


def _print_resumed(where: Path) -> None:
    """Print the checkpoint from which the next attempt of a run resumes; nothing if `where` is not a run."""
    from superpod.reports.runs import checkpoint_list

    sentence = checkpoint_list.describe_next_resume(where)
    if sentence:
        print(sentence)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder or NeMo checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to write, which must not exist.")],
    like: Annotated[
        Path | None,
        typer.Option(help="Hugging Face folder from which the model was imported.", show_default="stored at import"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Data type of the exported weights.", show_default="that of --like")] = "",
    adapter: Annotated[bool, typer.Option("--adapter", help="Export only the adapter, in PEFT's format.")] = False,
    no_forward_check: NoForwardCheck = False,
    cluster: Annotated[
        str,
        typer.Option(help="Cluster profile; convert in a Slurm job on this cluster.", show_default="this machine"),
    ] = "",
) -> None:
    """Convert a Hugging Face folder to a NeMo checkpoint, or a NeMo checkpoint to a Hugging Face folder.

    The direction depends on the format of SOURCE. Adapters are merged, except with --adapter. The logits of both models
    are compared on a few tokens; if they differ, nothing is written.
    """
    from superpod.common import atomic_folder
    from superpod.launch import convert, subprocess_call
    from superpod.launch.display.progress_bar import spinner, stderr_console

    source, out, like = source.absolute(), out.absolute(), like.absolute() if like else None
    for folder in atomic_folder.remove_abandoned(out):
        print(f"removed {folder}, the incomplete output of a killed conversion", file=sys.stderr)
    job = convert.plan_conversion(source, out, like, dtype, adapter, not no_forward_check)
    if cluster:
        arguments = [str(source), str(out)]
        if like:
            arguments += ["--like", str(like)]
        if adapter:
            arguments.append("--adapter")
        if dtype:
            arguments += ["--dtype", dtype]
        if no_forward_check:
            arguments.append("--no-forward-check")
        _queue(cluster, out, arguments)
        return
    convert.require_memory(job.gib, source.name)
    with spinner(stderr_console(), f"converting {source.name} (a few minutes)"):
        outcome = subprocess_call.call_once(job.function, **job.arguments)
    merged_note = f", {outcome['merged']} matrices merged" if outcome.get("merged") else ""
    print(f"{job.title}: {out}{merged_note}")
    checked = outcome.get("forward_check")
    if checked:
        print(
            f"compared with transformers: on {checked['tokens']} tokens, the logits differ by at most "
            f"{checked['difference']:.1e} times the largest logit (tolerance {checked['tolerance']:.0e})"
        )
    if outcome.get("served"):
        print(outcome["served"])
    for note in outcome.get("notes", []):
        print(f"note: {note}")


def _queue(cluster: str, out: Path, arguments: list[str]) -> None:
    """Queue a Slurm job that runs `recipes ckpt convert` with `arguments` on a cluster."""
    from superpod.slurm.profiles import profiles
    from superpod.slurm.submission import connection, submit

    profile, log = profiles.load(cluster), f"{out}.log"
    job = submit.queue_command(connection.connect(profile), profile, "convert", ["ckpt", "convert", *arguments], log)
    print(f"job    {job}: writes {out}")
    print(f"log    {log}")


def _print_table(listed: list[Checkpoint]) -> None:
    rows = []
    for checkpoint in listed:
        holds = "adapter" if checkpoint.adapter else "model"
        if checkpoint.optimizer:
            holds += ", optimizer"
        layout = " ".join(f"{name}{value}" for name, value in checkpoint.layout.items() if value > 1 or name == "ranks")
        loss = "" if checkpoint.val_loss is None else f"{checkpoint.val_loss:.4f}"
        size = units.size(checkpoint.bytes)
        rows.append((checkpoint.name, str(checkpoint.step or ""), checkpoint.state, holds, layout, size, loss))
    titles = ("checkpoint", "step", "state", "holds", "layout", "size", "val loss")
    tables.print_rows(titles, rows, right=(1, 5, 6))
