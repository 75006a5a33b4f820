"""Check whether a configuration can train. Each violation states the rule, the values that break it, and a next step.

    values.py           choices and ranges of single fields; does not import NeMo, so invalid values are rejected early
    training.py         consistency of trainer, optimizer, schedule and data
    saving.py           requirements of resuming: checkpoints are saved, and the next attempt finds them
    number_formats.py   number formats: consistency of precision plugin, optimizer and strategy
    sharded.py          requirements of Megatron-FSDP and of an optimizer in host memory
    overlapping.py      requirements of overlapping communication with computation
    configured_job.py, configured_shape.py  read the planner's job and model shape from a configuration
    built.py            Megatron's own checks: builds its configuration objects on a CPU
    started.py          NeMo's and Lightning's own checks: constructs and connects all objects as at the start of a run

`planner/` contains the rules for layouts, memory and hardware. No rule here depends on a recipe's name, so a user's
configuration, an edited file and NeMo's own recipes are checked in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.planner.rules.rules import Violation

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.nemo2.validation.reading import Reader
    from superpod.planner.planned_job import PlannedJob


def violations(partial: run.Partial, overrides: Sequence[str] = (), *, chain: bool = True) -> list[Violation]:
    """Return the violations of the rules by a configuration, except those that `start_violations` finds.

    Args:
        partial: a Partial of `llm.pretrain` or `llm.finetune`, overrides applied.
        overrides: the overrides; some rules apply only to overridden fields.
        chain: whether later attempts must be able to resume the run; external configurations may run only once.
    """
    from superpod.nemo2.validation import saving
    from superpod.nemo2.validation.reading import Reader

    reader = Reader(partial, tuple(overrides))
    found = list(_violations(reader))
    if chain or reader.is_overridden(*saving.PARTS):
        found += saving.violations(reader)
    return found


def start_violations(
    partial: run.Partial, overrides: Sequence[str] = (), job: PlannedJob | None = None
) -> list[Violation]:
    """Return the settings that NeMo, Lightning and Megatron reject or overwrite when a run starts.

    Call this only for a configuration that satisfies all other rules, including the planner's: the messages of the
    libraries rarely contain the values. Arguments are those of `violations`, and the planner's `job` (None = unknown).
    """
    from superpod.nemo2.validation import started
    from superpod.nemo2.validation.reading import Reader

    return list(started.violations(Reader(partial, tuple(overrides)), job))


def warnings(partial: run.Partial, overrides: Sequence[str] = (), *, chain: bool = True) -> list[Violation]:
    """Return questionable settings and, without `chain`, settings that prevent a later attempt from resuming.

    Arguments are those of `violations`.
    """
    from superpod.nemo2.validation import saving, training
    from superpod.nemo2.validation.reading import Reader

    reader = Reader(partial, tuple(overrides))
    found = list(training.warnings(reader))
    if not chain and not reader.is_overridden(*saving.PARTS):
        found += saving.violations(reader)
    return found


def _violations(reader: Reader) -> Iterator[Violation]:
    from superpod.nemo2.validation import built, number_formats, overlapping, sharded, training, values

    invalid_values = list(values.violations(reader))
    yield from invalid_values
    for rule in (*training.RULES, *number_formats.RULES, *overlapping.RULES, *sharded.RULES):
        yield from rule(reader)
    if not invalid_values:  # otherwise, Megatron would report the same values
        yield from built.violations(reader)


def require(found: Sequence[Violation]) -> None:
    """Raise UserError if there are violations, with a message per line; the hint contains their fixes."""
    if found:
        fixes = [violation.fix for violation in found if violation.fix]
        raise UserError("\n".join(violation.message for violation in found), "; ".join(dict.fromkeys(fixes)))
