"""Options for fine-tuning on this machine or a cluster: the samples, their format, and the end of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.shared_options import NoForwardCheck
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.launch.finetuning.finetune import Task


@dataclass(frozen=True)
class TuningOptions:
    """Options for the samples, the end of training and the comparison with transformers; each field is an option."""

    data: Annotated[
        list[str] | None,
        typer.Option(help="Sample file, dataset folder or quoted glob; NAME:0.3 sets its weight. Repeatable."),
    ] = None
    validation_data: Annotated[
        list[str] | None, typer.Option(help="Samples for validation.", show_default="a fraction of --data")
    ] = None
    validation: Annotated[
        float | None, typer.Option(help="Fraction of the samples to hold out for validation.", show_default="0.05")
    ] = None
    key: Annotated[
        list[str] | None,
        typer.Option(help="FIELD=KEY: key in the file for a field of the samples, such as prompt=query. Repeatable."),
    ] = None
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Skip lines that are not valid samples, and copy them to a file.")
    ] = False
    max_bad_share: Annotated[float, typer.Option(help="Maximum fraction of invalid lines; fail if exceeded.")] = 0.05
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a Jinja chat template.", show_default="from the tokenizer")
    ] = None
    system: Annotated[str, typer.Option(help="System prompt for chats that have none.", show_default="none")] = ""
    learn: Annotated[
        str, typer.Option(help="Assistant turns of a chat to train on: answers (all turns) or last (the last turn).")
    ] = "answers"
    long: Annotated[
        str, typer.Option(help="Treatment of samples longer than the sequence length: refuse, cut (truncate) or drop.")
    ] = "refuse"
    pack: Annotated[bool, typer.Option("--pack/--no-pack", help="Pack several samples into one sequence.")] = True
    seed: Annotated[int, typer.Option(help="Random seed for shuffling and for the validation split.")] = 1234
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.", show_default="from the recipe")] = None
    early_stopping: Annotated[
        int,
        typer.Option("--early-stopping", min=0, help="Stop after N validations without a lower loss; 0 disables it."),
    ] = 0
    min_delta: Annotated[float, typer.Option(min=0, help="Minimum decrease of the validation loss in nats.")] = 0
    no_forward_check: NoForwardCheck = False

    def first_changed_option(self) -> str | None:
        """Return the first option except --data with a value other than its default, such as "--no-pack", or None."""
        default = TuningOptions()
        for field in fields(self):
            if field.name != "data" and getattr(self, field.name) != getattr(default, field.name):
                return "--no-pack" if field.name == "pack" else f"--{field.name.replace('_', '-')}"
        return None

    def with_steps(self, overrides: Sequence[str] | None) -> list[str]:
        """Return the overrides with that for --steps added. Raises UserError if they set another number of steps."""
        from superpod.launch.finetuning import tuning_overrides

        return [*tuning_overrides.with_steps(tuple(overrides or ()), self.steps)]

    def task(self, model: str) -> Task:
        """Return the task of fine-tuning `model`, a Hugging Face folder, on these samples.

        Raises:
            UserError: a weight in --data is not a number, or --validation-data has weights.
        """
        from superpod.data.readers import sources
        from superpod.data.samples.samples import ReadOptions
        from superpod.launch.finetuning.finetune import Task

        names, weights = sources.parse_data_options(self.data or [])
        others, no_weights = sources.parse_data_options(self.validation_data or [])
        if no_weights:
            raise UserError("--validation-data accepts no weights; each sample is used once", "leave out the weights")
        return Task(
            model,
            names,
            others,
            self.validation,
            self.seed,
            self.long,
            self.pack,
            weights=weights,
            reading=ReadOptions(tuple(self.key or ()), self.skip_bad_lines, self.max_bad_share, self.system),
            template=str(self.chat_template.absolute()) if self.chat_template else "",
            learn=self.learn,
            steps=self.steps,
            patience=self.early_stopping,
            min_delta=self.min_delta,
            forward_check=not self.no_forward_check,
        )
