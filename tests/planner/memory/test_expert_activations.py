"""What experts' activations and biases do beside their products, held against the functions that Megatron-Core runs."""

import json
import subprocess
import sys

import pytest

from superpod.collection import registry
from superpod.planner import models

MIXTURES = sorted(name for name, model in registry.models().items() if model.shape.is_moe)

RUN = """
import json, sys
import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import TEGroupedMLP
from superpod import recipes

ROWS, FFN = 64, 96

def kept(function, *tensors):
    saved = {}
    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function(*tensors)
    return sum(n for n in saved.values() if n >= 2 * ROWS * FFN) / (2 * ROWS * FFN)

def activation(config):
    first = torch.randn(ROWS, 2 * FFN, dtype=torch.bfloat16, requires_grad=True) * 1.0
    probs = torch.rand(ROWS, 1, requires_grad=True)
    assert config.gated_linear_unit and config.bias_activation_fusion, config
    if config.activation_func is F.silu:
        return kept(lambda x, p: weighted_bias_swiglu_impl(x, None, p, False), first, probs)
    assert config.activation_func is quick_gelu, config.activation_func
    clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
    return kept(lambda x, p: weighted_bias_quick_geglu_impl(x, None, p, False, offset, clamp), first, probs)

def bias():
    passes = []
    class Passes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            if not op.is_view and isinstance(out, torch.Tensor) and out.numel() == ROWS * FFN:
                flat = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a])]
                read = sum(t.numel() * t.element_size() for t in flat if isinstance(t, torch.Tensor))
                passes.append((read + out.numel() * out.element_size()) / (2 * ROWS * FFN))
            return out
    rows = torch.randn(ROWS, FFN, dtype=torch.bfloat16)
    biases = [torch.randn(FFN, dtype=torch.bfloat16)]
    with Passes():
        TEGroupedMLP._apply_bias(rows, biases, [ROWS], torch.rand(ROWS, 1))
    return sum(passes)

seen = {}
for name in sys.argv[1:]:
    seen[name] = activation(recipes.build(f"{name}_pretrain_h100_bf16").model.config)  # as set, not built
print(json.dumps({"kept": seen, "bias": bias()}))
"""


@pytest.mark.slow
def test_what_experts_keep_and_copy_is_what_megatron_does():
    """GPT-OSS's clamp keeps its input beside the activation's: 4 units a row, where the others keep 2."""
    command = [sys.executable, "-W", "ignore", "-c", RUN, *MIXTURES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert seen["kept"] == {name: 2.0 * (1 + models.find(name).clamped) for name in MIXTURES}
    assert seen["bias"] == pytest.approx(14.0, rel=0.03)  # `blocks._expert_biases`, forward
