"""A recipe rehearsed: its shrunk self trained on CPUs in its own layout, and held against one rank.

The runs, all on the same text and from the same weights:

    one        one rank in fp32; it draws the weights, and saves them before its first step
    fp32       the recipe's layout in fp32, for a few steps: the losses of `one`, to the last digits
    own        the recipe's layout and precision, all steps; it saves in the middle
    resumed    the same from that checkpoint on: the losses of `own`
    resharded  one rank takes that checkpoint's weights: the next loss of `own`
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from superpod.lifecycle import checkpoint_metadata
from superpod.rehearsal import forks, resize, verdict
from superpod.rehearsal.check import Check
from superpod.rehearsal.convert import Change, RehearsalError, rehearse
from superpod.rehearsal.forks import FinishedRun
from superpod.rehearsal.shrink import RANKS, Shrunk, shrink

FP32_STEPS = 3
"""Steps of the recipe's layout in fp32: the first has the forward pass, the second the gradients, the third Adam's."""
CANNOT_SHOW = "FP8 and FP4 numerics, GPU kernels, NCCL and its hangs, memory, speed"


@dataclass
class Trial:
    """A rehearsal, and how it went."""

    recipe: str
    nodes: int
    shrunk: Shrunk
    precision: str
    changes: list[Change] = field(default_factory=list)
    """What was changed beside the sizes."""
    runs: dict[str, FinishedRun] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went."""

    @property
    def passed(self) -> bool:
        """Whether all checks did."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def dropped(self) -> dict[str, str]:
        """GPU-only settings that the ranks switched off: {field: the recipe's value}."""
        return next((run.ranks[0]["dropped"] for run in reversed(self.runs.values()) if run.ranks), {})


def plan(name: str, nodes: int | None, ranks: int = RANKS) -> Trial:
    """What would be rehearsed, without NeMo.

    Raises:
        UserError: no such recipe or size, or one that cannot be rehearsed.
    """
    from superpod.recipes import planned_job
    from superpod.recipes.registry import find

    recipe = find(name)
    size = recipe.nodes[0] if nodes is None else nodes
    recipe.layout(size)
    if recipe.model.unproven:
        raise RehearsalError(f"{name} cannot be rehearsed: {recipe.model.unproven}")
    if recipe.model.family == "encoders":
        raise RehearsalError(f"{name} cannot be rehearsed: {recipe.model.name} predicts no next token")
    return Trial(name, size, shrink(planned_job.job(recipe, size), ranks), recipe.precision)


def conduct(trial: Trial, folder: Path, steps: int = 10, note: Callable[[str], None] = lambda _: None) -> Trial:
    """Run the rehearsal in `folder` and judge it. Imports NeMo, and patches it in this process.

    Args:
        trial: from `plan`.
        folder: an empty folder; checkpoints and logs of all runs stay there.
        steps: of training, 4 or more.
        note: called with what is being done.
    """
    started = time.time()
    note("importing NeMo")
    import superpod.rehearsal.entry  # noqa: F401 - the patches, before NeMo
    from superpod.recipes import build

    full = build(trial.recipe, trial.nodes)
    trial.seconds["import and build"] = time.time() - started
    stage = _Stage(trial, full, folder, steps)
    for name, run in stage.runs():
        note(name)
        trial.runs[name] = ended = run()
        trial.seconds[name] = ended.seconds
        if name == "own" and not ended.error:
            trial.checks.append(stage.saved())
        if ended.error or not all(check.passed for check in trial.checks):
            break
    trial.checks += verdict.of(trial, steps)
    return trial


class _Stage:
    """The runs of one trial."""

    def __init__(self, trial: Trial, full: Any, folder: Path, steps: int) -> None:
        self.trial, self.folder, self.steps = trial, folder, steps
        self.middle = steps // 2
        planned_job = trial.shrunk.job
        self.ranks = planned_job.gpus
        self.own = resize.resize(full, planned_job)
        text = folder / "text" / "text"
        resize.write_text(text, planned_job.model.vocab, planned_job.seq, planned_job.layout.gbs * (steps + 1))
        trial.changes += resize.train_briefly(self.own, steps, text, planned_job.model.vocab, self.middle)
        self.weights = folder / "start"  # not "weights": NeMo adds that

    def runs(self) -> Iterator[tuple[str, Callable[[], FinishedRun]]]:
        """Each run's name and how to start it, in order."""
        if getattr(self.own, "peft", None) is not None:
            yield "base", self._base
        yield "one", self._one
        if self.trial.precision != "fp32":
            yield "fp32", self._fp32
        yield "own", self._own
        yield "resumed", self._resumed
        yield "resharded", self._resharded

    def _base(self) -> FinishedRun:
        """The model without its adapters, for its weights."""
        import fiddle as fdl
        from nemo.collections import llm

        base = self._single(self.own)
        resize.in_fp32(base)
        base.peft, base.resume.restore_config = None, None
        fdl.update_callable(base, llm.pretrain, drop_invalid_args=True)
        base.trainer.max_steps = 1
        return self._run("base", base, 1, save=True)

    def _one(self) -> FinishedRun:
        one = self._single(self.own)
        resize.in_fp32(one)
        if self.weights.exists():
            self._start_from_weights(one)
            return self._run("one", one, 1)
        one.resume.restore_config = None
        return self._run("one", one, 1, save=True)

    def _fp32(self) -> FinishedRun:
        run = copy.deepcopy(self.own)
        resize.in_fp32(run)
        run.trainer.max_steps = FP32_STEPS
        self._start_from_weights(run)
        return self._run("fp32", run, self.ranks)

    def _own(self) -> FinishedRun:
        run = copy.deepcopy(self.own)
        self._start_from_weights(run)
        return self._run("own", run, self.ranks)

    def _resumed(self) -> FinishedRun:
        run = copy.deepcopy(self.own)
        self._go_on(run)
        return self._run("resumed", run, self.ranks)

    def _resharded(self) -> FinishedRun:
        run = self._single(self.own)
        self._go_on(run)
        run.trainer.strategy.ckpt_load_optimizer = False  # its shards fit no other layout by default
        run.trainer.max_steps = self.middle + 1
        return self._run("resharded", run, 1)

    def saved(self) -> Check:
        """Whether the checkpoint in the middle holds what was trained: the model, or its adapters."""
        checkpoint = self.folder / "own" / "checkpoints" / f"step={self.middle - 1}"
        wanted = ".adapter." if getattr(self.own, "peft", None) is not None else ".weight"
        held = [name for name in checkpoint_metadata.read(checkpoint).model if wanted in name]
        what = "matrices of adapters" if "adapter" in wanted else "weights"
        return Check("saved", bool(held), f"{len(held)} {what} are in the checkpoint")

    def _go_on(self, partial: Any) -> None:
        """Resume as a later link does: from the newest checkpoint of a folder. Here that is the one in the middle."""
        newest = self.folder / "newest"
        newest.mkdir(exist_ok=True)
        link = newest / f"step={self.middle - 1}-last"
        if not link.exists():
            link.symlink_to(self.folder / "own" / "checkpoints" / f"step={self.middle - 1}")
        partial.resume.resume_from_directory = str(newest)
        self._start_from_weights(partial)  # as the recipe says; what was saved later takes precedence

    def _single(self, partial: Any) -> Any:
        """On one rank, with the same global batch."""
        one = copy.deepcopy(partial)
        layout = self.trial.shrunk.job.layout
        alone = {name: 1 for name in ("tp", "pp", "cp", "ep")} | {"vp": None, "etp": None, "sp": False, "chunks": None}
        ends = {"first_layers": None, "last_layers": None, "embedding_as_layer": False, "loss_as_layer": False}
        resize.place(one, layout.replace(**alone, **ends), 1)
        for change in resize.weaken_balance(one, layout.cp):
            if change not in self.trial.changes:
                self.trial.changes.append(change)
        return one

    def _start_from_weights(self, partial: Any) -> None:
        import nemo_run as run
        from nemo import lightning as nl

        partial.resume.restore_config = run.Config(
            nl.RestoreConfig, path=str(self.weights), load_optim_state=False, load_artifacts=False
        )

    def _run(self, name: str, partial: Any, ranks: int, *, save: bool = False) -> FinishedRun:
        import nemo_run as run

        from superpod.rehearsal.witness import Witness

        folder = self.folder / name
        partial.log.explicit_log_dir = str(folder)
        partial.log.ckpt.dirpath = str(folder / "checkpoints")
        if name != "own":
            partial.log.ckpt.every_n_train_steps = 10 * self.steps
        weights = str(self.weights) if save else ""
        partial.trainer.callbacks = [
            *partial.trainer.callbacks,
            run.Config(Witness, folder=str(folder / "ranks"), weights=weights, resharded=name == "resharded"),
        ]
        rehearsal, changes = rehearse(partial, devices=ranks)
        if name == "own":
            self.trial.changes += changes
        return forks.run(name, rehearsal, folder / "ranks", ranks)


def facts(trial: Trial) -> dict[str, Any]:
    """What a program wants to know of a rehearsal."""
    job = trial.shrunk.job
    return {
        "recipe": trial.recipe,
        "nodes": trial.nodes,
        "ranks": job.gpus,
        "topology": trial.shrunk.topology,
        "passed": trial.passed,
        "shrunk": {each.what: [each.old, each.new] for each in trial.shrunk.sizes},
        "dropped": trial.dropped,
        "checks": [vars(check) for check in trial.checks],
        "losses": {name: run.losses for name, run in trial.runs.items()},
        "seconds": {name: round(seconds, 1) for name, seconds in trial.seconds.items()},
    }
