"""The groups of commands: an option that takes one value stands once, for click drops the first, and no word is empty.

An empty word is a shell's variable that is not set: as a path it would be the folder that one is in.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from typer.core import TyperGroup

from superpod.errors import UserError

if TYPE_CHECKING:
    from typer._click.core import Command, Context


class Verbs(TyperGroup):
    """A group of verbs whose options each stand once, but for those that are repeatable."""

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """The verb that `args` name, and what follows it. Raises UserError."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not hasattr(command, "commands") and not ctx.resilient_parsing:
            _refuse_words(command, rest)
        return name, command, rest


def _refuse_words(command: Command, words: list[str]) -> None:
    taking = [p for p in command.params if p.param_type_name == "option" and not getattr(p, "is_flag", False)]
    by_name = {name: param for param in taking for name in param.opts}
    for before, word in pairwise(["", *words]):
        option = word.removesuffix("=") if word else before
        if not word or (word == f"{option}=" and option in by_name):
            name = option if option in by_name else "an argument"
            raise UserError(f"{name} is empty", "leave it out, or give it; is a variable of the shell not set?")
    given: Counter[str] = Counter()
    rest = iter(words)
    for word in rest:
        if word == "--":
            break
        name, equals, _ = word.partition("=")
        param = by_name.get(name)
        if param is None:
            continue
        if not equals:
            next(rest, None)  # its value, which may look like an option
        given[max(param.opts, key=len)] += not getattr(param, "multiple", False)
    for name, count in given.items():
        if count > 1:
            raise UserError(f"{name} is given {'twice' if count == 2 else f'{count} times'}", "give it once")
