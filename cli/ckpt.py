"""`recipes ckpt`: what lies in a folder of checkpoints, what can go, and the way to Hugging Face and back."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.lifecycle.checkpoints import Checkpoint

app = typer.Typer(no_args_is_help=True, help="Checkpoints: list, verify, prune, convert.")

Where = Annotated[Path, typer.Argument(help="A run folder, a folder of checkpoints, or a checkpoint.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command("list")
def list_(where: Where, as_json: AsJson = False) -> None:
    """Say of each checkpoint whether it is whole, its step, layout, size and validation loss."""
    from superpod.lifecycle import checkpoints

    found = checkpoints.found(where)
    if as_json:
        import json

        print(json.dumps([checkpoints.facts(each) for each in found], indent=1))
    else:
        _table(found)


@app.command()
def verify(where: Where, as_json: AsJson = False) -> None:
    """Read every file, and check that all its bytes are there and as they were written; exit 1 if not."""
    from superpod.lifecycle import checkpoint_metadata, checkpoints

    found = checkpoints.found(where)
    problems = {each.path: each.problems or checkpoint_metadata.damages(each.path) for each in found}
    if as_json:
        import json

        print(json.dumps({str(path): reasons for path, reasons in problems.items()}, indent=1))
    for path, reasons in problems.items() if not as_json else []:
        print("\n  ".join([f"{path.name}: {'NOT WHOLE' if reasons else 'whole'}", *reasons]))
    if not found:
        raise UserError(f"{where} holds no checkpoint yet")
    if any(problems.values()):
        raise typer.Exit(1)


@app.command()
def prune(
    where: Where,
    keep: Annotated[int, typer.Option(help="Newest whole checkpoints to keep; the best one stays too.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove all but the newest checkpoints, and what is not whole."""
    from superpod.lifecycle import checkpoints

    run = checkpoints.run_of(where)
    with run.lock() if run and not dry_run else nullcontext():
        found = checkpoints.found(where)
        going = checkpoints.spare(found, keep)
        for each in going:
            print(f"{'would remove' if dry_run else 'removing'} {each.name}: {_size(each.bytes)}, {_why(each)}")
            if not dry_run:
                checkpoints.remove(each)
    freed = _size(sum(each.bytes for each in going))
    print(f"{len(going)} of {len(found)} checkpoints, {freed}{' would be' if dry_run else ''} freed")


def _why(checkpoint: Checkpoint) -> str:
    return "older" if checkpoint.whole else checkpoint.problems[0]


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A Hugging Face folder, or a NeMo checkpoint.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not be there.")],
    like: Annotated[
        Path | None, typer.Option(help="Hugging Face folder that the model came from.", show_default="as kept")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the exported numbers.", show_default="as in --like")] = "",
    cluster: Annotated[str, typer.Option(help="A profile: as a Slurm job there.", show_default="here and now")] = "",
) -> None:
    """Hugging Face to NeMo, or NeMo to Hugging Face with an adapter merged, by what SOURCE is."""
    from superpod.launchers import convert, subprocess_call

    source, out, like = source.absolute(), out.absolute(), like.absolute() if like else None
    job = convert.plan(source, out, like, dtype)
    if cluster:
        _queue(cluster, out, [str(source), str(out), *(["--like", str(like)] if like else []), "--dtype", dtype])
        return
    outcome = subprocess_call.once(job.function, **job.arguments)
    print(
        f"{job.title}: {out}" + (f", {outcome['merged']} matrices merged" if outcome and outcome.get("merged") else "")
    )


def _queue(cluster: str, out: Path, words: list[str]) -> None:
    from superpod.slurm import connection, profiles, submit

    profile, log = profiles.load(cluster), f"{out}.log"
    job = submit.alone(connection.of(profile), profile, "convert", ["ckpt", "convert", *words], log)
    print(f"job    {job}: {out} is there when it has ended well")
    print(f"log    {log}")


def _table(found: list[Checkpoint]) -> None:
    from rich.table import Table

    from superpod.cli import tables

    table = Table(box=None, pad_edge=False)
    for name in ("checkpoint", "step", "state", "holds", "layout", "size", "val loss"):
        table.add_column(name, justify="right" if name in ("step", "size", "val loss") else "left", overflow="fold")
    for each in found:
        holds = f"{'adapter' if each.adapter else 'model'}{', optimizer' if each.optimizer else ''}"
        layout = " ".join(f"{name}{value}" for name, value in each.layout.items() if value > 1 or name == "ranks")
        loss = "" if each.val_loss is None else f"{each.val_loss:.4f}"
        state = "whole" if each.whole else "not whole"
        table.add_row(each.name, str(each.step or ""), state, holds, layout, _size(each.bytes), loss)
    tables.show(table)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
