"""Trains one recipe, folded onto one GPU, for a few steps: `python -m superpod.rehearsal.on_gpu.case CASE FOLDER`.

CASE is a JSON object with the fields of `Case`. The process writes `FOLDER/result.json`; if training fails, the result
has the exception. Without a GPU, the same steps run on a CPU as a rehearsal, with the settings that `rehearse` changes.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.planner import hardware
from superpod.rehearsal.on_gpu.fold import FoldedJob, fold

if TYPE_CHECKING:
    from nemo_run import Partial

    from superpod.planner.planned_job import PlannedJob
    from superpod.planner.predict import Prediction

RECORD, RESULT = "steps.json", "result.json"


@dataclass(frozen=True)
class Case:
    """A recipe to train on one GPU. `lock` is a file that is locked during training, so that times are comparable."""

    recipe: str
    nodes: int = 0
    """Number of nodes; 0 = the smallest size of the recipe."""
    overrides: tuple[str, ...] = ()
    layers: int = 0
    micro_batches: int = 2
    limit_gib: float | None = None
    steps: int = 3
    lock: str = ""
    bare: bool = False
    """Train with a bare Megatron-Core loop instead of NeMo's trainer, for comparison."""
    profile: bool = False
    """Profile the last step, whose kernels are written to `kernels.json`."""

    @property
    def name(self) -> str:
        """Name of the case's folder."""
        changed = "".join(f"+{text}" for text in self.overrides) + "+bare" * self.bare
        changed += f"+layers={self.layers}" if self.layers else ""
        size = f"+{self.nodes}" if self.nodes else ""
        return "".join(c if c.isalnum() or c in "._-+=" else "_" for c in self.recipe + size + changed)[:120]


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Fold and train the case in this process, and return its result."""
    import torch

    has_gpu = torch.cuda.is_available()
    gpu = hardware.match_gpu(torch.cuda.get_device_name()) if has_gpu else ""
    if not has_gpu:
        import superpod.rehearsal.entry  # noqa: F401 - applies the patches, before NeMo is imported
    from superpod.requests.request import Request
    from superpod.requests.resolve import build_configuration, plan_job

    request = Request(case.recipe, num_nodes=case.nodes or None, overrides=case.overrides, gpu=gpu)
    full, _ = build_configuration(request)
    folded = fold(plan_job(full, request), case.layers, case.micro_batches, case.limit_gib)
    result = _describe(case, folded)
    (folder / RESULT).write_text(json.dumps(result))
    os.environ.update(_environment(folded))
    partial = _build(full, folded, case, folder)
    if case.lock:
        lock = os.open(case.lock, os.O_WRONLY | os.O_CREAT)  # released when the process ends, and with it its memory
        fcntl.flock(lock, fcntl.LOCK_EX)
        if has_gpu:
            _wait_for_memory(result["predicted"]["reserved_gib"] or 0)
    started = time.time()
    if case.bare:
        result["error"] = _train_bare(partial, folded, case.steps, folder)
    else:
        result["error"] = _train(partial, folder, has_gpu=has_gpu)
    record = folder / RECORD
    steps = json.loads(record.read_text()) if record.is_file() else {}
    return result | steps | {"total_s": time.time() - started}


def _describe(case: Case, folded: FoldedJob) -> dict[str, Any]:
    from superpod.planner import predict

    prediction: Prediction = predict.one(folded.job)
    job = folded.job
    return {
        "case": dataclasses.asdict(case),
        "folded": {size.name: [size.old, size.new] for size in folded.sizes},
        "tokens_per_step": job.layout.gbs * job.seq,
        "flops_per_step": _flops(job),
        "predicted": {
            "verdict": prediction.verdict,
            "reason": prediction.reason,
            "step_time_s": prediction.step_time_s,
            "mfu": prediction.mfu,
            "allocated_gib": prediction.allocated_gib_max,
            "reserved_gib": prediction.reserved_gib_max,
            "terms_s": dict(prediction.terms_s),
            "owners_gib": dict(prediction.owners_gib),
        },
    }


def _flops(job: PlannedJob) -> float:
    """Return the FLOPs of a step from which the planner computes MFU."""
    from superpod.planner import plans

    return plans.mfu(job, 1.0) * job.node.gpu.tflops(job.precision) * 1e12


def _wait_for_memory(gib: float) -> None:
    """Wait until the GPU has that much free memory: the process that held the lock before may still release its own."""
    import torch

    for _ in range(100):
        free, total = torch.cuda.mem_get_info()
        if free >= min(1.05 * gib * 2**30, 0.97 * total):
            return
        time.sleep(0.1)


def _environment(folded: FoldedJob) -> dict[str, str]:
    from superpod.collection.facts import environment

    needed = {v.name: v.value for v in environment.variables(folded.job)}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    return needed | rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _build(full: Partial, folded: FoldedJob, case: Case, folder: Path) -> Partial:
    """Return the recipe with the folded sizes, on generated text, for a few steps without validation."""
    import nemo_run as run

    from superpod.rehearsal.on_gpu.step_recorder import StepRecorder
    from superpod.rehearsal.training import shrunk_recipe

    job = folded.job
    small = shrunk_recipe.build_shrunk_recipe(full, job)
    if not job.model.kv_lora:
        small.model.config.kv_channels = (
            job.model.channels
        )  # the default is hidden size / heads, and heads were divided
    text = folder / "text" / "text"
    shrunk_recipe.write_text(text, job.model.vocab, job.seq, job.layout.gbs * (case.steps + 1))
    shrunk_recipe.set_short_training(small, case.steps, text, job.model.vocab, save_every=10 * case.steps)
    if getattr(small, "resume", None) is not None:
        small.resume.restore_config = None
    if full.model.config.moe_token_dispatcher_type == "flex":
        small.model.config.moe_token_dispatcher_type, small.model.config.moe_enable_deepep = "alltoall", False
    small.log.explicit_log_dir = str(folder / "log")
    small.log.ckpt.dirpath = str(folder / "checkpoints")
    small.trainer.callbacks = [
        *small.trainer.callbacks,
        run.Config(StepRecorder, path=str(folder / RECORD), profile_step=case.steps if case.profile else 0),
    ]
    return small


def _train(partial: Partial, folder: Path, *, has_gpu: bool) -> str:
    """Train; return the error, or ""."""
    import fiddle as fdl
    from torch.distributed import FileStore  # type: ignore[reportPrivateImportUsage]

    from superpod.rehearsal import rehearse

    if not has_gpu:
        partial, _ = rehearse(partial, devices=1)
    try:
        call: Any = fdl.build(partial)
        call.keywords["trainer"].strategy.store = FileStore(str(folder / "store"), 1)
        call()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:2000]
    return ""


def _train_bare(partial: Partial, folded: FoldedJob, steps: int, folder: Path) -> str:
    from superpod.rehearsal.on_gpu import bare_loop

    try:
        bare_loop.train(partial, folded.job, steps, folder)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:2000]
    return ""


def main(arguments: list[str]) -> None:
    """Train the case of the command line."""
    fields: dict[str, Any] = json.loads(arguments[0])
    fields["overrides"] = tuple(fields.get("overrides", ()))
    case = Case(**fields)
    folder = Path(arguments[1])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = run_case(case, folder)
    except Exception as error:
        traceback.print_exc()
        result = {"case": dataclasses.asdict(case), "error": f"{type(error).__name__}: {error}"[:2000]}
    (folder / RESULT).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
