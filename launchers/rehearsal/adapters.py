"""LoRA and DoRA beside linear layers of plain torch."""

from types import SimpleNamespace
from typing import Any

from superpod.launchers.rehearsal.registry import define, patch, rebind, replace


class _NoLinear:
    """What `te.Linear` is where there is no Transformer Engine: no module's class."""


@patch(
    "adapters",
    target="nemo.collections.llm.peft: utils.HAVE_TE, utils.get_adapter_attributes_from_linear, lora.te, DoRALinear",
    reason="NeMo takes Megatron's placeholders for Transformer Engine's classes; and an adapter must see its layer's "
    "input after the norm, which TE's fused layer hands out",
)
def _adapters() -> None:
    import nemo.collections.llm  # noqa: F401 - first: the adapters' module alone imports itself in a circle
    from megatron.core.models.gpt import gpt_layer_specs
    from nemo.collections.llm.peft import dora, lora, utils

    original, duplicated = utils.get_adapter_attributes_from_linear, gpt_layer_specs.TESpecProvider().linear()

    def attributes(layer: Any) -> tuple[bool, int, int, bool, bool]:
        if isinstance(layer, duplicated):
            rows, columns = layer.weight.shape
            return False, columns, rows, not layer.config.sequence_parallel, False
        if hasattr(layer, "return_layernorm_output"):
            layer.return_layernorm_output = True
        return original(layer)

    norms = dora.DoRALinear._get_weight_norm

    def weight_norm(self: Any) -> Any:
        """A magnitude per output; with no weights to gather, as in a dry build, its shape alone."""
        weight = self.to_wrap.weight
        return weight.new_empty(weight.shape[0]) if weight.is_meta else norms(self)

    replace(dora.DoRALinear, _get_weight_norm=weight_norm)
    replace(utils, HAVE_TE=False)
    define(lora, te=SimpleNamespace(Linear=_NoLinear))
    rebind(utils, "get_adapter_attributes_from_linear", attributes)


def start_alike() -> None:
    """Have adapters draw their numbers by their layer's kind: the same in every layout, which can then be compared.

    Megatron draws each rank's shard from that rank's own generator.
    """
    from nemo.collections.llm.peft import utils

    original = utils.ParallelLinearAdapter.__init__

    def init(
        self: Any, in_features: int, out_features: int, dim: int, base_linear_name: str, *args: Any, **kw: Any
    ) -> None:
        original(self, in_features, out_features, dim, base_linear_name, *args, **kw)
        _draw(self.linear_in.weight, base_linear_name.rpartition(".")[2])

    replace(utils.ParallelLinearAdapter, __init__=init)


def _draw(weight: Any, seed: str) -> None:
    """Fill this rank's shard of a matrix from numbers for the whole of it."""
    import zlib

    import torch
    from megatron.core import parallel_state

    if weight.is_meta:
        return
    cut, shape = getattr(weight, "partition_dim", 0), list(weight.shape)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    shape[cut] *= ranks
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    whole = torch.empty(shape).uniform_(-1, 1, generator=generator) * (3 / shape[1]) ** 0.5
    shard = whole.chunk(ranks, cut)[parallel_state.get_tensor_model_parallel_rank()]
    with torch.no_grad():
        weight.copy_(shard)
