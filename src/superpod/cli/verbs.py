"""Command groups that reject repeated options and empty arguments, which click would silently accept.

Click keeps only the last value of an option that is given twice. An empty argument usually comes from an unset shell
variable; as a path, it would mean the current folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from typer.core import TyperGroup

from superpod.errors import UserError

if TYPE_CHECKING:
    from typer._click.core import Command, Context, Parameter


class CommandGroup(TyperGroup):
    """A command group that rejects empty and repeated arguments of its subcommands before click parses them."""

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """Return the name of the subcommand, the subcommand and the remaining arguments.

        Raises:
            UserError: an argument is empty, or an option that takes one value is given more than once.
        """
        name, command, rest = super().resolve_command(ctx, args)
        is_group = hasattr(command, "commands")
        if command is not None and not is_group and not ctx.resilient_parsing:  # which is used for shell completion
            options = [p for p in command.params if p.param_type_name == "option" and not getattr(p, "is_flag", False)]
            by_name = {name: param for param in options for name in param.opts}
            _refuse_empty(by_name, rest)
            _refuse_repeated(by_name, rest)
        return name, command, rest


def _refuse_empty(options: Mapping[str, Parameter], args: list[str]) -> None:
    """Raise UserError if an argument, or the value of an option in `options`, is empty."""
    for previous, arg in pairwise(["", *args]):
        option = arg.removesuffix("=") if arg else previous
        if not arg or (arg == f"{option}=" and option in options):
            name = option if option in options else "an argument"
            raise UserError(f"{name} is empty", "pass a value or leave it out; a shell variable may be unset")


def _refuse_repeated(options: Mapping[str, Parameter], args: list[str]) -> None:
    """Raise UserError if an option in `options` that accepts one value is given more than once."""
    counts: Counter[str] = Counter()
    remaining_args = iter(args)
    for arg in remaining_args:
        if arg == "--":
            break
        name, equals, _ = arg.partition("=")
        param = options.get(name)
        if param is None:
            continue
        if not equals:
            next(remaining_args, None)  # skip the value, which may look like an option
        if not getattr(param, "multiple", False):
            counts[max(param.opts, key=len)] += 1
    for name, count in counts.items():
        if count > 1:
            times = "twice" if count == 2 else f"{count} times"
            raise UserError(f"{name} is given {times}", "pass it once")
