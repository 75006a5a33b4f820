"""mxfp8_weights.py OUT RECIPE...: what Megatron's own data parallelism and optimizer make of weights with a
recipe's flags, as JSON in OUT: per recipe the flags, and the sum of |w| at the start and in each of three forwards.

Two gloo ranks. The flags are those of a GPU run: the built recipe's, after NeMo's precision plugin (`connect`) and
its overlap callback (`setup`) have written theirs. Nothing is rehearsed; only devices and MXFP8 tensors are faked.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

FLAGS = ("overlap_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather")


@dataclass
class GpuFlags:
    """Megatron's configurations of data parallelism and optimizer, like in a GPU run."""

    ddp: Any
    optimizer: Any


class Layers(torch.nn.Sequential):
    """A minimal Megatron model."""

    config: "TransformerConfig"


def flags_of(name: str, old: bool = False) -> GpuFlags:
    """Return the flags of a recipe; with `old` those before the fix."""
    import fiddle as fdl
    from nemo.collections import llm  # noqa: F401 - before its callbacks, which import it
    from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback
    from nemo.lightning.pytorch.plugins.mixed_precision import update_config_with_dtype_overrides
    from nemo.utils import AppState

    from superpod.recipes import build

    partial = build(name)
    if old:
        partial.trainer.plugins.fp8_param_gather = partial.trainer.plugins.reuse_grad_buf_for_mxfp8_param_ag = True
        for callback in partial.trainer.callbacks:
            if hasattr(callback, "overlap_param_gather"):
                callback.overlap_param_gather = None
    dtypes = fdl.build(partial.trainer.plugins).dtype_config
    strategy = fdl.build(partial.trainer.strategy)
    optimizer = update_config_with_dtype_overrides(dtypes, fdl.build(partial.optim.config))
    strategy.ddp_config = update_config_with_dtype_overrides(dtypes, strategy.ddp_config)
    model = SimpleNamespace(config=None, optim=SimpleNamespace(config=optimizer))
    state = AppState()
    state.data_parallel_size, state.tensor_model_parallel_size, state.context_parallel_size = 2, 1, 1
    torch.cuda.get_device_capability = lambda *_: (10, 0)
    callbacks = [fdl.build(c) for c in partial.trainer.callbacks if fdl.get_callable(c) is MegatronCommOverlapCallback]
    (callback,) = callbacks
    callback.setup(SimpleNamespace(strategy=strategy, model=model), model, "fit")
    return GpuFlags(strategy.ddp_config, optimizer)


def fake_devices() -> None:
    """Replace CUDA tensors in Megatron by CPU tensors."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    kind = torch.Tensor.type

    def typed(self: torch.Tensor, *args: Any, **more: Any) -> Any:
        answer = kind(self, *args, **more)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) and "cuda" not in answer else answer

    torch.Tensor.type = typed
    torch.Tensor.cuda = lambda self, *_, **__: self


def _on_cpu(make: Any) -> Any:
    def made(*args: Any, **more: Any) -> Any:
        return make(*args, **more | ({"device": "cpu"} if "cuda" in str(more.get("device", "")) else {}))

    return made


def trained(flags: GpuFlags) -> list[float]:
    """Return the sum of |w| of a linear layer initially and in three forward passes."""
    from megatron.core.distributed import DistributedDataParallel, param_and_grad_buffer
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    # As for Transformer Engine's tensors, which a recipe has where its parameters are FP8.
    param_and_grad_buffer.is_mxfp8tensor = lambda _: flags.ddp.fp8_param_gather
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16
    )
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    model = Layers(layer)
    model.config = config
    flags.ddp.bucket_size = 40_000_000
    flags.optimizer.lr = 1e-2
    parallel = DistributedDataParallel(config, flags.ddp, model)
    optimizer = get_megatron_optimizer(flags.optimizer, [parallel])
    inputs = torch.randn(4, 16, dtype=torch.bfloat16)
    sums = [_sum(layer)]
    for _ in range(3):  # the order of NeMo 2.7.3's MegatronStrategy.training_step and of Lightning's loop
        parallel.zero_grad_buffer()
        optimizer.zero_grad()
        loss = (parallel(inputs).float() - 1).pow(2).mean()
        sums.append(_sum(layer))
        loss.backward()
        parallel.finish_grad_sync()
        optimizer.step()
    return sums


def _sum(layer: torch.nn.Linear) -> float:
    return round(float(layer.weight.detach().float().abs().sum()), 3)


def rank(index: int, cases: list[tuple[str, GpuFlags]], out: str, store: str) -> None:
    """Run one of two ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=2)
    fake_devices()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    seen = {name: {"ddp": {f: getattr(flags.ddp, f) for f in FLAGS}, "sums": trained(flags)} for name, flags in cases}
    if index == 0:
        with open(out, "w") as file:
            json.dump(seen, file)


def rules_of(name: str) -> dict[str, list[str]]:
    """Return the rules that a recipe on 64 GPUs violates, unchanged and with the overlap enabled."""
    from superpod.nemo2.validation import overlapping
    from superpod.nemo2.validation.reading import Reader
    from superpod.recipes import build

    partial = build(name)
    partial.trainer.devices = partial.trainer.num_nodes = 8
    broken = {"as it is": [b.rule for rule in overlapping.RULES for b in rule(Reader(partial))]}
    for callback in partial.trainer.callbacks:
        if hasattr(callback, "overlap_param_gather"):
            callback.overlap_param_gather = True
    return broken | {"overridden": [b.rule for rule in overlapping.RULES for b in rule(Reader(partial))]}


def main(out: str, *names: str) -> None:
    """Write all answers."""
    from torch.multiprocessing.spawn import spawn

    cases = [(f"old {name}" if old else name, flags_of(name, old)) for name in names for old in (False, True)]
    spawn(rank, (cases, out, f"{out}.store"), 2)
    answers = json.loads(Path(out).read_text()) | rules_of(names[-1])
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
