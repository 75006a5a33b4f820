"""Rehearses a recipe: trains it on CPUs, shrunk but in its own layout, and compares it with one rank.

The runs, all on the same text and from the same weights:

    one        one rank in fp32; it draws the weights, and saves them before its first step
    fp32       the recipe's layout in fp32, for a few steps; its losses must be those of `one` to the last digits
    own        the recipe's layout and precision, all steps; it saves in the middle
    resumed    the same from that checkpoint on; its losses must be those of `own`
    resharded  one rank from that checkpoint's weights; its loss must be the next one of `own`. With Megatron-FSDP also
               from its optimizer, which that format reshards; its losses must be the next two
    dropout    `own` with the recipe's dropout, where it has any; one rank would draw other masks, and all
               other runs go without. It must learn, its losses must differ from those of `own`, and replicas must agree

With adapters, `base` comes first: one rank draws the weights of the model without them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.planner.layout import MEGATRON_FSDP
from superpod.planner.planned_job import PlannedJob
from superpod.rehearsal.check_result import CheckResult
from superpod.rehearsal.comparison import verdict
from superpod.rehearsal.errors import RehearsalError
from superpod.rehearsal.training import forked_run, shrunk_recipe
from superpod.rehearsal.training.cpu_recipe import Change, rehearse
from superpod.rehearsal.training.forked_run import FinishedRun
from superpod.rehearsal.training.shrink import RANKS, Shrunk, shrink
from superpod.requests.request import Request
from superpod.runtime.checkpoints import checkpoint_metadata

if TYPE_CHECKING:
    from nemo_run import Partial

FP32_STEPS = 3
"""Steps of the layout in fp32: the first loss tests the forward pass, the second the gradients, the third Adam."""
CANNOT_SHOW = "FP8 and FP4 numerics, GPU kernels, NCCL and its hangs, memory, speed"


@dataclass
class Trial:
    """A rehearsal and its results."""

    request: Request
    nodes: int
    shrunk: Shrunk
    precision: str
    dropouts: dict[str, float] = field(default_factory=dict)
    """{path: share}: those of the configuration, which only the run `dropout` keeps."""
    changes: list[Change] = field(default_factory=list)
    """Settings that changed, except the sizes."""
    runs: dict[str, FinishedRun] = field(default_factory=dict)
    checks: list[CheckResult] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each run, and of what came before them."""

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return self.request.recipe

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def dropped(self) -> dict[str, str]:
        """GPU-only settings that the ranks switched off: {field: the recipe's value}."""
        return next((run.ranks[0]["dropped"] for run in reversed(self.runs.values()) if run.ranks), {})


def plan(name: str, nodes: int | None, ranks: int = RANKS, overrides: Sequence[str] = ()) -> Trial:
    """`plan_request` of a name at a size with overrides."""
    return plan_request(Request(name, tuple(overrides), None, nodes), ranks)


def plan_request(request: Request, ranks: int = RANKS) -> Trial:
    """The rehearsal of a recipe, a file or NeMo's own recipe, not yet run.

    Needs no NeMo for a recipe in which nothing is overridden. A file is executed: plan it in a process of its own.

    Raises:
        UserError: no such recipe, size or file, a wrong override, or a recipe that cannot be rehearsed.
    """
    from superpod.requests import subject

    request.check(any_subject=True)
    if subject.subject_kind(request.recipe) == "recipe":
        _refuse_what_cannot(request.recipe)
    size, job = _size_and_job(request)
    return Trial(request, size, shrink(job, ranks), job.precision)


def _refuse_what_cannot(name: str) -> None:
    from superpod.collection.registry import find

    recipe = find(name)
    if recipe.model.unproven:
        raise RehearsalError(f"{name} cannot be rehearsed: {recipe.model.unproven}")
    if recipe.model.family == "encoders":
        raise RehearsalError(f"{name} cannot be rehearsed: {recipe.model.name} predicts no next token")


def _size_and_job(request: Request) -> tuple[int, PlannedJob]:
    """Nodes and the job to shrink: by the recipe's facts, or by what overrides make of it, which NeMo has to build."""
    from superpod.requests import subject

    if subject.subject_kind(request.recipe) == "recipe" and not request.overrides:
        return request.num_nodes or request.sized().nodes[0], request.job()
    import superpod.rehearsal.entry  # noqa: F401 - the patches, before NeMo
    from superpod.requests.resolve import resolve

    run = resolve(request)
    return run.nodes, run.job


def conduct(trial: Trial, folder: Path, steps: int = 10, note: Callable[[str], None] = lambda _: None) -> Trial:
    """Run the rehearsal in `folder` and judge it. Imports NeMo, and patches it in this process.

    Args:
        trial: from `plan`.
        folder: an empty folder; checkpoints and logs of all runs stay there.
        steps: of training, 4 or more.
        note: called with the name of each run as it starts.
    """
    started = time.time()
    note("importing NeMo")
    import superpod.rehearsal.entry  # noqa: F401 - the patches, before NeMo
    from superpod.requests.resolve import build_configuration

    full, _ = build_configuration(trial.request)
    trial.seconds["import and build"] = time.time() - started
    runs = _Runs(trial, full, folder, steps)
    for name, start in runs.in_order():
        note(name)
        trial.runs[name] = run = start()
        trial.seconds[name] = run.seconds
        if name == "own" and not run.error:
            trial.checks.append(runs.checkpoint_check())
        if run.error or not all(check.passed for check in trial.checks):
            break
    trial.checks += verdict.checks(trial, steps)
    return trial


class _Runs:
    """The runs of one trial."""

    def __init__(self, trial: Trial, full: Partial, folder: Path, steps: int) -> None:
        self.trial, self.folder, self.steps = trial, folder, steps
        self.middle = steps // 2
        job = trial.shrunk.job
        self.ranks = job.gpus
        self.recipe = shrunk_recipe.shrunk_recipe(full, job)
        trial.dropouts = shrunk_recipe.dropouts(full)
        text = folder / "text" / "text"
        shrunk_recipe.write_text(text, job.model.vocab, job.seq, job.layout.gbs * (steps + 1))
        trial.changes += shrunk_recipe.train_briefly(self.recipe, steps, text, job.model.vocab, self.middle)
        self.weights = folder / "start"  # NeMo saves the weights in a folder "weights" below it
        self.middle_checkpoint = folder / "own" / "checkpoints" / f"step={self.middle - 1}"

    @property
    def is_fsdp(self) -> bool:
        """Whether Megatron-FSDP shards the layout."""
        return self.trial.shrunk.job.layout.sharding in MEGATRON_FSDP

    @property
    def has_adapters(self) -> bool:
        return getattr(self.recipe, "peft", None) is not None

    def in_order(self) -> Iterator[tuple[str, Callable[[], FinishedRun]]]:
        """Each run's name and how to start it, in order."""
        if self.has_adapters:
            yield "base", self._base
        yield "one", self._one
        if self.trial.precision != "fp32":
            yield "fp32", self._fp32
        yield "own", self._own
        yield "resumed", self._resumed
        yield "resharded", self._resharded
        if self.trial.dropouts:
            yield "dropout", self._dropout

    def _base(self) -> FinishedRun:
        """Draw the weights of the model without its adapters."""
        import fiddle as fdl
        from nemo.collections import llm

        base = self._on_one_rank()
        shrunk_recipe.in_fp32(base)
        base.peft, base.resume.restore_config = None, None
        fdl.update_callable(base, llm.pretrain, drop_invalid_args=True)
        base.trainer.max_steps = 1
        return self._run("base", base, 1, save=True)

    def _one(self) -> FinishedRun:
        one = self._on_one_rank()
        shrunk_recipe.in_fp32(one)
        if self.weights.exists():
            self._start_from_weights(one)
            return self._run("one", one, 1)
        one.resume.restore_config = None
        return self._run("one", one, 1, save=True)

    def _fp32(self) -> FinishedRun:
        run = copy.deepcopy(self.recipe)
        shrunk_recipe.in_fp32(run)
        run.trainer.max_steps = FP32_STEPS
        self._start_from_weights(run)
        return self._run("fp32", run, self.ranks)

    def _own(self) -> FinishedRun:
        run = copy.deepcopy(self.recipe)
        self._start_from_weights(run)
        return self._run("own", run, self.ranks)

    def _resumed(self) -> FinishedRun:
        run = copy.deepcopy(self.recipe)
        self._resume(run)
        return self._run("resumed", run, self.ranks)

    def _resharded(self) -> FinishedRun:
        from superpod.nemo2.build.layout import FSDP

        tp = self.trial.shrunk.job.layout.tp if self.is_fsdp and self.trial.shrunk.job.model.experts else 1
        run = self._on_one_rank(fsdp=self.is_fsdp, tp=tp)  # no other format has its shards
        self._resume(run)
        if self.is_fsdp:  # on one rank NeMo's callback overlaps no gradients, which ZeRO-2 requires
            run.trainer.strategy.ddp.data_parallel_sharding_strategy = FSDP["zero3"]
        run.trainer.strategy.ckpt_load_optimizer = self.is_fsdp  # other shards fit no other layout by default
        run.trainer.max_steps = self.middle + 1 + self.is_fsdp  # the second step's loss is the optimizer's
        return self._run("resharded", run, tp)

    def _dropout(self) -> FinishedRun:
        run = copy.deepcopy(self.recipe)
        shrunk_recipe.set_dropouts(run, self.trial.dropouts)
        self._start_from_weights(run)
        return self._run("dropout", run, self.ranks)

    def checkpoint_check(self) -> CheckResult:
        """Whether the checkpoint in the middle holds the trained parameters: the model's, or its adapters'."""
        part, noun = (".adapter.", "matrices of adapters") if self.has_adapters else (".weight", "weights")
        names = [name for name in checkpoint_metadata.read(self.middle_checkpoint).model if part in name]
        return CheckResult("saved", bool(names), f"{len(names)} {noun} are in the checkpoint")

    def _resume(self, partial: Partial) -> None:
        """Resume from the newest checkpoint of a folder, as a later attempt does; here the one in the middle."""
        newest = self.folder / "newest"
        newest.mkdir(exist_ok=True)
        link = newest / f"{self.middle_checkpoint.name}-last"
        if not link.exists():
            link.symlink_to(self.middle_checkpoint)
        partial.resume.resume_from_directory = str(newest)
        self._start_from_weights(partial)  # the recipe's own setting; NeMo prefers the newer checkpoint

    def _on_one_rank(self, *, fsdp: bool = False, tp: int = 1) -> Partial:
        """The shrunk recipe on one rank, with the same global batch, and with Megatron-FSDP only where asked for.

        On `tp` ranks where a checkpoint cannot change its tensor parallelism: see `resume_layout.py`.
        """
        one = copy.deepcopy(self.recipe)
        layout = self.trial.shrunk.job.layout
        degrees = {name: 1 for name in ("pp", "cp", "ep")} | {"tp": tp, "vp": None, "sp": layout.sp and tp > 1}
        degrees["etp"] = layout.etp if tp > 1 else None
        stages = {"chunks": None, "first_layers": None, "last_layers": None}
        ends = {"embedding_as_layer": False, "loss_as_layer": False}
        shrunk_recipe.place(one, layout.replace(**degrees, **stages, **ends), tp)
        one.trainer.strategy.num_distributed_optimizer_instances = 1
        if self.is_fsdp and not fsdp:
            shrunk_recipe.without_fsdp(one)
        for change in shrunk_recipe.weaken_balance(one, layout.cp):
            if change not in self.trial.changes:
                self.trial.changes.append(change)
        return one

    def _start_from_weights(self, partial: Partial) -> None:
        import nemo_run as run
        from nemo import lightning as nl

        if partial.trainer.strategy.fsdp:
            from superpod.rehearsal.training.first_weights import FirstWeights

            partial.trainer.callbacks = [*partial.trainer.callbacks, run.Config(FirstWeights, str(self.weights))]
            return
        partial.resume.restore_config = run.Config(
            nl.RestoreConfig, path=str(self.weights), load_optim_state=False, load_artifacts=False
        )

    def _run(self, name: str, partial: Partial, ranks: int, *, save: bool = False) -> FinishedRun:
        import nemo_run as run

        from superpod.rehearsal.training.recorder import Recorder

        folder = self.folder / name
        partial.log.explicit_log_dir = str(folder)
        partial.log.ckpt.dirpath = str(folder / "checkpoints")
        if name != "own":
            partial.log.ckpt.every_n_train_steps = 10 * self.steps  # that is never
        weights = str(self.weights) if save else ""
        if save:  # before the first step: there are no moments yet, which one of the formats takes for granted
            partial.trainer.strategy.ckpt_save_optimizer = False
        partial.trainer.callbacks = [
            *partial.trainer.callbacks,
            run.Config(Recorder, folder=str(folder / "ranks"), weights=weights, resharded=name == "resharded"),
        ]
        rehearsal, changes = rehearse(partial, devices=ranks)
        if name == "own":
            self.trial.changes += changes
        return forked_run.run(name, rehearsal, folder / "ranks", ranks)


def facts(trial: Trial) -> dict[str, Any]:
    """The rehearsal as JSON: `recipes rehearse --json`."""
    job = trial.shrunk.job
    return {
        "recipe": trial.recipe,
        "nodes": trial.nodes,
        "ranks": job.gpus,
        "topology": trial.shrunk.topology,
        "passed": trial.passed,
        "shrunk": {size.name: [size.old, size.new] for size in trial.shrunk.sizes},
        "dropped": trial.dropped,
        "dropouts": trial.dropouts,
        "checks": [vars(check) for check in trial.checks],
        "losses": {name: run.losses for name, run in trial.runs.items()},
        "seconds": {name: round(seconds, 1) for name, seconds in trial.seconds.items()},
    }
