"""Verifies an import or export by comparing the logits of NeMo and transformers for one forward pass. Needs torch.

The models keep their data types, and each layer is converted to FP32 only while it computes. So rounding hides no
difference, and additional memory is needed only for one layer, the embeddings and the output matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.weights.transfer import nemo_fixes

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

TOLERANCE = 1e-4
"""Allowed difference of logits on CPUs in FP32, relative to the largest logit."""
GPU_TOLERANCE = 2e-2
"""Allowed difference on a GPU, where Transformer Engine uses TF32 (10 bits of mantissa) for FP32 GEMMs."""
TOKENS = 48
"""Minimum number of tokens to compare; with a sliding window, its width + 24, up to `MAX_TOKENS`."""
MAX_TOKENS, MAX_TOKENS_LARGE = 2112, 512
LARGE_MODEL = 2_000_000_000
"""Number of parameters above which `MAX_TOKENS_LARGE` applies; wider windows are compared only by configuration."""
FREQUENCY_TOLERANCE = 1e-5
"""Allowed relative difference of a rotary frequency, which also affects positions beyond the compared tokens."""


@dataclass(frozen=True)
class Comparison:
    """Number of compared tokens, difference of the logits, and tolerance."""

    tokens: int
    difference: float
    """Largest absolute difference divided by the largest logit."""
    tolerance: float


@dataclass(frozen=True)
class ForwardPass:
    """Input [1, tokens] and logits [tokens, vocabulary] of a Megatron model, on the CPU."""

    tokens: Tensor
    logits: Tensor


def run_megatron(core: Any, config: Any) -> ForwardPass:
    """Run a Megatron model, including its adapters, on random tokens, and return tokens and logits."""
    import torch

    count, device = _choose_token_count(config, sum(p.numel() for p in core.parameters())), _select_device()
    tokens = torch.randint(0, config.vocab_size, (1, count), generator=torch.Generator().manual_seed(7))
    nemo_fixes.apply_fixes(core)
    with _set_evaluation_mode(core), _compute_in_fp32(core, core.decoder.layers, device):
        logits = core(tokens.to(device), torch.arange(count, device=device)[None], None)[0].float().cpu()
    return ForwardPass(tokens, logits)


def require_equal_logits(hf_model: Any, core: Any, megatron: ForwardPass, name: str) -> Comparison:
    """Compare the logits of a transformers model with those of a Megatron model.

    Args:
        hf_model: the transformers model.
        core: the Megatron model.
        megatron: its forward pass, computed before adapters were merged.
        name: checkpoint or folder that is converted, for messages.

    Raises:
        UserError: the logits or the rotary frequencies differ by more than the tolerance.
    """
    _compare_frequencies(hf_model, core, name)
    device, count = _select_device(), megatron.tokens.shape[1]
    with _set_evaluation_mode(hf_model), _compute_in_fp32(hf_model, hf_model.model.layers, device):
        right = hf_model(megatron.tokens.to(device), use_cache=False).logits[0].float().cpu()
    scale = right.abs().max().item()
    difference = (megatron.logits[:, : right.shape[1]] - right).abs().max().item() / max(scale, 1e-12)
    outcome = Comparison(count, difference, TOLERANCE if device.type == "cpu" else GPU_TOLERANCE)
    if not difference <= outcome.tolerance:  # true for NaN
        raise UserError(
            f"{name}: NeMo and transformers compute different functions: on {count} tokens the logits differ by "
            f"{difference:.1e} times the largest, but only {outcome.tolerance:.0e} is allowed; nothing was written",
            "--no-forward-check converts it without this comparison",
        )
    return outcome


def _select_device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def _set_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients within the block."""
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _choose_token_count(config: Any, parameters: int) -> int:
    window = config.window_size or 0
    width = window if isinstance(window, int) else window[0]
    max_tokens = MAX_TOKENS_LARGE if parameters > LARGE_MODEL else MAX_TOKENS
    return max(TOKENS, min(width + 24, max_tokens))


def _compare_frequencies(hf_model: Any, core: nn.Module, name: str) -> None:
    """Raise UserError if rotary frequencies differ. Those of latent attention are covered only by the forward pass."""
    for kind, (hf, megatron) in _find_rotary_modules(hf_model, core).items():
        right, our_logits = hf.inv_freq.double().cpu(), megatron.inv_freq.double().cpu()
        factor = getattr(megatron, "seq_len_interpolation_factor", None)
        if factor:
            our_logits = our_logits / factor
        largest_error = float("inf")
        if right.shape == our_logits.shape:
            largest_error = ((right - our_logits).abs() / right.abs().clamp_min(1e-30)).max().item()
        if not largest_error <= FREQUENCY_TOLERANCE:
            raise UserError(
                f"{name}: NeMo's {kind} frequencies differ from transformers' by {largest_error:.1e}; "
                "nothing was written"
            )


def _find_rotary_modules(hf_model: Any, core: Any) -> dict[str, tuple[Any, Any]]:
    rotary, own = getattr(hf_model.model, "rotary_emb", None), getattr(core, "rotary_pos_emb", None)
    # YaRN's module, which has inv_freq_extra, computes its frequencies in each pass.
    if rotary is None or own is None or hasattr(own, "inv_freq_extra"):
        return {}
    pairs = {"rotary": (rotary, own)}
    local = getattr(hf_model.model, "rotary_emb_local", None)
    if local is not None:
        pairs["local rotary"] = (local, own.rope_local)
    return pairs


@contextmanager
def _compute_in_fp32(model: nn.Module, layers: Any, device: torch.device) -> Iterator[None]:
    """Convert each layer to FP32 on `device` while it computes, and all other modules during the block."""
    import torch

    layers = list(layers)
    inner_modules = {id(module) for layer in layers for module in layer.modules()}
    with ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "input_in_bf16"):  # Megatron's softmax converts its result
                stack.enter_context(_keep_softmax_fp32(module))
            if id(module) not in inner_modules:
                stack.enter_context(_cast_to_fp32(module, device, own=True))
        for layer in layers:
            opened: list[Any] = []

            def before(module: nn.Module, *_: Any, opened: list[Any] = opened) -> None:
                opened.append(_cast_to_fp32(module, device, own=False))
                opened[-1].__enter__()

            def after(*_: Any, opened: list[Any] = opened) -> None:
                opened.pop().__exit__(None, None, None)

            stack.callback(layer.register_forward_pre_hook(before).remove)
            stack.callback(layer.register_forward_hook(after).remove)
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


@contextmanager
def _cast_to_fp32(module: nn.Module, device: torch.device, *, own: bool) -> Iterator[None]:
    """Convert the tensors of a module to FP32 on `device` during the block; `own` excludes its children."""
    import torch

    modules = [module] if own else list(module.modules())
    saved: list[tuple[Any, str, Tensor]] = []
    for part in modules:
        for parameter in part._parameters.values():
            if parameter is not None:
                saved.append((parameter, "data", parameter.data))
                parameter.data = parameter.data.to(device, torch.float32)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                saved.append((part._buffers, name, buffer))
                part._buffers[name] = buffer.to(device, torch.float32 if buffer.is_floating_point() else buffer.dtype)
    try:
        yield
    finally:
        for owner, name, tensor in reversed(saved):
            if name == "data":
                owner.data = tensor
            else:
                owner[name] = tensor


@contextmanager
def _keep_softmax_fp32(module: Any) -> Iterator[None]:
    names = ("input_in_bf16", "input_in_fp16", "input_in_float16")
    old_values = {name: getattr(module, name) for name in names}
    for name in names:
        setattr(module, name, False)
    try:
        yield
    finally:
        for name, value in old_values.items():
            setattr(module, name, value)
