"""Options for the size, sequence length, batch size and layout of a run, for commands that build or plan recipes."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.shared_options import spread
from superpod.errors import UserError
from superpod.planner.formats import option_syntax

if TYPE_CHECKING:
    from superpod.planner.layout import Layout
    from superpod.requests.request import Request

AUTO = "auto"
"""Value of `--layout` that selects the layout predicted to be fastest."""
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
"""Units of `--batch-tokens`, powers of two: 4M tokens are 1,024 samples of 4,096 tokens."""

Gpus = Annotated[
    int | None, typer.Option("--gpus", help="Number of GPUs, instead of --nodes; 1, 2 or 4 use part of a node.")
]
BatchTokens = Annotated[
    str | None,
    typer.Option("--batch-tokens", help="Global batch size in tokens, such as 4M (4 x 2^20) or 4000000."),
]


@dataclass(frozen=True)
class SizeOptions:
    """Size options of a command line; each field is an option."""

    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            help="Number of nodes; if the recipe has no layout for it, one is planned. Default: smallest declared.",
        ),
    ] = None
    gpus: Gpus = None
    seq: Annotated[int | None, typer.Option("--seq", help="Sequence length in tokens.")] = None
    gbs: Annotated[int | None, typer.Option("--gbs", help="Global batch size in samples.")] = None
    batch_tokens: BatchTokens = None
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout", help="Parallel layout, such as tp=4,pp=2,sp; auto = the fastest according to the planner."
        ),
    ] = None

    def given_options(self) -> dict[str, int | str]:
        """Return the options that were given, such as {"--nodes": 4}, in the order of `--help`."""
        given_values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                given_values[f"--{field.name.replace('_', '-')}"] = value
        return given_values

    def request(self, name: str, overrides: Sequence[str] | None = None, data: Path | None = None) -> Request:
        """Return the request for a command line with these options. Check only the options themselves.

        Raises:
            UserError: a value cannot be parsed, or the layout conflicts with --gbs or an override.
        """
        from superpod.requests.request import Request

        layout = None
        layout_gbs = re.search(r"(?:^|,)\s*gbs=(\d+)", self.layout or "")
        if layout_gbs and self.gbs is not None and int(layout_gbs[1]) != self.gbs:
            raise UserError(f"--layout {self.layout} conflicts with --gbs {self.gbs}", "leave one of them out")
        nodes, per_node = self.nodes, None
        if self.gpus is not None:
            nodes, per_node = _nodes_for_gpus(name, self.gpus, self.nodes)
        if self.layout is not None and self.layout != AUTO:
            layout = changed_layout(name, nodes, self.layout, overrides or ())
        return Request(
            name,
            tuple(overrides or ()),
            data.absolute() if data else None,
            nodes,
            gpus_per_node=per_node,
            seq=self.seq,
            gbs=self.gbs,
            batch_tokens=parse_batch_tokens(self.batch_tokens),
            layout=layout,
            best_layout=self.layout == AUTO,
        )


def _nodes_for_gpus(name: str, gpus: int, nodes: int | None) -> tuple[int, int | None]:
    """Return the number of nodes and the GPUs per node for `--gpus`; see `sized.split_gpus`.

    Raises:
        UserError: `name` is a file, which sets its own number of GPUs.
    """
    from superpod.collection.registry import find, is_recipe
    from superpod.collection.sizes import sized

    if not is_recipe(name):
        raise UserError(
            f"--gpus {gpus} applies only to recipes; {name} sets its own number of GPUs", "use trainer.devices=N"
        )
    return sized.split_gpus(find(name), gpus, nodes)


def with_size(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `size` of a command by the options in `SizeOptions`."""
    return spread(SizeOptions, "size")(command)


def parse_batch_tokens(text: str | None) -> int | None:
    """Parse a number of tokens such as `4M`, `0.5M`, `4194304` or `4e6`.

    Raises:
        UserError: the text is not a whole number from 1 to 2^48.
    """
    if text is None:
        return None
    match = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*([KMG]?)(?:i?)", text.strip(), re.IGNORECASE)
    count = 0.0
    if match:
        count = float(re.sub("[_,]", "", match[1])) * UNITS[match[2].upper()]
    if not 0 < count <= 2**48 or count != int(count):
        raise UserError(
            f"--batch-tokens must be a whole number of tokens, not {text[:60]!r}",
            "for example 4M (4,194,304) or 4000000",
        )
    return int(count)


def changed_layout(name: str, nodes: int | None, text: str, overrides: Sequence[str] = ()) -> Layout:
    """Return the layout of a recipe with the changes in `--layout`.

    Args:
        name: name of the recipe.
        nodes: number of nodes whose layout to change; if None or not declared, the smallest declared size is used.
        text: value of `--layout`, such as `tp=4,pp=2,sp`.
        overrides: overrides on the same command line.

    Raises:
        UserError: the recipe or a degree is unknown, or an override sets the same degree.
    """
    from superpod.collection.facts.override_fields import path_of
    from superpod.collection.registry import find
    from superpod.planner.layout import PARALLEL_SIZES

    recipe = find(name)
    given_degrees = {part.partition("=")[0].strip() for part in text.split(",")}
    paths = {f"trainer.strategy.{field}": short for short, field in PARALLEL_SIZES.items()}
    paths |= {"trainer.strategy.sequence_parallel": "sp", "data.micro_batch_size": "mbs"}
    for override in overrides:
        if paths.get(path_of(override)) in given_degrees:
            raise UserError(f"--layout {text} and {override} set the same degree", "leave one of them out")
    size = recipe.nodes[0] if nodes is None else nodes
    try:
        base = recipe.layouts.get(size, recipe.layout())
        layout, note = option_syntax.layout_for_model(base, text, recipe.shape.layers)
    except UserError as wrong:
        hint = wrong.hint or f"for example tp=4,pp=2,sp, or {AUTO} for the fastest according to the planner"
        raise UserError(str(wrong), hint) from wrong
    if note:
        print_note(note)
    return layout


def print_notes(notes: Sequence[str]) -> None:
    """Print notes on stderr, each note only once per command."""
    for note in notes:
        print_note(note)


@functools.cache
def print_note(note: str) -> None:
    """Print a note on stderr; the cache suppresses repetitions."""
    print(f"note: {note}", file=sys.stderr)
