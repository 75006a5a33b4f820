"""Check whether a configuration can train. Each violation has the rule, the values that violate it, and a next step.

    values.py           choices and ranges of single fields; does not import NeMo, so bad values are rejected early
    training.py         consistency of trainer, optimizer, schedule and data
    saving.py           requirements of resuming: checkpoints are saved, and found by the next attempt
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

    from superpod.planner.planned_job import PlannedJob


def violations(partial: run.Partial, overrides: Sequence[str] = (), *, chain: bool = True) -> list[Violation]:
    """List the rules that a built configuration violates.

    Args:
        partial: a Partial of `llm.pretrain` or `llm.finetune`, overrides applied.
        overrides: the overrides of the command line; some rules apply only to fields that were overridden.
        chain: whether later attempts must be able to resume the run; external configurations may run only once.
    """
    from superpod.nemo2.validation import saving
    from superpod.nemo2.validation.reading import Reader

    reader = Reader(partial, tuple(overrides))
    violations = list(_violations(reader))
    if chain or reader.is_overridden(*saving.PARTS):
        violations += saving.violations(reader)
    return violations


def start_violations(
    partial: run.Partial, overrides: Sequence[str] = (), job: PlannedJob | None = None
) -> list[Violation]:
    """List the settings that NeMo, Lightning and Megatron reject or overwrite when a run of the planner's `job` starts.

    Call this only for a configuration that satisfies all other rules, including the planner's: the messages of the
    libraries rarely contain the values.
    """
    from superpod.nemo2.validation import started
    from superpod.nemo2.validation.reading import Reader

    return list(started.violations(Reader(partial, tuple(overrides)), job))


def warnings(partial: run.Partial, overrides: Sequence[str] = (), *, chain: bool = True) -> list[Violation]:
    """List questionable settings; without `chain`, also settings that would prevent a later attempt from resuming."""
    from superpod.nemo2.validation import saving, training
    from superpod.nemo2.validation.reading import Reader

    reader = Reader(partial, tuple(overrides))
    warning_list = list(training.warnings(reader))
    if not chain and not reader.is_overridden(*saving.PARTS):
        warning_list += saving.violations(reader)
    return warning_list


def _violations(reader: Reader) -> Iterator[Violation]:
    from superpod.nemo2.validation import built, number_formats, overlapping, sharded, training, values

    bad_values = list(values.violations(reader))
    yield from bad_values
    for rule in (*training.RULES, *number_formats.RULES, *overlapping.RULES, *sharded.RULES):
        yield from rule(reader)
    if not bad_values:  # otherwise, Megatron would report the same error again
        yield from built.violations(reader)


def require(broken_rules: Sequence[Violation]) -> None:
    """Raise an error if any rule is violated.

    Raises:
        UserError: contains the messages of all violated rules, one per line.
    """
    if broken_rules:
        fixes = [broken.fix for broken in broken_rules if broken.fix]
        raise UserError("\n".join(broken.message for broken in broken_rules), "; ".join(dict.fromkeys(fixes)))


if TYPE_CHECKING:
    from superpod.nemo2.validation.reading import Reader
