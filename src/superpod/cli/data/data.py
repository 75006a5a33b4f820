"""`recipes data`: create data folders for training."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.verbs import CommandGroup
from superpod.errors import counted

if TYPE_CHECKING:
    from superpod.data.folder import DataFolder

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Create data folders: tokenizer, .bin and .idx files.")

Text = Annotated[
    list[str],
    typer.Option(help="File, quoted glob (** for any depth) or folder written by datasets.save_to_disk; repeatable. "
                 "A .jsonl file (also .gz, .zst) has one document per line, a .parquet file one per row; any other "
                 "file is one document. `stdlib` selects the sources of Python's standard library (12 MB).")
]  # fmt: skip
Out = Annotated[Path, typer.Option(help="Data folder to write.")]
PrintFacts = Annotated[bool, typer.Option("--json", help="Print dataset.json instead of a summary.")]


@app.command()
def build(
    text: Text,
    out: Out,
    vocab_size: Annotated[
        int | None, typer.Option(help="Train a tokenizer with this vocabulary size (>= 258).")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Existing tokenizer to use instead: Hugging Face folder or .model file.")
    ] = None,
    json_key: Annotated[str, typer.Option(help="Key of the text in each line of a .jsonl file.")] = "text",
    split: Annotated[
        str | None,
        typer.Option(
            help="Proportions of training, validation and test documents.",
            show_default="969,30,1 with at least one document each",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed for shuffling and for the split.")] = 1234,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of processes.", show_default="all cores")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if a file is not UTF-8; do not skip it.")] = False,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Skip lines that are not valid documents, and copy them to a file.")
    ] = False,
    max_bad_share: Annotated[float, typer.Option(help="Maximum fraction of invalid lines; fail if exceeded.")] = 0.05,
    as_json: PrintFacts = False,
) -> None:
    """Tokenize text into a data folder. If interrupted, run the same command again to continue."""
    from superpod.data.tokens import build as building
    from superpod.data.tokens.build_options import BuildOptions

    options = BuildOptions(vocab_size, tokenizer, json_key, seed, split, skip_bad_lines, max_bad_share)
    with _progress() as (show, note):
        report = building.build(text, out, options, workers=workers, strict=strict, progress=show, note=note)
    for line in report.notes:
        print(line, file=sys.stderr)
    skipped = []
    if report.empty:
        skipped.append(f"{counted(report.empty, 'blank document')} skipped")
    if report.duplicates:
        skipped.append(f"{counted(report.duplicates, 'duplicate document')} skipped")
    outcome = "up to date" if report.up_to_date else f"built in {report.seconds:.1f} s"
    _print_summary(report.folder, as_json, outcome, skipped)


@app.command()
def add(
    out: Out,
    prefix: Annotated[list[str], typer.Option(help="Path of .bin and .idx files without suffix; repeat for a blend.")],
    tokenizer: Annotated[str, typer.Option(help="Hugging Face folder, .model file, or ORG/NAME on Hugging Face.")],
    weight: Annotated[list[float] | None, typer.Option(help="Sampling weight of each --prefix, in order.")] = None,
    split: Annotated[str, typer.Option(help="Proportions of training, validation and test documents.")] = "969,30,1",
    vocab_size: Annotated[
        int | None, typer.Option(help="Vocabulary size; needed only if the tokenizer cannot be read on this machine.")
    ] = None,
    index_cache: Annotated[Path | None, typer.Option(help="Folder for Megatron's sample index files.")] = None,
    sha256: Annotated[bool, typer.Option(help="Store hashes of the files to detect later changes.")] = True,
    as_json: PrintFacts = False,
) -> None:
    """Create a data folder for existing .bin and .idx files, a single pair or a blend, without copying them."""
    from superpod.data.tokens import add as adding

    with _progress() as (show, _):
        folder = adding.add(
            out, prefix, tokenizer, weights=weight, split=split, vocab_size=vocab_size, sha256=sha256,
            index_cache=index_cache, progress=lambda done, total: show("hash", done, total),
        )  # fmt: skip
    _print_summary(folder, as_json, "registered", [])


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str, int, int], None], Callable[[str], None]]]:
    """Yield the functions `show(phase, done, total)`, which updates a progress bar, and `note(line)`, which prints."""
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
        bars.start()  # not earlier, so that an error before the first phase is printed without bars
        for name, task in tasks.items():
            if name != phase and bars.tasks[task].total is None:  # a phase of unknown length ends when the next begins
                bars.update(task, total=1, completed=1)
        if phase not in tasks:
            tasks[phase] = bars.add_task(phase, total=total or None)
        bars.update(tasks[phase], completed=done)

    try:
        yield show, lambda line: bars.console.print(line, markup=False, highlight=False)
    finally:
        if tasks:
            bars.stop()


def _print_summary(folder: "DataFolder", as_json: bool, outcome: str, notes: Sequence[str]) -> None:
    """Print the path, documents, tokens and vocabulary of a data folder, and notes; or its dataset.json."""
    if as_json:
        tables.print_json(folder.as_json())
        return
    from rich.table import Table

    table = Table(box=None, show_header=False)
    parts = ", ".join(f"{name} {count}" for name, count in folder.split_documents().items())
    rows = {"documents": f"{folder.documents} ({parts})", "tokens": str(folder.tokens), "vocabulary": str(folder.vocab)}
    for name, value in rows.items():
        table.add_row(name, value)
    console = tables.console()
    console.print(f"{outcome}: {folder.path}", markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    for line in notes:
        console.print(line, markup=False, highlight=False)
