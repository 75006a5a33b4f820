"""What was asked for: a recipe, what is changed in it, its data and its size. Read and refused without NeMo."""

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
"""Fields that are the length of a sample: one that an override sets moves the other."""
OPTION_PATHS = {
    "num_nodes": ("--nodes", ("trainer.num_nodes",)),
    "seq": ("--seq", LENGTHS),
    "gbs": ("--gbs", ("data.global_batch_size",)),
    "batch_tokens": ("--batch-tokens", ("data.global_batch_size",)),
}
"""Field of a request -> its option, and the overrides that say the same."""


MOCK_DATA = "mock data: random tokens of NeMo's MockDataModule, from which nothing is learnt; --data DIR trains on text"


@dataclass(frozen=True)
class Request:
    """A run as a user asks for it. `resolve.resolve` says what it comes to."""

    recipe: str
    overrides: tuple[str, ...] = ()
    """`path=value` and `with=OPTION`, in the order they apply."""
    data: Path | None = None
    """a folder made by `recipes data`; None = mock data"""
    num_nodes: int | None = None
    """None = the recipe's smallest size; one that it does not declare is planned on the spot"""
    gpu: str = ""
    """what a configuration is judged on; "" = its recipe's, and never anything else for a run"""
    seq: int | None = None
    """tokens of a sample; None = the recipe's, or what overrides say"""
    gbs: int | None = None
    """samples of a global batch; None = the recipe's"""
    batch_tokens: int | None = None
    """tokens of a global batch, in place of `gbs`"""
    layout: Layout | None = None
    """a whole layout; None = the recipe's"""
    best_layout: bool = False
    """the planner's fastest layout in place of the recipe's"""
    deferred_data: bool = False
    """a job that the run waits for makes the data folder (requests/deferred.py)"""
    gpus_per_node: int | None = None
    """of one node, where fewer of its GPUs are used than it has"""
    profile: str = ""
    """steps and ranks that are profiled (requests/profile_request.py); "" = none"""

    def facts(self) -> dict[str, Any]:
        """As run.json keeps it; `from_facts` reads it."""
        from superpod.collection import layout_text

        data = str(self.data) if self.data else None
        facts: dict[str, Any] = {"overrides": list(self.overrides), "data": data, "num_nodes": self.num_nodes}
        facts |= {deferred_data.KEY: True} if self.deferred_data else {}
        facts |= {name: value for name in _SIZES if (value := getattr(self, name))}
        facts |= {_REQUESTED_GPUS: self.gpus_per_node} if self.gpus_per_node else {}
        return facts | ({"layout": layout_text.written_fields(self.layout)} if self.layout else {})

    @classmethod
    def from_facts(cls, recipe: str, facts: Mapping[str, Any], gpu: str = "") -> Request:
        """The request that `facts` describe.

        Raises:
            UserError: its layout is none.
        """
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
        """The request of an earlier run, with `more` overrides after its own, and other data where given."""
        request = cls.from_facts(run.recipe, run.facts)
        if request.data and (request.data / deferred_data.FILE).is_file():
            request = replace(request, deferred_data=False)
        paths = {path_of(text) for text in more}
        changed = {name: None for name in ("seq", "gbs", "batch_tokens") if paths & {*OPTION_PATHS[name][1]}}
        return replace(request, overrides=(*request.overrides, *more), data=data or request.data, **changed)

    def sized(self) -> Recipe:
        """The recipe at the size, sequence, batch and layout of the request; of no other subject. Needs no NeMo.

        Raises:
            UserError: no such recipe, or as `sized`.
        """
        from superpod.collection.sizes import sized

        return sized.of_name(self.recipe, self.size())

    def size(self) -> Size:
        """What is asked of the recipe's size, by options or by overrides of a sample's length."""
        from superpod.collection.sizes.sized import Size

        seq = _sample_length(self.overrides) if self.seq is None else self.seq
        size = Size(self.num_nodes, seq, self.gbs, self.batch_tokens, self.layout, self.best_layout)
        return replace(size, gpus_per_node=self.gpus_per_node)

    def job(self) -> PlannedJob:
        """The planner's job of the sized recipe, without what overrides change. Raises UserError as `sized`."""
        from superpod.collection import recipe_job

        return recipe_job.job(self.sized(), self.num_nodes)

    def refuse_illegal(self) -> None:
        """Refuse, before NeMo is imported, a size or sequence that the layout cannot have; overrides may yet mend it.

        Raises:
            UserError: with every rule that it breaks, and the layout that the planner would take.
        """
        from superpod.collection.sizes import better_layout
        from superpod.collection.sizes.sized import SizedRecipe
        from superpod.planner import legality

        recipe = self.sized()
        if not isinstance(recipe, SizedRecipe) or any(path_of(text).startswith(_LAYOUT) for text in self.overrides):
            return
        try:
            legality.require(self.job())
        except UserError as illegal:
            better = better_layout.of(recipe)
            raise UserError(str(illegal), f"--layout auto takes {better}" if better else illegal.hint) from illegal

    def decided(self) -> Request:
        """The request with the layout, the batch and the length that it comes to, in place of how they were asked for:
        a run that continues keeps them, whatever a later planner would choose. Raises UserError as `sized`.
        """
        from superpod.collection.sizes.sized import SizedRecipe

        recipe = self.sized()
        if not isinstance(recipe, SizedRecipe):
            return self
        (nodes,), layout = recipe.nodes, recipe.layout()
        batch = self.gbs or self.batch_tokens
        kept = layout if recipe.planned or self.layout else None
        gbs = layout.gbs if batch or kept else None
        return replace(self, num_nodes=nodes, gbs=gbs, batch_tokens=None, layout=kept, best_layout=False)

    def changes(self) -> tuple[str, ...]:
        """The overrides, and in their form the options that make another run than the one that was proven."""
        seq = (f"data.seq_length={self.seq}",) if self.seq else ()
        layout = ("trainer.strategy.layout",) if self._has_another_layout() else ()
        return (*self.overrides, *seq, *layout)

    def _has_another_layout(self) -> bool:
        """Whether the options of size and layout give another layout than the recipe declares there.

        The global batch alone does not: models are built for a micro-batch.
        """
        from superpod.collection.registry import find

        declared, sized = find(self.recipe), self.sized()
        nodes = sized.nodes[0] if self.num_nodes is None else self.num_nodes
        if nodes not in declared.layouts or sized.gpus_per_node != declared.gpus_per_node:
            return True
        layout = sized.layout(nodes)
        return layout != replace(declared.layouts[nodes], gbs=layout.gbs)

    def notes(self) -> list[str]:
        """What to know of the size and the steps that were asked for, a line each. Raises as `sized`."""
        from superpod.collection.sizes.sized import SizedRecipe
        from superpod.nemo2.build import schedule

        recipe = self.sized()
        shortened = schedule.notes(recipe.schedule.warmup_steps, self.overrides)
        if not isinstance(recipe, SizedRecipe):
            return shortened
        batch = any(text.startswith("data.global_batch_size") for text in self.overrides)
        return [*(n for n in recipe.notes if not (batch and n.startswith("tokens a step"))), *shortened]

    @property
    def mock_data_notes(self) -> list[str]:
        """What to say of a training that was given no data; [] where it was."""
        return [MOCK_DATA] if self.data is None else []

    def check(self, *, any_subject: bool = False) -> None:
        """Refuse what can be refused before NeMo is imported.

        Args:
            any_subject: take files and NeMo's own recipes too, as `subject` reads them.

        Raises:
            UserError: no such recipe or size, no override, a value that its field cannot have, a secret, or a data
                folder that is not complete.
        """
        from superpod.data.folder import DataFolder
        from superpod.nemo2 import validation as rules
        from superpod.nemo2.validation import values
        from superpod.requests import subject

        if subject.subject_kind(self.recipe) != "recipe" and not any_subject:
            raise UserError(
                f"{self.recipe!r} is no recipe of `recipes list`",
                "`recipes check` and `recipes rehearse` take files and NeMo's recipes; a file runs by itself: its top",
            )
        for override in self.overrides:
            _check_override(override)
        self._check_contradictions()
        subject.check(self)
        rules.require(list(values.of_text(self.overrides)))
        if self.data and not self.deferred_data:
            DataFolder.load(self.data)

    def _check_contradictions(self) -> None:
        """Refuse an option and an override, or two overrides, that give one value of the run twice and differently."""
        given = {path_of(text): text for text in self.overrides}
        for name, (option, paths) in OPTION_PATHS.items():
            value = getattr(self, name)
            for path in paths:
                if value is not None and path in given and _assigned_count(given[path]) != value:
                    raise UserError(
                        f"{option} {value} and {given[path]} contradict each other: both say it of one run",
                        "leave one of the two out",
                    )
        lengths = {path: number for path in LENGTHS if path in given and (number := _assigned_count(given[path]))}
        if len({*lengths.values()}) > 1:
            one, other = (f"{path} is {number}" for path, number in lengths.items())
            raise UserError(
                f"{one}, and {other}: a sample has one length", f"--seq {lengths['data.seq_length']} sets both"
            )


_SIZES = ("seq", "gbs", "batch_tokens", "best_layout", "profile")
_REQUESTED_GPUS = "requested_gpus_per_node"  # not the `gpus_per_node` of run.json: what the run has, asked for or not
"""Facts that run.json has only where they were asked for."""


_LAYOUT = ("trainer.", "data.micro_batch_size", "data.global_batch_size", "model.config", "with", "optim")
"""Overrides that begin so may make a layout legal."""


def _assigned_count(override: str) -> int | None:
    """The whole number that a plain `path=N` sets; None for anything else."""
    from superpod.nemo2.validation import values

    plain = values.assignment(override)
    number = values.literal(plain[1]) if plain else None
    return number if type(number) is int and 0 <= number < 10**12 else None


def _sample_length(overrides: Sequence[str]) -> int | None:
    """The length of a sample that overrides set, where they set one number; None where they do not."""
    numbers = {_assigned_count(text) for text in overrides if path_of(text) in LENGTHS}
    return numbers.pop() if len(numbers) == 1 else None


ROOTS = ("model", "data", "trainer", "log", "resume", "optim", "peft", "tokenizer", "model_transform", "with")
"""What an override may begin with: the arguments of `llm.pretrain` and `llm.finetune`, and `with=`."""


def _check_override(text: str) -> None:
    from superpod.collection.facts import override_fields
    from superpod.common.redaction import redact_text
    from superpod.nemo2 import options

    if not re.match(r"[A-Za-z_][\w.\[\]]*\W*=", text):
        raise UserError(f"{text!r} is not an override", "write path=value, such as trainer.max_steps=10")
    options.require_known(text)
    first = re.split(r"\W", text, maxsplit=1)[0]
    if first not in ROOTS:
        hint = did_you_mean(first, list(ROOTS)) or f"they are {', '.join(ROOTS)}"
        raise UserError(f"override {text.partition('=')[0]}: the recipe has no field {first!r}", hint)
    override_fields.refuse_misspelt(text)
    if redact_text(text) != text:
        path = text.partition("=")[0]
        raise UserError(f"override {path} looks like a secret, and run folders keep overrides", "use the environment")
