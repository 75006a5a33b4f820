"""Parameters of models whose layers need Transformer Engine or mamba-ssm, with PyTorch's own in their place.

`python tests/planner/models/stand_ins.py '{"BaseMambaConfig130M": [tp, pp, rank, vocab]}'` prints RESULT{name: count}.
NeMo's and Megatron's classes do the rest, on the meta device. Only shapes are right: nothing here could run.
"""

from __future__ import annotations

import contextlib
import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from superpod.rehearsal.patches.registry import install
from superpod.rehearsal.proof.meta_build import fake_ranks

KERNELS = {
    "mamba_ssm": (),
    "mamba_ssm.ops": (),
    "mamba_ssm.ops.triton": (),
    "mamba_ssm.ops.triton.selective_state_update": ("selective_state_update",),
    "mamba_ssm.ops.triton.layernorm_gated": ("RMSNorm",),
    "mamba_ssm.ops.triton.ssd_combined": ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
    "causal_conv1d": ("causal_conv1d_fn", "causal_conv1d_update"),
}
"""Modules that Megatron's Mamba mixer imports, and the names it wants of them."""


class GatedNorm(torch.nn.Module):
    """mamba-ssm's RMSNorm with a gate."""

    def __init__(self, size: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size))


def put_in_place() -> None:
    """Give Megatron modules of the packages' names. Before it is imported."""
    for name, wanted in KERNELS.items():
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        module.__dict__.update(dict.fromkeys(wanted, object()), __version__="2.2.0", RMSNorm=GatedNorm)
        sys.modules[name] = module


@contextlib.contextmanager
def transformer_engine() -> Any:
    """Inside, Megatron's extension for Transformer Engine is made of its own local layers."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class NormThenColumns(ColumnParallelLinear):
        """A norm fused with the product after it, as Transformer Engine has it."""

        def __init__(self, size: int, *args: Any, config: Any, **more: Any) -> None:
            super().__init__(size, *args, config=config, **more)
            self.norm = WrappedTorchNorm(config, size)

    module: Any = ModuleType("megatron.core.extensions.transformer_engine")
    module.TEDotProductAttention, module.TENorm = DotProductAttention, WrappedTorchNorm
    module.TELayerNormColumnParallelLinear, module.TERowParallelLinear = NormThenColumns, RowParallelLinear
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield module
    finally:
        sys.modules.pop(module.__name__)
        if before is not None:
            sys.modules[module.__name__] = before


def spell_out(te: Any) -> None:
    """What Mamba's, T5's and Hyena's specs are made of."""
    import megatron.core.models.mamba.mamba_layer_specs  # noqa: F401 - takes its names of `te`
    import megatron.core.models.T5.t5_spec as t5
    import megatron.core.ssm.mamba_block as mamba
    import nemo.collections.llm.gpt.model.megatron.hyena.hyena_block as hyena
    import nemo.collections.llm.gpt.model.megatron.hyena.hyena_layer_specs as specs

    for module in (t5, mamba, hyena):
        setattr(module, "TENorm", te.TENorm)  # noqa: B010 - a module has no such attribute to a type checker
    for name in ("TENorm", "TEDotProductAttention", "TELayerNormColumnParallelLinear", "TERowParallelLinear"):
        setattr(specs, name, getattr(te, name))


def parameters(config: str, tp: int, pp: int, rank: int, vocab: int) -> int:
    """Parameters on one rank of one of NeMo's classes."""
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
    from nemo.collections import llm

    layout: dict[str, Any] = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    with fake_ranks(rank, tp * pp, **layout):
        mamba = {"mamba_stack_spec": mamba_stack_spec, "vocab_size": None} if "M" in config and "ba" in config else {}
        built = getattr(llm, config)(**layout, pipeline_dtype=torch.bfloat16)
        for key, value in {**mamba, "use_cpu_initialization": True, "perform_initialization": False}.items():
            setattr(built, key, value)
        with torch.device("meta"):
            model = built.configure_model(SimpleNamespace(vocab_size=vocab))
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """The command."""
    put_in_place()
    import superpod.rehearsal.entry  # noqa: F401 - before NeMo

    install()
    with transformer_engine() as te:
        spell_out(te)
    counts = {name: parameters(name, *ranks) for name, ranks in json.loads(sys.argv[1]).items()}
    print("RESULT" + json.dumps(counts))


if __name__ == "__main__":
    main()
