"""gpu_flags.py OUT [STRIDE]: the flags of Megatron's data parallelism and optimizer as a GPU run of a recipe has them.

Writes every distinct set of flags of all recipes at all sizes to OUT, with a recipe that has it; with STRIDE, of every
so manieth size. The flags are those that Megatron is given: after NeMo's precision plugin (`MegatronStrategy.connect`)
and its overlap callback (`setup`) have written theirs into the recipe's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

FILE = Path(__file__).with_name("gpu_flags.json")
"""All sets of flags, as this script wrote them."""

VALUES = frozenset(("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"))
"""Of the optimizer: numbers, which decide no order of calls."""

Flags = dict[str, dict[str, str]]
"""`ddp` and `optimizer`: the fields that differ from their defaults."""


def flags(partial: Any) -> Flags:
    """What Megatron's data parallelism and optimizer of this recipe are given on its GPUs."""
    import fiddle as fdl
    from nemo.collections import llm  # noqa: F401 - before its callbacks, which import it
    from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback
    from nemo.lightning.pytorch.plugins.mixed_precision import update_config_with_dtype_overrides
    from nemo.utils import AppState

    with fused_adam():
        own = fdl.build(partial.optim.config)
    dtypes = fdl.build(partial.trainer.plugins).dtype_config
    strategy = cast(Any, fdl.build(partial.trainer.strategy))
    optimizer = update_config_with_dtype_overrides(dtypes, own)
    strategy.ddp_config = update_config_with_dtype_overrides(dtypes, strategy.ddp_config)
    state, degrees = AppState(), strategy.parallelism
    state.tensor_model_parallel_size = degrees.tensor_model_parallel_size
    state.context_parallel_size = degrees.context_parallel_size
    model_ranks = state.tensor_model_parallel_size * state.context_parallel_size * degrees.pipeline_model_parallel_size
    state.data_parallel_size = partial.trainer.num_nodes * partial.trainer.devices // model_ranks
    model = SimpleNamespace(config=None, optim=SimpleNamespace(config=optimizer))
    for config in partial.trainer.callbacks:
        if fdl.get_callable(config) is MegatronCommOverlapCallback:
            with mock.patch("torch.cuda.get_device_capability", return_value=(10, 0)):
                fdl.build(config).setup(SimpleNamespace(strategy=strategy, model=model), model, "fit")
    return {"ddp": changed(strategy.ddp_config), "optimizer": of_optimizer(optimizer, strategy.ddp_config)}


@contextlib.contextmanager
def fused_adam() -> Iterator[None]:
    """Inside, Megatron finds a FusedAdam of TE's signature, which a precision-aware optimizer asks for."""

    class FusedAdam:
        def __init__(
            self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: bool
        ) -> None: ...

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].__dict__["FusedAdam"] = FusedAdam
    version = "megatron.core.optimizer.optimizer_config.is_te_min_version"
    with mock.patch.dict(sys.modules, modules), mock.patch(version, return_value=True):
        yield


def changed(config: Any) -> dict[str, str]:
    """The fields of a dataclass that differ from their defaults."""
    default = type(config)()
    names = [field.name for field in dataclasses.fields(config)]
    return {n: str(getattr(config, n)) for n in names if getattr(config, n) != getattr(default, n)}


def of_optimizer(config: Any, ddp: Any) -> dict[str, str]:
    """The same of the optimizer, without plain numbers."""
    read = {name: value for name, value in changed(config).items() if name not in VALUES}
    if not (ddp.fp8_param_gather or config.use_precision_aware_optimizer):
        read.pop("fp8_recipe", None)  # nothing else of the optimizer reads it
    return read


def key(given: Flags) -> str:
    """To compare two sets."""
    return json.dumps(given, sort_keys=True)


def combinations(stride: int = 1) -> list[dict[str, Any]]:
    """Each distinct set with the first recipe and size that has it."""
    from superpod.collection import registry
    from superpod.recipes import build

    sizes = [(name, nodes) for name, recipe in registry.recipes().items() for nodes in recipe.nodes]
    first: dict[str, tuple[str, int]] = {}
    for name, nodes in sizes[::stride]:
        text = key(flags(build(name, nodes)))
        first.setdefault(text, (name, nodes))
    return [{"recipe": name, "nodes": nodes, "flags": json.loads(text)} for text, (name, nodes) in first.items()]


if __name__ == "__main__":
    rows = combinations(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    Path(sys.argv[1]).write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
