"""Rehearses a recipe: trains a smaller model on CPUs in the recipe's own layout, and compares it with one rank.

All runs train on the same text and start from the same weights:

    one        one rank in fp32; it initializes the weights and saves them before its first step
    fp32       the recipe's layout in fp32, for a few steps; its losses must equal those of `one` up to rounding
    own        the recipe's layout and precision, all steps; it saves a checkpoint halfway
    resumed    resumes from that checkpoint; its losses must equal those of `own`
    resharded  one rank with the weights of that checkpoint; its loss must equal the next loss of `own`. With
               Megatron-FSDP it also loads the optimizer, which that format reshards: the next two losses must be equal
    dropout    `own` with the recipe's dropout, if it has any. One rank would draw different masks, so all other runs
               train without dropout. The loss must decrease and differ from that of `own`, and replicas must be equal

With adapters, `base` runs first: one rank initializes the weights of the model without adapters.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.planner.layout import MEGATRON_FSDP
from superpod.planner.planned_job import PlannedJob
from superpod.rehearsal.comparison import CheckResult, compare_runs
from superpod.rehearsal.errors import RehearsalError
from superpod.rehearsal.training import forked_run, shrunk_recipe
from superpod.rehearsal.training.cpu_recipe import Change, rehearse
from superpod.rehearsal.training.forked_run import FinishedRun
from superpod.rehearsal.training.shrink import RANKS, ShrunkJob, shrink
from superpod.requests.request import Request
from superpod.runtime.checkpoints import checkpoint_metadata

if TYPE_CHECKING:
    from nemo_run import Partial

FP32_STEPS = 3
"""Number of steps in FP32: the first loss tests the forward pass, the second the gradients, the third Adam."""
CANNOT_SHOW = "FP8 and FP4 numerics, GPU kernels, NCCL and its hangs, memory, speed"


@dataclass
class Rehearsal:
    """A rehearsal and its results."""

    request: Request
    nodes: int
    shrunk: ShrunkJob
    precision: str
    dropouts: dict[str, float] = field(default_factory=dict)
    """{path in the recipe: probability}; used only by the run `dropout`."""
    changes: list[Change] = field(default_factory=list)
    """Settings of the recipe that the rehearsal changes, other than sizes."""
    runs: dict[str, FinishedRun] = field(default_factory=dict)
    """Finished runs by the names listed above."""
    checks: list[CheckResult] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each run, and of importing NeMo and building the recipe."""

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return self.request.recipe

    @property
    def passed(self) -> bool:
        """Whether there are checks, and all of them passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def dropped(self) -> dict[str, str]:
        """GPU-only settings that the ranks switched off: {field: the recipe's value}."""
        for run in reversed(self.runs.values()):
            if run.ranks:
                return run.ranks[0]["dropped"]
        return {}


def plan_rehearsal(request: Request, ranks: int = RANKS) -> Rehearsal:
    """Shrink the job of a recipe, a user's file or a NeMo recipe for a rehearsal, without running it.

    Does not import NeMo for a recipe without overrides. A file is executed: use a separate process for files.

    Args:
        request: the recipe, its size and overrides.
        ranks: maximum number of processes.

    Raises:
        UserError: there is no such recipe, size or file, an override is invalid, or the recipe cannot be rehearsed.
    """
    from superpod.requests import subject

    request.check(any_subject=True)
    if subject.subject_kind(request.recipe) == "recipe":
        _require_supported(request.recipe)
    nodes, job = _find_job(request)
    return Rehearsal(request, nodes, shrink(job, ranks), job.precision)


def _require_supported(name: str) -> None:
    from superpod.collection.registry import find

    model = find(name).model
    if model.unproven:
        raise RehearsalError(f"{name} cannot be rehearsed: {model.unproven}")
    if model.family == "encoders":
        raise RehearsalError(f"{name} cannot be rehearsed: {model.name} is not a causal language model")


def _find_job(request: Request) -> tuple[int, PlannedJob]:
    """Return the number of nodes and the planned job; with overrides, from the configuration that NeMo builds."""
    from superpod.requests import subject

    if subject.subject_kind(request.recipe) == "recipe" and not request.overrides:
        return request.num_nodes or request.sized_recipe().nodes[0], request.job()
    import superpod.rehearsal.entry  # noqa: F401 - applies the patches, before NeMo is imported
    from superpod.requests.resolve import resolve

    run = resolve(request)
    return run.nodes, run.job


def run_rehearsal(
    rehearsal: Rehearsal, folder: Path, steps: int = 10, note: Callable[[str], None] = lambda _: None
) -> Rehearsal:
    """Execute the runs and checks of a rehearsal. Imports NeMo and patches it in this process.

    Args:
        rehearsal: the result of `plan_rehearsal`; its runs, checks and changes are added to it, and it is returned.
        folder: an empty folder for the checkpoints and logs of all runs.
        steps: training steps, at least 4.
        note: called with the name of each run as it starts.
    """
    start_time = time.time()
    note("importing NeMo")
    import superpod.rehearsal.entry  # noqa: F401 - applies the patches, before NeMo is imported
    from superpod.requests.resolve import build_configuration

    full, _ = build_configuration(rehearsal.request)
    rehearsal.seconds["import and build"] = time.time() - start_time

    runs = _Runs(rehearsal, full, folder, steps)
    for name, start in runs.list_runs():
        note(name)
        run = start()
        rehearsal.runs[name] = run
        rehearsal.seconds[name] = run.seconds
        if name == "own" and not run.error:
            rehearsal.checks.append(runs.check_checkpoint())
        if run.error or not all(check.passed for check in rehearsal.checks):
            break
    rehearsal.checks += compare_runs.compare_runs(rehearsal, steps)
    return rehearsal


class _Runs:
    """Starts the runs of one rehearsal."""

    def __init__(self, rehearsal: Rehearsal, full: Partial, folder: Path, steps: int) -> None:
        self.rehearsal, self.folder, self.steps = rehearsal, folder, steps
        self.middle = steps // 2
        self.job = rehearsal.shrunk.job
        self.ranks = self.job.gpus
        self.recipe = shrunk_recipe.build_shrunk_recipe(full, self.job)
        rehearsal.dropouts = shrunk_recipe.find_dropouts(full)

        text, vocab = folder / "text" / "text", self.job.model.vocab
        shrunk_recipe.write_text(text, vocab, self.job.seq, self.job.layout.gbs * (steps + 1))
        rehearsal.changes += shrunk_recipe.set_short_training(self.recipe, steps, text, vocab, self.middle)
        self.weights = folder / "start"  # NeMo saves the weights in a subfolder "weights"
        self.middle_checkpoint = folder / "own" / "checkpoints" / f"step={self.middle - 1}"

    @property
    def is_fsdp(self) -> bool:
        """Whether Megatron-FSDP shards the layout."""
        return self.job.layout.sharding in MEGATRON_FSDP

    @property
    def has_adapters(self) -> bool:
        return getattr(self.recipe, "peft", None) is not None

    def list_runs(self) -> Iterator[tuple[str, Callable[[], FinishedRun]]]:
        """Yield the name of each run and the function that executes it, in order."""
        if self.has_adapters:
            yield "base", self._run_base
        yield "one", self._run_one
        if self.rehearsal.precision != "fp32":
            yield "fp32", self._run_fp32
        yield "own", self._run_own
        yield "resumed", self._run_resumed
        yield "resharded", self._run_resharded
        if self.rehearsal.dropouts:
            yield "dropout", self._run_dropout

    def _run_base(self) -> FinishedRun:
        """Initialize and save the weights of the model without its adapters."""
        import fiddle as fdl
        from nemo.collections import llm

        base = self._build_one_rank_recipe()
        shrunk_recipe.set_fp32(base)
        base.peft, base.resume.restore_config = None, None
        fdl.update_callable(base, llm.pretrain, drop_invalid_args=True)
        # The weights are saved before the first step.
        base.trainer.max_steps = 1
        return self._run("base", base, 1, save=True)

    def _run_one(self) -> FinishedRun:
        one_rank_recipe = self._build_one_rank_recipe()
        shrunk_recipe.set_fp32(one_rank_recipe)
        if self.weights.exists():
            self._start_from_weights(one_rank_recipe)
            return self._run("one", one_rank_recipe, 1)
        one_rank_recipe.resume.restore_config = None
        return self._run("one", one_rank_recipe, 1, save=True)

    def _run_fp32(self) -> FinishedRun:
        run = copy.deepcopy(self.recipe)
        shrunk_recipe.set_fp32(run)
        run.trainer.max_steps = FP32_STEPS
        self._start_from_weights(run)
        return self._run("fp32", run, self.ranks)

    def _run_own(self) -> FinishedRun:
        run = copy.deepcopy(self.recipe)
        self._start_from_weights(run)
        return self._run("own", run, self.ranks)

    def _run_resumed(self) -> FinishedRun:
        run = copy.deepcopy(self.recipe)
        self._resume(run)
        return self._run("resumed", run, self.ranks)

    def _run_resharded(self) -> FinishedRun:
        from superpod.nemo2.build.layout import FSDP

        # Megatron-FSDP's shards can be read only in its own format, and with experts only with the same TP.
        tp = self.job.layout.tp if self.is_fsdp and self.job.model.experts else 1
        run = self._build_one_rank_recipe(fsdp=self.is_fsdp, tp=tp)
        self._resume(run)
        run.trainer.max_steps = self.middle + 1
        run.trainer.strategy.ckpt_load_optimizer = False  # other formats cannot be resharded by default
        if self.is_fsdp:
            # On one rank, NeMo's callback does not overlap gradient reduction, which ZeRO-2 requires.
            run.trainer.strategy.ddp.data_parallel_sharding_strategy = FSDP["zero3"]
            run.trainer.strategy.ckpt_load_optimizer = True
            run.trainer.max_steps += 1  # the loss of the second step depends on the optimizer
        return self._run("resharded", run, tp)

    def _run_dropout(self) -> FinishedRun:
        run = copy.deepcopy(self.recipe)
        shrunk_recipe.set_dropouts(run, self.rehearsal.dropouts)
        self._start_from_weights(run)
        return self._run("dropout", run, self.ranks)

    def check_checkpoint(self) -> CheckResult:
        """Check that the checkpoint contains the trained parameters: the model's, or those of its adapters."""
        substring, noun = (".adapter.", "adapter matrices") if self.has_adapters else (".weight", "weights")
        names = [name for name in checkpoint_metadata.read(self.middle_checkpoint).model if substring in name]
        return CheckResult("saved", bool(names), f"{len(names)} {noun} are in the checkpoint")

    def _resume(self, partial: Partial) -> None:
        """Set a recipe to resume from the checkpoint that `own` saved halfway: the newest one of a folder."""
        newest_link = self.folder / "newest"
        newest_link.mkdir(exist_ok=True)
        link = newest_link / f"{self.middle_checkpoint.name}-last"
        if not link.exists():
            link.symlink_to(self.middle_checkpoint)
        partial.resume.resume_from_directory = str(newest_link)
        self._start_from_weights(partial)  # as set in the recipe; NeMo prefers the newer checkpoint

    def _build_one_rank_recipe(self, *, fsdp: bool = False, tp: int = 1) -> Partial:
        """Return the shrunk recipe for one rank with the same global batch, with Megatron-FSDP if `fsdp`.

        `tp` is above 1 only for a checkpoint that requires the same TP (`resume_layout.py`).
        """
        one_rank_recipe = copy.deepcopy(self.recipe)
        layout = self.job.layout
        one_rank_layout = layout.replace(
            tp=tp,
            pp=1,
            cp=1,
            ep=1,
            vp=None,
            sp=layout.sp and tp > 1,
            etp=layout.etp if tp > 1 else None,
            chunks=None,
            first_layers=None,
            last_layers=None,
            embedding_as_layer=False,
            loss_as_layer=False,
        )
        shrunk_recipe.set_layout(one_rank_recipe, one_rank_layout, tp)
        one_rank_recipe.trainer.strategy.num_distributed_optimizer_instances = 1
        if self.is_fsdp and not fsdp:
            shrunk_recipe.disable_fsdp(one_rank_recipe)
        for change in shrunk_recipe.scale_balancing_losses(one_rank_recipe, layout.cp):
            if change not in self.rehearsal.changes:
                self.rehearsal.changes.append(change)
        return one_rank_recipe

    def _start_from_weights(self, partial: Partial) -> None:
        import nemo_run as run
        from nemo import lightning as nl

        if partial.trainer.strategy.fsdp:
            from superpod.rehearsal.training.initial_weights import InitialWeights

            partial.trainer.callbacks = [*partial.trainer.callbacks, run.Config(InitialWeights, str(self.weights))]
            return
        partial.resume.restore_config = run.Config(
            nl.RestoreConfig, path=str(self.weights), load_optim_state=False, load_artifacts=False
        )

    def _run(self, name: str, partial: Partial, ranks: int, *, save: bool = False) -> FinishedRun:
        """Train a recipe on `ranks` forked processes; with `save`, save its weights before the first step."""
        import nemo_run as run

        from superpod.rehearsal.training.recorder import Recorder

        folder = self.folder / name
        partial.log.explicit_log_dir = str(folder)
        partial.log.ckpt.dirpath = str(folder / "checkpoints")
        if name != "own":
            partial.log.ckpt.every_n_train_steps = 10 * self.steps  # never
        weights = ""
        if save:
            weights = str(self.weights)
            # There are no moments before the first step, but one format requires them.
            partial.trainer.strategy.ckpt_save_optimizer = False
        partial.trainer.callbacks = [
            *partial.trainer.callbacks,
            run.Config(Recorder, folder=str(folder / "ranks"), weights=weights, resharded=name == "resharded"),
        ]
        rehearsal, changes = rehearse(partial, devices=ranks)
        if name == "own":
            self.rehearsal.changes += changes
        return forked_run.run(name, rehearsal, folder / "ranks", ranks)


def to_json(rehearsal: Rehearsal) -> dict[str, Any]:
    """Return the results of a rehearsal as a JSON object: the output of `recipes rehearse --json`."""
    job = rehearsal.shrunk.job
    return {
        "recipe": rehearsal.recipe,
        "nodes": rehearsal.nodes,
        "ranks": job.gpus,
        "topology": rehearsal.shrunk.topology,
        "passed": rehearsal.passed,
        "shrunk": {size.name: [size.old, size.new] for size in rehearsal.shrunk.sizes},
        "dropped": rehearsal.dropped,
        "dropouts": rehearsal.dropouts,
        "checks": [vars(check) for check in rehearsal.checks],
        "losses": {name: run.losses for name, run in rehearsal.runs.items()},
        "seconds": {name: round(seconds, 1) for name, seconds in rehearsal.seconds.items()},
    }
