"""Bugs planted into the ranks of rehearsals: `python planted_bugs.py FOLDER NAME ...` writes FOLDER/NAME.json for each.

A script, because planting patches NeMo and Megatron for good: each bug has a fork of its own.
"""

import contextlib
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from superpod.common.json_files import write_json
from superpod.rehearsal import features, rehearsal_run
from superpod.rehearsal.patches.registry import rebind, replace
from superpod.requests.request import Request


def same_data() -> None:
    """Every data-parallel rank reads what the first one does."""
    from nemo.lightning.data import MegatronPretrainingSampler as Sampler

    original = Sampler.__init__
    Sampler.__init__ = lambda self, *args, **kw: original(self, *args, **kw | {"data_parallel_rank": 0})


def layer_left_out() -> None:
    """The last stage builds one layer less than it should."""
    from megatron.core import parallel_state
    from megatron.core.transformer import transformer_block

    original = transformer_block.get_num_layers_to_build

    def fewer(*args: Any, **kw: Any) -> int:
        alone = parallel_state.get_pipeline_model_parallel_world_size() == 1
        return original(*args, **kw) - (not alone and parallel_state.is_pipeline_last_stage(ignore_virtual=True))

    rebind(transformer_block, "get_num_layers_to_build", fewer)


def layer_twice() -> None:
    """Every stage believes that its layers begin with the first one."""
    from megatron.core.transformer import transformer_layer

    rebind(transformer_layer, "get_transformer_layer_offset", lambda *_, **__: 0)


def untied_embedding() -> None:
    """The first and the last stage keep their own gradients of the embedding they share."""
    replace(_finalize(), _allreduce_word_embedding_grads=lambda *_, **__: None)


def _finalize() -> ModuleType:
    """Megatron's module of this name; the package has the function."""
    return importlib.import_module("megatron.core.distributed.finalize_model_grads")


def contiguous_chunks() -> None:
    """Context-parallel ranks cut the sequence in two, not in the zig-zag that attention expects."""
    from megatron.core import parallel_state
    from nemo.collections.llm.gpt.model import base

    def cut(batch: dict[str, Any]) -> dict[str, Any]:
        ranks, rank = (
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_context_parallel_rank(),
        )
        parts = {k: v.chunk(ranks, 1)[rank] for k, v in batch.items() if getattr(v, "ndim", 0) == 2}
        return {**batch, **parts, "attention_mask": None}

    base.get_batch_on_this_cp_rank = cut  # type: ignore[attr-defined]


def _unmarked(which: str) -> Callable[[], None]:
    """Parameters of this name are not summed over the tensor-parallel ranks, which see other tokens."""

    def plant() -> None:
        original = _finalize()._allreduce_non_tensor_model_parallel_grads

        def without(model: Any, *args: Any, **kw: Any) -> None:
            for chunk in model:
                for name, parameter in chunk.named_parameters():
                    if which in name:
                        parameter.sequence_parallel = False
            original(model, *args, **kw)

        replace(_finalize(), _allreduce_non_tensor_model_parallel_grads=without)

    return plant


def unreduced_gradients() -> None:
    """Data-parallel ranks keep their own gradients."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    def nothing(self: Any, *_: object, **__: object) -> None:
        self.grad_reduce_handle = None

    group = buffers._ParamAndGradBucketGroup
    group.start_grad_sync = group.finish_grad_sync = nothing  # type: ignore[method-assign]


def idle_stage() -> None:
    """The last stage learns at rate 0."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, Float16OptimizerWithFloat16Params
    from megatron.core.optimizer.optimizer import FP32Optimizer

    def idle() -> bool:
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        return stages > 1 and parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    for kind in (ChainedOptimizer, DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer):
        original = kind.step_with_ready_grads

        def step(self: Any, original: Any = original) -> bool:
            for group in self.param_groups if idle() else ():
                group["lr"] = 0.0
            return original(self)

        kind.step_with_ready_grads = step


def forgotten_moments() -> None:
    """A resumed run begins with empty moments."""
    from nemo.lightning.pytorch.strategies import MegatronStrategy

    MegatronStrategy.load_optimizer_state_dict = lambda *_, **__: None  # type: ignore[method-assign]


def data_from_start() -> None:
    """A resumed run reads the text from its start."""
    from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule

    PreTrainingDataModule.load_state_dict = lambda *_, **__: None  # type: ignore[method-assign]
    PreTrainingDataModule.state_dict = lambda *_: {}  # type: ignore[method-assign]


def experts_scaled() -> None:
    """Gradients of experts are averaged over the data-parallel ranks, not over those that hold the expert."""
    from megatron.core.distributed import distributed_data_parallel as ddp

    original = ddp._ParamAndGradBuffer.__init__

    def init(self: Any, *args: Any, **kw: Any) -> None:
        original(self, *args, **kw)
        if any(not getattr(parameter, "allreduce", True) for parameter in self.params):
            for bucket in self.buckets:
                bucket.gradient_scaling_factor = 1.0

    ddp._ParamAndGradBuffer.__init__ = init  # type: ignore[method-assign]


def keys_not_gathered() -> None:
    """Attention sees this rank's part of the sequence only."""
    from superpod.rehearsal.patches import attention

    original = attention._gather_context_parallel

    def alone(cp: int, query: Any, key: Any, value: Any) -> Any:
        return original(1, query, key, value)

    attention._gather_context_parallel = alone


def adapters_not_saved() -> None:
    """Only what has a name without its chunk passes for an adapter: NeMo 2.7.3 with virtual stages."""
    from nemo.lightning.pytorch.callbacks.peft import PEFT

    PEFT.adapter_key_filter = lambda *_: False  # type: ignore[method-assign]


def stuck_rank() -> None:
    """The last rank waits for ever after its first step."""
    _on_step(lambda: time.sleep(3600))


def dying_rank() -> None:
    """The last rank is killed after its first step, as the kernel does when memory runs out."""
    _on_step(lambda: os.kill(os.getpid(), 9))


def nan_loss() -> None:
    """The loss of the second step is not a number."""
    from megatron.core import parallel_state
    from nemo.lightning.megatron_parallel import MaskedTokenLossReduction

    original, calls = MaskedTokenLossReduction.forward, [0]

    def forward(self: Any, batch: Any, out: Any) -> Any:
        calls[0] += 1
        more = parallel_state.get_data_parallel_world_size() > 1 and calls[0] > 4
        return original(self, batch, out * float("nan") if more else out)

    MaskedTokenLossReduction.forward = forward  # type: ignore[method-assign]


def _on_step(happens: Callable[[], None]) -> None:
    from superpod.rehearsal.training.recorder import Recorder

    original = Recorder.on_train_batch_end

    def end(self: Any, *args: Any) -> None:
        original(self, *args)
        last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1 > 0
        if last:
            happens()

    Recorder.on_train_batch_end = end  # type: ignore[method-assign]


DENSE, TIED, CP = "dense-gqa-tp-with-sp-dp", "sft-tied-embeddings-on-two-stages-interleaved", "long-context-cp"
MOE, LORA = "moe-with-expert-tensor-parallelism", "lora-tp-x-dp"
EXPERTS = "attention-sinks-windows-experts-with-biases-tp-ep"  # with more data-parallel ranks than hold an expert

BUGS: dict[str, tuple[str, Callable[[], None]]] = {
    "same-data": (DENSE, same_data),
    "layer-left-out": (TIED, layer_left_out),
    "layer-twice": (TIED, layer_twice),
    "untied-embedding": (TIED, untied_embedding),
    "contiguous-chunks": (CP, contiguous_chunks),
    "keys-not-gathered": (CP, keys_not_gathered),
    "unreduced-norms": (DENSE, _unmarked("layer_norm")),
    "unreduced-router": (MOE, _unmarked("router")),
    "unreduced-gradients": (DENSE, unreduced_gradients),
    "idle-stage": (TIED, idle_stage),
    "forgotten-moments": (DENSE, forgotten_moments),
    "data-from-start": (DENSE, data_from_start),
    "experts-scaled": (EXPERTS, experts_scaled),
    "adapters-not-saved": (LORA, adapters_not_saved),
    "stuck-rank": (DENSE, stuck_rank),
    "dying-rank": (DENSE, dying_rank),
    "nan-loss": (DENSE, nan_loss),
}
"""Name -> the shape of the recipe that it is planted in, and how."""


def main(folder: Path, *names: str) -> None:
    for name in ("superpod.rehearsal.entry", "superpod.nemo2.build.partial"):  # NeMo, once for all
        importlib.import_module(name)
    for name in names:
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                write_json(folder / f"{name}.json", {"name": name} | answer(folder / name, *BUGS[name]))
            os._exit(0)
        os.waitpid(pid, 0)


def answer(folder: Path, key: str, plant: Callable[[], None]) -> dict[str, Any]:
    """The failed checks of a rehearsal of this shape with the bug in it."""
    try:
        example = features.find_recipe(next(shape for shape in features.FEATURES if shape.key == key))
        folder.mkdir()
        plant()
        planned = rehearsal_run.plan_rehearsal(Request(example.recipe, num_nodes=example.nodes), features.MOST_RANKS)
        done = rehearsal_run.run_rehearsal(planned, folder, steps=4)
    except BaseException as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}", "failed": {}, "seconds": {}}
    failed = {check.name: check.message for check in done.checks if not check.passed}
    return {"recipe": example.recipe, "failed": failed, "seconds": done.seconds}


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
