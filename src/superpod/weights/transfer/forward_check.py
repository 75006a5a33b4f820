"""Verifies an import or export: compares one forward pass of the NeMo model with transformers. Needs torch.

Both models keep their data types; each layer is converted to fp32 only while it computes, so that rounding hides no
difference and additional memory is needed only for one layer, the embeddings and the output matrix.
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
"""Allowed difference of logits, relative to the largest logit, in fp32 on CPUs."""
GPU_TOLERANCE = 2e-2
"""The same on a GPU, where Transformer Engine's GEMMs use TF32 (10 bits of mantissa) for fp32."""
TOKENS = 48
"""Minimum number of tokens; with a sliding window, a few more than its width, up to `MAX_TOKENS`."""
MAX_TOKENS, MAX_TOKENS_LARGE = 2112, 512
LARGE_MODEL = 2_000_000_000
"""Number of parameters above which `MAX_TOKENS_LARGE` applies; wider windows are then compared by configuration."""
FREQUENCY_TOLERANCE = 1e-5
"""Allowed relative difference of a rotary frequency, which affects all positions, also those beyond the pass."""


@dataclass(frozen=True)
class Outcome:
    """The result of the comparison."""

    tokens: int
    difference: float
    """Largest difference relative to the largest logit."""
    tolerance: float


@dataclass(frozen=True)
class ForwardPass:
    """Input and output of a Megatron model, [1, tokens] and [tokens, vocabulary], on the CPU."""

    tokens: Tensor
    logits: Tensor


def run_megatron(core: Any, config: Any) -> ForwardPass:
    """Run Megatron's module, with its adapters if it has any, on random tokens."""
    import torch

    count, device = _choose_token_count(config, sum(p.numel() for p in core.parameters())), _device()
    tokens = torch.randint(0, config.vocab_size, (1, count), generator=torch.Generator().manual_seed(7))
    nemo_fixes.apply_fixes(core)
    with _set_evaluation_mode(core), _convert_to_fp32(core, core.decoder.layers, device):
        logits = core(tokens.to(device), torch.arange(count, device=device)[None], None)[0].float().cpu()
    return ForwardPass(tokens, logits)


def require_equal(hf_model: Any, core: Any, megatron: ForwardPass, what: str) -> Outcome:
    """Compare a transformers model and a Megatron model.

    Args:
        hf_model: the transformers model.
        core: Megatron's module.
        megatron: its forward pass; for a model with adapters, before they were merged.
        what: the name of the comparison for messages.

    Raises:
        UserError: they compute different logits, or use different rotary frequencies.
    """
    _compare_frequencies(hf_model, core, what)
    device, count = _device(), megatron.tokens.shape[1]
    with _set_evaluation_mode(hf_model), _convert_to_fp32(hf_model, hf_model.model.layers, device):
        right = hf_model(megatron.tokens.to(device), use_cache=False).logits[0].float().cpu()
    scale = right.abs().max().item()
    difference = (megatron.logits[:, : right.shape[1]] - right).abs().max().item() / max(scale, 1e-12)
    outcome = Outcome(count, difference, TOLERANCE if device.type == "cpu" else GPU_TOLERANCE)
    if not difference <= outcome.tolerance:  # true for NaN
        raise UserError(
            f"{what}: NeMo and transformers compute different functions: on {count} tokens the logits differ by "
            f"{difference:.1e} times the largest, but only {outcome.tolerance:.0e} is allowed; nothing was written",
            "--no-forward-check converts it nevertheless, without the comparison",
        )
    return outcome


def _device() -> torch.device:
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


def _compare_frequencies(hf_model: Any, core: nn.Module, what: str) -> None:
    """Compare rotary frequencies; those of latent attention are only covered by the forward pass."""
    for name, (hf, megatron) in _find_rotary_modules(hf_model, core).items():
        right, our_logits = hf.inv_freq.double().cpu(), megatron.inv_freq.double().cpu()
        factor = getattr(megatron, "seq_len_interpolation_factor", None)
        if factor:
            our_logits = our_logits / factor
        largest_error = float("inf")
        if right.shape == our_logits.shape:
            largest_error = ((right - our_logits).abs() / right.abs().clamp_min(1e-30)).max().item()
        if not largest_error <= FREQUENCY_TOLERANCE:
            raise UserError(
                f"{what}: NeMo's {name} frequencies differ from transformers' by {largest_error:.1e}; "
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
def _convert_to_fp32(model: nn.Module, layers: Any, device: torch.device) -> Iterator[None]:
    """Convert each layer to fp32 while it computes, and everything outside of the layers for the entire pass."""
    import torch

    layers = list(layers)
    inner_modules = {id(module) for layer in layers for module in layer.modules()}
    with ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "input_in_bf16"):  # Megatron's softmax converts its result
                stack.enter_context(_keep_softmax_fp32(module))
            if id(module) not in inner_modules:
                stack.enter_context(_cast(module, device, own=True))
        for layer in layers:
            opened: list[Any] = []

            def before(module: nn.Module, *_: Any, opened: list[Any] = opened) -> None:
                opened.append(_cast(module, device, own=False))
                opened[-1].__enter__()

            def after(*_: Any, opened: list[Any] = opened) -> None:
                opened.pop().__exit__(None, None, None)

            stack.callback(layer.register_forward_pre_hook(before).remove)
            stack.callback(layer.register_forward_hook(after).remove)
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


@contextmanager
def _cast(module: nn.Module, device: torch.device, *, own: bool) -> Iterator[None]:
    """Convert all tensors of a module (`own`: without its children) to fp32 on `device` within the block."""
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
