"""`recipes data`: make the data folder that recipes train on."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.verbs import Verbs

if TYPE_CHECKING:
    from superpod.data.folder import DataFolder

app = typer.Typer(cls=Verbs, no_args_is_help=True, help="Make training data: tokenizer, .bin and .idx files, blends.")

Text = Annotated[
    list[str],
    typer.Option(help="File or quoted glob (** for any depth); .jsonl, also .gz or .zst, has one document a line, "
                 ".parquet one a row, any other file is one. Or a folder of save_to_disk. "
                 "May be repeated. `stdlib` means the sources of this Python's standard library, 12 MB.")
]  # fmt: skip
Out = Annotated[Path, typer.Option(help="The data folder to write.")]
Facts = Annotated[bool, typer.Option("--json", help="Print dataset.json on stdout instead of a summary.")]


@app.command()
def build(
    text: Text,
    out: Out,
    vocab_size: Annotated[int | None, typer.Option(help="Train a tokenizer with this many ids, 258 or more.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Or use this one: Hugging Face folder, or .model.")] = None,
    json_key: Annotated[str, typer.Option(help="Key of the text in each line of a .jsonl file.")] = "text",
    split: Annotated[
        str | None,
        typer.Option(help="Shares of training, validation and test documents.", show_default="969,30,1; none empty"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the documents' order, which decides those held out.")] = 1234,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes.", show_default="one a core")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse files that are not UTF-8 instead of skipping them.")
    ] = False,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave out lines that are no documents; count and keep them.")
    ] = False,
    max_bad_share: Annotated[float, typer.Option(help="Refuse more bad lines than this share.")] = 0.05,
    as_json: Facts = False,
) -> None:
    """Tokenize text into a data folder. If interrupted, the same command continues."""
    from superpod.data.tokens import build as building
    from superpod.data.tokens.build_options import BuildOptions

    options = BuildOptions(vocab_size, tokenizer, json_key, seed, split, skip_bad_lines, max_bad_share)
    with _progress() as (show, note):
        report = building.build(text, out, options, workers=workers, strict=strict, progress=show, note=note)
    for line in report.notes:
        _print_note(line)
    blank = f"{report.empty} blank documents left out" if report.empty else ""
    repeated = f"{report.duplicates} duplicate documents left out" if report.duplicates else ""
    took = "up to date" if report.up_to_date else f"built in {report.seconds:.1f} s"
    _summary(report.folder, as_json, took, blank, repeated)


@app.command()
def add(
    out: Out,
    prefix: Annotated[list[str], typer.Option(help="A .bin/.idx pair, without the ending. May be repeated.")],
    tokenizer: Annotated[str, typer.Option(help="Hugging Face folder, .model file, or ORG/NAME on the hub.")],
    weight: Annotated[list[float] | None, typer.Option(help="Share of each prefix, in order.")] = None,
    split: Annotated[str, typer.Option(help="Shares of training, validation and test documents.")] = "969,30,1",
    vocab_size: Annotated[int | None, typer.Option(help="Needed only if the tokenizer cannot be read here.")] = None,
    index_cache: Annotated[Path | None, typer.Option(help="Folder for Megatron's sample indices.")] = None,
    sha256: Annotated[bool, typer.Option(help="Hash the files, so that a change is noticed.")] = True,
    as_json: Facts = False,
) -> None:
    """Register existing .bin/.idx files, one pair or a blend. Copies nothing."""
    from superpod.data.tokens import add as adding

    with _progress() as (show, _):
        folder = adding.add(
            out, prefix, tokenizer, weights=weight, split=split, vocab_size=vocab_size, sha256=sha256,
            index_cache=index_cache, progress=lambda done, total: show("hash", done, total),
        )  # fmt: skip
    _summary(folder, as_json, "registered")


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str, int, int], None], Callable[[str], None]]]:
    """Yields `progress(phase, done, total)`, which draws a bar a phase on stderr, and `note(line)`, printed above."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("{task.description:<9}"), BarColumn(), TaskProgressColumn()
    bars = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    tasks = {}

    def show(phase: str, done: int, total: int) -> None:
        bars.start()  # only now: an error before the first phase is printed without bars around it
        for name, task in tasks.items():
            if name != phase and bars.tasks[task].total is None:  # of unknown length: the next phase ends it
                bars.update(task, total=1, completed=1)
        if phase not in tasks:
            tasks[phase] = bars.add_task(phase, total=total or None)
        bars.update(tasks[phase], completed=done)

    try:
        yield show, lambda line: bars.console.print(line, markup=False, highlight=False)
    finally:
        if tasks:
            bars.stop()


def _print_note(line: str) -> None:
    print(line, file=sys.stderr)


def _summary(folder: "DataFolder", as_json: bool, took: str, *more: str) -> None:
    if as_json:
        import json

        print(json.dumps(folder.facts(), indent=1))
        return
    from rich.table import Table

    from superpod.cli import tables

    table = Table(box=None, show_header=False)
    parts = ", ".join(f"{name} {count}" for name, count in folder.split_documents().items())
    rows = {"documents": f"{folder.documents} ({parts})", "tokens": str(folder.tokens), "vocabulary": str(folder.vocab)}
    for name, value in rows.items():
        table.add_row(name, value)
    console = tables.console()
    console.print(f"{took}: {folder.path}", markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    for line in filter(None, more):
        console.print(line, markup=False, highlight=False)
