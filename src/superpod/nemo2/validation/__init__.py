"""Whether a configuration can train: rules over what was built and overridden, each with its numbers and a next move.

    values.py     words and ranges of single fields; needs no NeMo, so a bad value is refused before NeMo is imported
    training.py   what the trainer, the optimizer, the schedule and the data must agree on
    saving.py     what a chain of attempts needs: checkpoints that are saved, and found again
    numbers.py    precision: what the plugin, the optimizer and the strategy must agree on
    sharded.py    what Megatron-FSDP and an optimizer in host memory take for granted
    overlapping.py  what communication beside computation takes for granted
    configured_job.py, configured_shape.py  the planner's job and model, read back from a configuration
    built.py      Megatron's own checks: its configurations are really built, on a CPU
    started.py    NeMo's and Lightning's own: every object is constructed and connected as a run starts

`planner/` has the rules of layouts, memory and hardware. Nothing here knows a recipe's name: a user's configuration, an
edited file and NeMo's own recipes are judged alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.planner.rules.rules import Violation

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.planner.planned_job import PlannedJob


def violations(partial: run.Partial, overrides: Sequence[str] = (), *, chain: bool = True) -> list[Violation]:
    """Every rule that the built configuration breaks; [] = none.

    Args:
        partial: of `llm.pretrain` or `llm.finetune`, overrides applied.
        overrides: what was overridden, as on a command line: a few rules refuse only what was asked for.
        chain: whether attempts must be able to continue it; a configuration that others wrote may run once.
    """
    from superpod.nemo2.validation import saving
    from superpod.nemo2.validation.reading import Reader

    reader = Reader(partial, tuple(overrides))
    of_chain = list(saving.violations(reader)) if chain or reader.overridden(*saving.PARTS) else []
    return [*_violations(reader), *of_chain]


def start_violations(
    partial: run.Partial, overrides: Sequence[str] = (), job: PlannedJob | None = None
) -> list[Violation]:
    """What NeMo, Lightning and Megatron refuse or write over as a run of the planner's `job` starts (`started.py`).

    Of a configuration that breaks no other rule, also of the planner's: their messages have the numbers, these seldom.
    """
    from superpod.nemo2.validation import started
    from superpod.nemo2.validation.reading import Reader

    return list(started.violations(Reader(partial, tuple(overrides)), job))


def warnings(partial: run.Partial, overrides: Sequence[str] = (), *, chain: bool = True) -> list[Violation]:
    """What is odd about a configuration that trains; without `chain`, what keeps a later attempt from continuing it."""
    from superpod.nemo2.validation import saving, training
    from superpod.nemo2.validation.reading import Reader

    reader = Reader(partial, tuple(overrides))
    of_chain = [] if chain or reader.overridden(*saving.PARTS) else list(saving.violations(reader))
    return [*training.advice(reader), *of_chain]


def _violations(reader: Reader) -> Iterator[Violation]:
    from superpod.nemo2.validation import built, numbers, overlapping, sharded, training, values

    of_values = list(values.violations(reader))
    yield from of_values
    for rule in (*training.RULES, *numbers.RULES, *overlapping.RULES, *sharded.RULES):
        yield from rule(reader)
    if not of_values:  # Megatron's message on a value that is named already would be a second one for one mistake
        yield from built.violations(reader)


def require(broken_rules: Sequence[Violation]) -> None:
    """Do nothing where no rule is broken.

    Raises:
        UserError: with every broken rule, a line each.
    """
    if broken_rules:
        fixes = [broken.fix for broken in broken_rules if broken.fix]
        raise UserError("\n".join(broken.message for broken in broken_rules), "; ".join(dict.fromkeys(fixes)))


if TYPE_CHECKING:
    from superpod.nemo2.validation.reading import Reader
