"""A bare Megatron-Core training loop on one GPU, to compare NeMo's training loop with.

The model, precision and optimizer are those of the recipe. The loop has no Lightning, callbacks, logging or data
module: it trains on random tokens in GPU memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from nemo_run import Partial

    from superpod.planner.planned_job import PlannedJob


def train(partial: Partial, job: PlannedJob, steps: int, folder: Path, record_path: Path) -> None:
    """Train a recipe on one GPU for `steps` steps, and write the loss, time and memory of each step.

    Args:
        partial: the recipe.
        job: the planned job, whose batch and sequence are used.
        steps: training steps.
        folder: folder for the rendezvous file.
        record_path: JSON file of the `StepRecord`.
    """
    import fiddle as fdl
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from torch.distributed import FileStore  # type: ignore[reportPrivateImportUsage]

    from superpod.rehearsal.on_gpu.step_recorder import StepRecord
    from superpod.rehearsal.proof.meta_build import connect_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    strategy: Any = fdl.build(partial.trainer.strategy)
    config = connect_model(partial, strategy).config
    chunk: Any = config.configure_model(SimpleNamespace(vocab_size=job.model.vocab))
    wrapped_chunk = Float16Module(config, chunk.to(device)) if config.bf16 else chunk.to(device)
    model = DistributedDataParallel(config, strategy.ddp_config, wrapped_chunk)
    optimizer = get_megatron_optimizer(fdl.build(partial.optim.config), [model])
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    config.no_sync_func = model.no_sync  # no gradient synchronization before the last micro-batch

    record = StepRecord(record_path, sum(p.numel() for p in model.parameters()))
    forward_backward_func = get_forward_backward_func()
    batches = _generate_batches(job, device)
    for _ in range(steps):
        record.start()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses: list[dict[str, torch.Tensor]] = forward_backward_func(
            forward_step_func=_forward,
            data_iterator=batches,
            model=[model],
            num_microbatches=job.micro_batches,
            seq_length=job.seq,
            micro_batch_size=job.layout.mbs,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()  # type: ignore[reportGeneralTypeIssues] - a wrong annotation of Megatron
        loss = float(sum(loss["loss"] for loss in losses) / len(losses))
        record.finish(loss, None if norm is None else float(norm))


def _generate_batches(job: PlannedJob, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Yield random micro-batches: `tokens`, `labels` and `positions` of shape [micro-batch size, sequence length]."""
    import torch

    positions = torch.arange(job.seq, device=device).expand(job.layout.mbs, -1)
    while True:
        tokens = torch.randint(job.model.vocab, (job.layout.mbs, job.seq + 1), device=device)
        yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "positions": positions}


def _forward(batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Return the loss of each token of the next micro-batch, and the function that averages it for Megatron."""
    batch = next(batches)
    losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])

    def reduce(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = output.float().mean()
        return mean, {"loss": mean.detach().clone()}  # the schedule divides `mean` in place

    return losses, reduce
