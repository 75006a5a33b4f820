"""What was asked for: a recipe, what is changed in it, its data and its size. Read and refused without NeMo."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superpod.errors import UserError, did_you_mean
from superpod.node.run_folder import RunFolder


@dataclass(frozen=True)
class Request:
    """A run as a user asks for it. `resolve.resolve` says what it comes to."""

    recipe: str
    overrides: tuple[str, ...] = ()
    """`path=value` and `with=OPTION`, in the order they apply."""
    data: Path | None = None
    """a folder made by `recipes data`; None = mock data"""
    num_nodes: int | None = None
    """None = the recipe's smallest size"""
    gpu: str = ""
    """what a configuration is judged on; "" = its recipe's, and never anything else for a run"""

    def facts(self) -> dict[str, Any]:
        """As run.json keeps it."""
        data = str(self.data) if self.data else None
        return {"overrides": list(self.overrides), "data": data, "num_nodes": self.num_nodes}

    @classmethod
    def of_run(cls, run: RunFolder, more: Sequence[str] = (), data: Path | None = None) -> Request:
        """The request of an earlier run, with `more` overrides after its own, and other data where given."""
        facts = run.facts
        kept = Path(facts["data"]) if facts.get("data") else None
        return cls(run.recipe, (*facts.get("overrides", ()), *more), data or kept, facts.get("num_nodes"))

    def check(self, *, any_subject: bool = False) -> None:
        """Refuse what can be refused before NeMo is imported.

        Args:
            any_subject: take files and NeMo's own recipes too, as `subject` reads them.

        Raises:
            UserError: no such recipe or size, no override, a value that its field cannot have, a secret, or a data
                folder that is not complete.
        """
        from superpod.lifecycle import subject
        from superpod.recipes import rules
        from superpod.recipes.data.folder import DataFolder
        from superpod.recipes.rules import values

        if subject.kind(self.recipe) != "recipe" and not any_subject:
            raise UserError(
                f"{self.recipe!r} is no recipe of `recipes list`",
                "`recipes check` and `recipes rehearse` take files and NeMo's recipes; a file runs by itself: its top",
            )
        subject.check(self.recipe, self.num_nodes)
        for override in self.overrides:
            _check_override(override)
        rules.require(list(values.of_text(self.overrides)))
        if self.data:
            DataFolder.load(self.data)


ROOTS = ("model", "data", "trainer", "log", "resume", "optim", "peft", "tokenizer", "model_transform", "with")
"""What an override may begin with: the arguments of `llm.pretrain` and `llm.finetune`, and `with=`."""


def _check_override(text: str) -> None:
    from superpod.node.redaction import redact_text
    from superpod.recipes import options

    if not re.match(r"[A-Za-z_][\w.\[\]]*\W*=", text):
        raise UserError(f"{text!r} is not an override", "write path=value, such as trainer.max_steps=10")
    options.require_known(text)
    first = re.split(r"\W", text, maxsplit=1)[0]
    if first not in ROOTS:
        hint = did_you_mean(first, list(ROOTS)) or f"they are {', '.join(ROOTS)}"
        raise UserError(f"override {text.partition('=')[0]}: the recipe has no field {first!r}", hint)
    if redact_text(text) != text:
        path = text.partition("=")[0]
        raise UserError(f"override {path} looks like a secret, and run folders keep overrides", "use the environment")
