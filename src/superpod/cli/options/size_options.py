"""Size, sequence, batch and layout of a run: the options of every verb that builds, checks or plans a recipe."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
"""The word for the planner's fastest layout."""
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
"""Batches are counted in powers of two: 4M tokens are 1,024 samples of 4,096."""

BatchTokens = Annotated[
    str | None, typer.Option("--batch-tokens", help="Global batch in tokens, such as 4M (4 x 2^20) or 4000000.")
]


@dataclass(frozen=True)
class SizeOptions:
    """What a command line says of a run's size; each field is an option."""

    nodes: Annotated[
        int | None, typer.Option("--nodes", help="Size in nodes; default: the smallest. Undeclared ones are planned.")
    ] = None
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="Size in GPUs, in place of --nodes; 1, 2 or 4 are part of a node.")
    ] = None
    seq: Annotated[int | None, typer.Option("--seq", help="Tokens of a sample.")] = None
    gbs: Annotated[int | None, typer.Option("--gbs", help="Global batch, samples.")] = None
    batch_tokens: BatchTokens = None
    layout: Annotated[
        str | None, typer.Option("--layout", help="Such as tp=4,pp=2,sp; auto = the planner's fastest.")
    ] = None

    def given(self) -> dict[str, int | str]:
        """Option -> value of those that are given, in the order of `--help`."""
        names = {"nodes": "--nodes", "gpus": "--gpus", "seq": "--seq", "gbs": "--gbs", "batch_tokens": "--batch-tokens"}
        names |= {"layout": "--layout"}
        return {option: value for name, option in names.items() if (value := getattr(self, name)) is not None}

    def request(self, name: str, overrides: Sequence[str] | None = None, data: Path | None = None) -> Request:
        """The request of a command line with these options, not checked yet but for them.

        Raises:
            UserError: a number of tokens or a layout that is none, or a layout that overrides contradict.
        """
        from superpod.requests.request import Request

        layout = None
        given = re.search(r"(?:^|,)\s*gbs=(\d+)", self.layout or "")
        if given and self.gbs is not None and int(given[1]) != self.gbs:
            raise UserError(
                f"--layout {self.layout} and --gbs {self.gbs} contradict each other", "leave one of the two out"
            )
        nodes, per_node = self.nodes, None
        if self.gpus is not None:
            nodes, per_node = _nodes_of(name, self.gpus, self.nodes)
        if self.layout is not None and self.layout != AUTO:
            layout = layout_of(name, nodes, self.layout, overrides or ())
        return Request(
            name,
            tuple(overrides or ()),
            data.absolute() if data else None,
            nodes,
            gpus_per_node=per_node,
            seq=self.seq,
            gbs=self.gbs,
            batch_tokens=tokens(self.batch_tokens),
            layout=layout,
            best_layout=self.layout == AUTO,
        )


def _nodes_of(name: str, gpus: int, nodes: int | None) -> tuple[int, int | None]:
    """As `sized.nodes_of`. Raises UserError for a file, which has its own size."""
    from superpod.collection.registry import find, recipes
    from superpod.collection.sizes import sized

    if name not in recipes():
        raise UserError(f"--gpus {gpus}: {name} is not a recipe, and has its own size", "write trainer.devices=N")
    return sized.nodes_of(find(name), gpus, nodes)


def with_size(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace the decorated verb's parameter `size` by the options of `SizeOptions`."""
    return spread(SizeOptions, "size")(verb)


def tokens(text: str | None) -> int | None:
    """Tokens of a batch: `4M`, `0.5M`, `4194304`, `4e6`.

    Raises:
        UserError: it is no whole number of tokens.
    """
    if text is None:
        return None
    match = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*([KMG]?)(?:i?)", text.strip(), re.IGNORECASE)
    number = float(re.sub("[_,]", "", match[1])) * UNITS[match[2].upper()] if match else 0.0
    if not 0 < number <= 2**48 or number != int(number):
        raise UserError(f"--batch-tokens is {text[:60]!r}", "a number of tokens, such as 4M (4,194,304) or 4000000")
    return int(number)


def layout_of(name: str, nodes: int | None, text: str, overrides: Sequence[str] = ()) -> Layout:
    """A recipe's layout changed by `--layout`: that of its size, where it declares it, or of its smallest.

    Raises:
        UserError: no such recipe or layout, or an override that sets the same degree.
    """
    from superpod.collection.facts.override_fields import path_of
    from superpod.collection.registry import find
    from superpod.planner.layout import PARALLEL_SIZES

    recipe = find(name)
    given = {part.partition("=")[0].strip() for part in text.split(",")}
    paths = {f"trainer.strategy.{field}": short for short, field in PARALLEL_SIZES.items()}
    paths |= {"trainer.strategy.sequence_parallel": "sp", "data.micro_batch_size": "mbs"}
    for override in overrides:
        if paths.get(path_of(override)) in given:
            raise UserError(
                f"--layout {text} and {override} contradict each other: both say it of one run",
                "leave one of the two out",
            )
    size = recipe.nodes[0] if nodes is None else nodes
    try:
        base = recipe.layouts.get(size, recipe.layout())
        layout, note = option_syntax.layout_of_model(base, text, recipe.shape.layers)
    except UserError as wrong:
        raise UserError(str(wrong), wrong.hint or f"such as tp=4,pp=2,sp; or {AUTO}, the planner's fastest") from wrong
    say([note] if note else [])
    return layout


def say(notes: Sequence[str]) -> None:
    """Print what to know of a size on stderr, each line once a command."""
    for note in notes:
        _say(note)


@functools.cache
def _say(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)
