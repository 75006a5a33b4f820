"""Options of a fine-tuning, here and on a cluster: which samples, how they are read, what is learnt, when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.shared_options import NoForwardCheck
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.launch.finetune import Task


@dataclass(frozen=True)
class SampleOptions:
    """What a command line says of samples; each field is an option."""

    data: Annotated[
        list[str] | None,
        typer.Option(help="File of samples, dataset folder or quoted glob; NAME:0.3 weighs it. May be repeated."),
    ] = None
    validation_data: Annotated[
        list[str] | None, typer.Option(help="Samples to validate on.", show_default="a share of --data")
    ] = None
    validation: Annotated[float | None, typer.Option(help="Share of the samples held out.", show_default="0.05")] = None
    key: Annotated[list[str] | None, typer.Option(help="NAME=KEY: where samples have it, such as prompt=query.")] = None
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave out what is no sample; count and keep it.")
    ] = False
    max_bad_share: Annotated[float, typer.Option(help="Refuse more bad lines than this share.")] = 0.05
    chat_template: Annotated[
        Path | None, typer.Option(help="File of a Jinja chat template.", show_default="the tokenizer's")
    ] = None
    system: Annotated[str, typer.Option(help="System prompt of chats without one.", show_default="none")] = ""
    learn: Annotated[str, typer.Option(help="What of a chat is learnt: all answers, or the last.")] = "answers"
    long: Annotated[str, typer.Option(help="Samples beyond the sequence length: refuse, cut or drop.")] = "refuse"
    pack: Annotated[bool, typer.Option("--pack/--no-pack", help="Put several samples into one sequence.")] = True
    seed: Annotated[int, typer.Option(help="Seed of the samples' order, which decides those held out.")] = 1234

    def task(self, model: str) -> Task:
        """The fine-tuning of `model`, a Hugging Face folder, on these samples.

        Raises:
            UserError: a weight that is no number, or one where every sample is validated on.
        """
        from superpod.data.readers import sources
        from superpod.data.samples.samples import Reading
        from superpod.launch.finetune import Task

        names, weights = sources.parse(self.data or [])
        others, no_weights = sources.parse(self.validation_data or [])
        if no_weights:
            raise UserError("--validation-data has no weights", "every sample is validated on once")
        return Task(
            model,
            names,
            others,
            self.validation,
            self.seed,
            self.long,
            self.pack,
            weights=weights,
            reading=Reading(tuple(self.key or ()), self.skip_bad_lines, self.max_bad_share, self.system),
            template=str(self.chat_template.absolute()) if self.chat_template else "",
            learn=self.learn,
        )


@dataclass(frozen=True)
class TuningOptions(SampleOptions):
    """These, when the training ends, and whether its import and export are held against transformers."""

    steps: Annotated[int | None, typer.Option(min=1, help="Steps of training.", show_default="the recipe's")] = None
    early_stopping: Annotated[
        int, typer.Option("--early-stopping", min=0, help="End after N validations without a lower loss; 0: never.")
    ] = 0
    min_delta: Annotated[float, typer.Option(min=0, help="Nats by which a loss must be lower to count as lower.")] = 0
    no_forward_check: NoForwardCheck = False

    def given(self) -> str:
        """The first option that a command line gives, but for --data, which other runs take too; '' = none."""
        default = TuningOptions()
        names = [field.name for field in fields(self) if field.name != "data"]
        changed = [name for name in names if getattr(self, name) != getattr(default, name)]
        return f"--{'no-' * (changed[0] == 'pack')}{changed[0].replace('_', '-')}" if changed else ""

    def with_steps(self, overrides: Sequence[str] | None) -> list[str]:
        """The overrides with `--steps`. Raises UserError where they contradict it."""
        from superpod.launch import finetune_overrides

        return [*finetune_overrides.with_steps(tuple(overrides or ()), self.steps)]

    def task(self, model: str) -> Task:
        """As of `SampleOptions`, with the training's end. Raises UserError."""
        return replace(
            super().task(model),
            steps=self.steps,
            patience=self.early_stopping,
            min_delta=self.min_delta,
            forward_check=not self.no_forward_check,
        )
