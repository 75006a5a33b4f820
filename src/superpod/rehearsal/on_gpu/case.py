"""Trains one recipe, folded onto one GPU, for a few steps: `python -m superpod.rehearsal.on_gpu.case CASE FOLDER`.

CASE is a JSON object with the fields of `Case`. The process writes `FOLDER/result.json`; if training fails, the result
has the exception. Without a GPU, the same steps run on a CPU as a rehearsal, with the settings that `rehearse` changes.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.common.json_files import read_json, write_json
from superpod.planner import hardware
from superpod.rehearsal.on_gpu.fold import MICRO_BATCHES, fold
from superpod.rehearsal.training.shrink import list_sizes

if TYPE_CHECKING:
    from nemo_run import Partial

    from superpod.planner.planned_job import PlannedJob

STEPS = 3
RECORD, RESULT, LOCK = "steps.json", "result.json", "gpu.lock"
MEMORY_WAIT_S = 10.0


@dataclass(frozen=True)
class Case:
    """A recipe of this project or of NeMo (`nemo:llama32_1b`) to train on one GPU."""

    recipe: str
    nodes: int = 0
    """Number of nodes; 0 = the smallest number that the recipe has a layout for."""
    overrides: tuple[str, ...] = ()
    layers: int = 0
    """Argument of `fold`, like `micro_batches` and `limit_gib`."""
    micro_batches: int = MICRO_BATCHES
    limit_gib: float | None = None
    steps: int = STEPS
    exclusive: bool = False
    """Train while no other exclusive case trains, so that times are comparable."""
    bare: bool = False
    """Train with a bare Megatron-Core loop instead of NeMo's trainer, for comparison."""
    profile: bool = False
    """Profile the last step, and write its kernels to `kernels.json`."""

    @property
    def key(self) -> str:
        """The fields of the case as a JSON object."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @property
    def folder(self) -> str:
        """Name of the case's folder: the recipe and a hash of all fields."""
        readable = "".join(c if c.isalnum() or c in "._-" else "_" for c in self.recipe)
        return f"{readable[:100]}-{hashlib.sha256(self.key.encode()).hexdigest()[:8]}"


def run_case(case: Case, folder: Path) -> None:
    """Fold a case onto one GPU, train it in this process, and write the result or an error to `RESULT` in `folder`."""
    result: dict[str, Any] = {"error": ""}
    try:
        job, folded_job, partial, has_gpu = _prepare(case, folder)
        result |= _describe(job, folded_job)
        write_json(folder / RESULT, result | {"error": "the process ended before training was complete"})
        if case.exclusive:
            _wait_for_turn(folder.parent / LOCK, result["predicted"]["reserved_gib"], has_gpu=has_gpu)
        start_time = time.monotonic()
        if case.bare:
            from superpod.rehearsal.on_gpu import bare_loop

            bare_loop.train(partial, folded_job, case.steps, folder, folder / RECORD)
        else:
            _train(partial, folder, has_gpu=has_gpu)
        result["train_s"] = time.monotonic() - start_time
    except Exception as error:  # any library's error is the result of the test
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"[:2000]
    write_json(folder / RESULT, result | (read_json(folder / RECORD) or {}))


def _prepare(case: Case, folder: Path) -> tuple[PlannedJob, PlannedJob, Partial, bool]:
    """Set the environment; return the job, the folded job, its recipe, and whether this machine has a GPU."""
    import torch

    has_gpu = torch.cuda.is_available()
    gpu = hardware.match_gpu(torch.cuda.get_device_name()) if has_gpu else ""
    if not has_gpu:
        import superpod.rehearsal.entry  # noqa: F401 - applies the patches, before NeMo is imported
    from superpod.requests.request import Request
    from superpod.requests.resolve import build_configuration, plan_job

    request = Request(case.recipe, num_nodes=case.nodes or None, overrides=case.overrides, gpu=gpu)
    full, _ = build_configuration(request)
    job = plan_job(full, request)
    folded_job = fold(job, case.layers, case.micro_batches, case.limit_gib)
    os.environ.update(_environment(folded_job))
    return job, folded_job, build_folded_recipe(full, folded_job, case, folder), has_gpu


def _describe(job: PlannedJob, folded_job: PlannedJob) -> dict[str, Any]:
    """Return the changed sizes and the planner's prediction of a folded job, for `RESULT`."""
    from superpod.planner import predict

    prediction = predict.one(folded_job)
    return {
        "folded": {size.name: [size.old, size.new] for size in list_sizes(job, folded_job)},
        "tokens_per_step": folded_job.layout.gbs * folded_job.seq,
        "predicted": {
            "verdict": prediction.verdict,
            "reason": prediction.reason,
            "step_time_s": prediction.step_time_s,
            "mfu": prediction.mfu,
            "allocated_gib": prediction.allocated_gib_max,
            "reserved_gib": prediction.reserved_gib_max or 0.0,
            "terms_s": dict(prediction.terms_s),
            "owners_gib": dict(prediction.owners_gib),
        },
    }


def _environment(job: PlannedJob) -> dict[str, str]:
    """Return the environment variables of the job, and torchrun's for a single rank."""
    from superpod.collection.facts import environment

    required_variables = {v.name: v.value for v in environment.variables(job)}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    return required_variables | rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def build_folded_recipe(full: Partial, job: PlannedJob, case: Case, folder: Path) -> Partial:
    """Return the recipe `full` with the sizes of a folded job, which trains on generated text without validation.

    The text, logs, checkpoints and the `StepRecord` are in `folder`.
    """
    import nemo_run as run

    from superpod.nemo2.options import remove_deepep
    from superpod.rehearsal.on_gpu.step_recorder import StepRecorder
    from superpod.rehearsal.training import shrunk_recipe

    small_recipe = shrunk_recipe.build_shrunk_recipe(full, job)
    if not job.model.kv_lora:
        # NeMo's default is hidden size / heads, but the heads were divided by TP.
        small_recipe.model.config.kv_channels = job.model.channels
    remove_deepep(small_recipe)
    text = folder / "text" / "text"
    shrunk_recipe.write_text(text, job.model.vocab, job.seq, job.layout.gbs * (case.steps + 1))
    shrunk_recipe.set_short_training(small_recipe, case.steps, text, job.model.vocab, save_every=10 * case.steps)
    if getattr(small_recipe, "resume", None) is not None:
        small_recipe.resume.restore_config = None
    small_recipe.log.explicit_log_dir = str(folder / "log")
    small_recipe.log.ckpt.dirpath = str(folder / "checkpoints")
    profile_step = case.steps if case.profile else 0
    recorder = run.Config(StepRecorder, path=str(folder / RECORD), profile_step=profile_step)
    small_recipe.trainer.callbacks = [*small_recipe.trainer.callbacks, recorder]
    return small_recipe


def _wait_for_turn(lock: Path, gib: float, *, has_gpu: bool) -> None:
    """Wait until no other exclusive case trains, then up to `MEMORY_WAIT_S` until `gib` of GPU memory are free."""
    fcntl.flock(os.open(lock, os.O_WRONLY | os.O_CREAT), fcntl.LOCK_EX)  # released when this process ends
    if not has_gpu:
        return
    import torch

    needed_bytes = 1.05 * gib * hardware.GIB
    deadline = time.monotonic() + MEMORY_WAIT_S
    while time.monotonic() < deadline:
        free, total = torch.cuda.mem_get_info()
        if free >= min(needed_bytes, 0.97 * total):
            return
        time.sleep(0.1)


def _train(partial: Partial, folder: Path, *, has_gpu: bool) -> None:
    """Train with NeMo's trainer."""
    import fiddle as fdl
    from torch.distributed import FileStore  # type: ignore[reportPrivateImportUsage]

    from superpod.rehearsal import rehearse

    if not has_gpu:
        partial, _ = rehearse(partial, devices=1)
    call: Any = fdl.build(partial)
    call.keywords["trainer"].strategy.store = FileStore(str(folder / "store"), 1)
    call()


def main(arguments: list[str]) -> None:
    """Train a case. `arguments`: the case as JSON, and the folder for its results."""
    fields: dict[str, Any] = json.loads(arguments[0])
    fields["overrides"] = tuple(fields.get("overrides", ()))
    folder = Path(arguments[1])
    folder.mkdir(parents=True, exist_ok=True)
    run_case(Case(**fields), folder)


if __name__ == "__main__":
    main(sys.argv[1:])
