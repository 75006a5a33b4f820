"""Represent and check a request for a run (recipe, overrides, data and size) without NeMo."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.collection.facts.override_fields import path_of
from superpod.errors import UserError, did_you_mean
from superpod.planner.layout import Layout
from superpod.runtime.attempts import deferred_data
from superpod.runtime.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from superpod.collection.registry import Recipe
    from superpod.collection.sizes.sized import Size
    from superpod.planner.planned_job import PlannedJob

LENGTHS = ("data.seq_length", "model.config.seq_length")
"""The two fields with the sequence length. An override of one changes the other too."""
OPTION_PATHS = {
    "num_nodes": ("--nodes", ("trainer.num_nodes",)),
    "seq": ("--seq", LENGTHS),
    "gbs": ("--gbs", ("data.global_batch_size",)),
    "batch_tokens": ("--batch-tokens", ("data.global_batch_size",)),
}
"""Field of `Request` -> its option, and the override paths that set the same value."""

MOCK_DATA = (
    "mock data: random tokens from NeMo's MockDataModule, from which a model learns nothing; --data DIR trains on text"
)


@dataclass(frozen=True)
class Request:
    """A run that a user requests. `resolve.resolve` converts it to a resolved run."""

    recipe: str
    overrides: tuple[str, ...] = ()
    """`path=value` and `with=OPTION`, in the order in which they apply"""
    data: Path | None = None
    """a folder written by `recipes data`; None = mock data"""
    num_nodes: int | None = None
    """None = the smallest size that the recipe declares. For an undeclared size, the planner selects the layout"""
    gpu: str = ""
    """GPU for which a configuration is checked; "" = that of the recipe"""
    seq: int | None = None
    """tokens per sample; None = from the overrides, or else from the recipe"""
    gbs: int | None = None
    """samples per global batch; None = from the recipe"""
    batch_tokens: int | None = None
    """tokens per global batch, instead of `gbs`"""
    layout: Layout | None = None
    """a complete layout; None = from the recipe"""
    best_layout: bool = False
    """whether to use the planner's fastest layout instead of the recipe's layout"""
    deferred_data: bool = False
    """whether a job for which the run waits writes the data folder (requests/deferred.py)"""
    gpus_per_node: int | None = None
    """number of GPUs to use on a single node; None = all"""
    profile: str = ""
    """steps and ranks to profile (requests/profile_request.py); "" = none"""

    def facts(self) -> dict[str, Any]:
        """Return the entries of run.json from which `from_facts` creates the request."""
        from superpod.collection import layout_text

        facts: dict[str, Any] = {
            "overrides": list(self.overrides),
            "data": str(self.data) if self.data else None,
            "num_nodes": self.num_nodes,
        }
        if self.deferred_data:
            facts[deferred_data.KEY] = True
        for name in _SIZES:
            if getattr(self, name):
                facts[name] = getattr(self, name)
        if self.gpus_per_node:
            facts[_REQUESTED_GPUS] = self.gpus_per_node
        if self.layout:
            facts["layout"] = layout_text.list_written_fields(self.layout)
        return facts

    @classmethod
    def from_facts(cls, recipe: str, facts: Mapping[str, Any], gpu: str = "") -> Request:
        """Create a request from entries of run.json. Raises UserError if the layout in them is invalid."""
        data, layout = facts.get("data"), facts.get("layout")
        return cls(
            recipe,
            tuple(facts.get("overrides", ())),
            Path(data) if data else None,
            facts.get("num_nodes"),
            gpu,
            deferred_data=bool(facts.get(deferred_data.KEY)),
            layout=Layout.from_mapping(layout, f"the layout of a run of {recipe}") if layout else None,
            gpus_per_node=facts.get(_REQUESTED_GPUS),
            **{name: facts[name] for name in _SIZES if name in facts},
        )

    @classmethod
    def from_run(cls, run: RunFolder, more: Sequence[str] = (), data: Path | None = None) -> Request:
        """Create the request of an existing run with the overrides `more` appended, and `data` if it is given."""
        request = cls.from_facts(run.recipe, run.facts)
        if request.data and (request.data / deferred_data.FILE).is_file():
            request = replace(request, deferred_data=False)
        paths = {path_of(text) for text in more}
        changed = {name: None for name in ("seq", "gbs", "batch_tokens") if paths & {*OPTION_PATHS[name][1]}}
        return replace(request, overrides=(*request.overrides, *more), data=data or request.data, **changed)

    def sized_recipe(self) -> Recipe:
        """Return the recipe with the requested size, sequence length, batch size and layout, without NeMo.

        Raises UserError if there is no such recipe, or it cannot be trained on this number of nodes.
        """
        from superpod.collection.sizes import sized

        return sized.find_sized(self.recipe, self.size())

    def size(self) -> Size:
        """Return the requested size, from the options and from overrides of the sequence length."""
        from superpod.collection.sizes.sized import Size

        seq = self.seq
        if seq is None:
            lengths = {_assigned_count(text) for text in self.overrides if path_of(text) in LENGTHS}
            seq = lengths.pop() if len(lengths) == 1 else None  # `check` refuses conflicting overrides
        size = Size(self.num_nodes, seq, self.gbs, self.batch_tokens, self.layout, self.best_layout)
        return replace(size, gpus_per_node=self.gpus_per_node)

    def job(self) -> PlannedJob:
        """Return the planner's job for the recipe with the requested size, without overrides. Raises UserError."""
        from superpod.collection import recipe_job

        return recipe_job.job(self.sized_recipe(), self.num_nodes)

    def require_legal_layout(self) -> None:
        """Raise UserError if the layout is illegal at the requested size and sequence length. Does not import NeMo.

        The message has every violated rule, the hint the layout that the planner would select. Nothing is checked if an
        override may make the layout legal.
        """
        from superpod.collection.sizes import better_layout
        from superpod.collection.sizes.sized import SizedRecipe
        from superpod.planner import legality

        recipe = self.sized_recipe()
        if not isinstance(recipe, SizedRecipe) or any(path_of(text).startswith(_LAYOUT) for text in self.overrides):
            return
        try:
            legality.require(self.job())
        except UserError as illegal:
            better_text = better_layout.describe_better_layout(recipe)
            raise UserError(
                str(illegal), f"--layout auto selects {better_text}" if better_text else illegal.hint
            ) from illegal

    def with_resolved_size(self) -> Request:
        """Return the request with its resolved layout, batch size and sequence length. Raises UserError.

        A resumed run then keeps them, even if a later version of the planner would select others.
        """
        from superpod.collection.sizes.sized import SizedRecipe

        recipe = self.sized_recipe()
        if not isinstance(recipe, SizedRecipe):
            return self
        (nodes,), layout = recipe.nodes, recipe.layout()
        batch = self.gbs or self.batch_tokens
        kept_layout = layout if recipe.planned or self.layout else None
        gbs = layout.gbs if batch or kept_layout else None
        return replace(self, num_nodes=nodes, gbs=gbs, batch_tokens=None, layout=kept_layout, best_layout=False)

    def changes(self) -> tuple[str, ...]:
        """Return the overrides, and as overrides the options with which the recipe's proof is not valid."""
        changes = [*self.overrides]
        if self.seq:
            changes.append(f"data.seq_length={self.seq}")
        if self._has_another_layout():
            changes.append("trainer.strategy.layout")
        return tuple(changes)

    def _has_another_layout(self) -> bool:
        """Return whether the requested layout differs from the layout that the recipe declares for this size.

        The global batch size is ignored, since the model that is built depends only on the micro-batch size.
        """
        from superpod.collection.registry import find

        declared, sized = find(self.recipe), self.sized_recipe()
        nodes = sized.nodes[0] if self.num_nodes is None else self.num_nodes
        if nodes not in declared.layouts or sized.gpus_per_node != declared.gpus_per_node:
            return True
        layout = sized.layout(nodes)
        return layout != replace(declared.layouts[nodes], gbs=layout.gbs)

    def notes(self) -> list[str]:
        """Return notes on the requested size and number of steps, one line each. Raises UserError."""
        from superpod.collection.sizes.sized import TOKENS_PER_STEP, SizedRecipe
        from superpod.nemo2.build import learning_rate_schedule

        recipe = self.sized_recipe()
        warmup_notes = learning_rate_schedule.notes(recipe.schedule.warmup_steps, self.overrides)
        if not isinstance(recipe, SizedRecipe):
            return warmup_notes
        notes = list(recipe.notes)
        if any(text.startswith("data.global_batch_size") for text in self.overrides):
            notes = [note for note in notes if not note.startswith(TOKENS_PER_STEP)]
        return [*notes, *warmup_notes]

    @property
    def mock_data_notes(self) -> list[str]:
        """A note on mock data in a list; [] if the request has a data folder."""
        return [MOCK_DATA] if self.data is None else []

    def check(self, *, any_subject: bool = False) -> None:
        """Check the request as far as possible before NeMo is imported.

        With `any_subject`, Python files and NeMo's own recipes are accepted too (requests/subject.py). Raises UserError
        for an unknown recipe or size, an invalid override, a secret, or an incomplete data folder.
        """
        from superpod.data.folder import DataFolder
        from superpod.nemo2 import validation as rules
        from superpod.nemo2.validation import values
        from superpod.requests import subject

        if subject.subject_kind(self.recipe) != "recipe" and not any_subject:
            raise UserError(
                f"{self.recipe!r} is not in `recipes list`",
                "use `recipes check` or `recipes rehearse` for files and NeMo's recipes; the docstring of an exported "
                "file has the command that trains it",
            )
        for override in self.overrides:
            _check_override(override)
        self._check_conflicts()
        subject.check(self)
        rules.require(list(values.text_violations(self.overrides)))
        if self.data and not self.deferred_data:
            DataFolder.load(self.data)

    def _check_conflicts(self) -> None:
        """Raise UserError if an option and an override, or two overrides, set the same value to different numbers."""
        overrides_by_path = {path_of(text): text for text in self.overrides}
        counts = {path: _assigned_count(text) for path, text in overrides_by_path.items()}
        for name, (option, paths) in OPTION_PATHS.items():
            value = getattr(self, name)
            for path in paths:
                if value is not None and path in counts and counts[path] != value:
                    raise UserError(
                        f"{option} {value} conflicts with {overrides_by_path[path]}: both set the same value",
                        "omit one of the two",
                    )
        lengths = {path: counts[path] for path in LENGTHS if counts.get(path)}
        if len({*lengths.values()}) > 1:
            texts = [f"{path}={number}" for path, number in lengths.items()]
            raise UserError(
                f"{' conflicts with '.join(texts)}: both set the sequence length",
                f"use --seq {lengths['data.seq_length']}, which sets both",
            )


_SIZES = ("seq", "gbs", "batch_tokens", "best_layout", "profile")
_REQUESTED_GPUS = "requested_gpus_per_node"  # `gpus_per_node` in run.json is the run's actual number
"""Entries of run.json that exist only if the user requested them."""

_LAYOUT = ("trainer.", "data.micro_batch_size", "data.global_batch_size", "model.config", "with", "optim")
"""Prefixes of overrides that may make a layout legal."""


def _assigned_count(override: str) -> int | None:
    """Return the value of an override if it is a non-negative integer below 10**12, otherwise None."""
    from superpod.nemo2.validation import values

    path_and_value = values.split_assignment(override)
    number = values.literal(path_and_value[1]) if path_and_value else None
    return number if type(number) is int and 0 <= number < 10**12 else None


ROOTS = ("model", "data", "trainer", "log", "resume", "optim", "peft", "tokenizer", "model_transform", "with")
"""First fields of the paths of overrides: the arguments of `llm.pretrain` and `llm.finetune`, and `with`."""


def _check_override(text: str) -> None:
    """Raise UserError if the override `text` is malformed, has an unknown field, or contains a secret."""
    from superpod.collection.facts import override_fields
    from superpod.common.redaction import redact_text
    from superpod.nemo2 import options

    if not re.match(r"[A-Za-z_][\w.\[\]]*\W*=", text):
        raise UserError(f"{text!r} is not an override", "use path=value, for example trainer.max_steps=10")
    options.require_known(text)
    first = re.split(r"\W", text, maxsplit=1)[0]
    if first not in ROOTS:
        hint = did_you_mean(first, list(ROOTS)) or f"the fields are {', '.join(ROOTS)}"
        raise UserError(f"override {text.partition('=')[0]}: the recipe has no field {first!r}", hint)
    override_fields.refuse_misspelt(text)
    if redact_text(text) != text:
        path = text.partition("=")[0]
        raise UserError(
            f"the value of override {path} looks like a secret, and overrides are stored in the run folder",
            "use an environment variable",
        )
