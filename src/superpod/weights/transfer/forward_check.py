"""The proof of an import or export: one forward pass of the NeMo model, held against transformers. Needs torch.

Both models keep their weights in their own number format; layer by layer they are widened to fp32 for the pass, so that
rounding hides nothing and memory grows by one layer, the embeddings and the output matrix only.
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
"""Largest difference of logits over the largest logit, in fp32 on CPUs."""
GPU_TOLERANCE = 2e-2
"""On a GPU, whose matrix products of Transformer Engine take TF32 (10 bits of mantissa) for fp32."""
TOKENS = 48
"""So many tokens at least; with a sliding window a few more than its width, up to `MOST_TOKENS`."""
MOST_TOKENS, MOST_TOKENS_LARGE = 2112, 512
LARGE = 2_000_000_000
"""Parameters from which the pass is kept short: a wider window is then compared by configuration only."""
FREQUENCIES = 1e-5
"""Largest relative difference of a rotary frequency: it reaches every position, also those beyond the pass."""


@dataclass(frozen=True)
class Outcome:
    """What the pass showed."""

    tokens: int
    difference: float
    """Largest difference over the largest logit."""
    tolerance: float


@dataclass(frozen=True)
class Pass:
    """What a Megatron model computes: shapes [1, tokens] and [tokens, vocabulary], on the CPU."""

    tokens: Tensor
    logits: Tensor


def run_megatron(core: Any, config: Any) -> Pass:
    """One forward pass of Megatron's module, with its adapters where it has some, over random tokens."""
    import torch

    count, device = _tokens(config, sum(p.numel() for p in core.parameters())), _device()
    tokens = torch.randint(0, config.vocab_size, (1, count), generator=torch.Generator().manual_seed(7))
    nemo_fixes.apply_fixes(core)
    with _evaluating(core), _wide(core, core.decoder.layers, device):
        logits = core(tokens.to(device), torch.arange(count, device=device)[None], None)[0].float().cpu()
    return Pass(tokens, logits)


def require_equal(theirs: Any, core: Any, ours: Pass, what: str) -> Outcome:
    """Compare a transformers model and a Megatron model.

    Args:
        theirs: the transformers model.
        core: Megatron's module.
        ours: what it computes; of one with adapters before they were merged.
        what: names the comparison in messages.

    Raises:
        UserError: they compute different logits, or rotate by different frequencies.
    """
    _compare_frequencies(theirs, core, what)
    device, count = _device(), ours.tokens.shape[1]
    with _evaluating(theirs), _wide(theirs, theirs.model.layers, device):
        right = theirs(ours.tokens.to(device), use_cache=False).logits[0].float().cpu()
    scale = right.abs().max().item()
    difference = (ours.logits[:, : right.shape[1]] - right).abs().max().item() / max(scale, 1e-12)
    outcome = Outcome(count, difference, TOLERANCE if device.type == "cpu" else GPU_TOLERANCE)
    if not difference <= outcome.tolerance:  # also where it is no number
        raise UserError(
            f"{what}: NeMo computes another function than transformers: on {count} tokens the logits differ by "
            f"{difference:.1e} of the largest, and {outcome.tolerance:.0e} is allowed; nothing is written",
            "--no-forward-check writes it all the same, and says so",
        )
    return outcome


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients."""
    import torch

    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was)


def _tokens(config: Any, parameters: int) -> int:
    window = config.window_size
    width = (window if isinstance(window, int) else window[0]) if window else 0
    return max(TOKENS, min(width + 24, MOST_TOKENS_LARGE if parameters > LARGE else MOST_TOKENS))


def _compare_frequencies(theirs: Any, core: nn.Module, what: str) -> None:
    """Rotary frequencies and yarn's factor; latent attention has its own and is left to the pass."""
    for name, (hf, megatron) in _rotaries(theirs, core).items():
        right, ours = hf.inv_freq.double().cpu(), megatron.inv_freq.double().cpu()
        if factor := getattr(megatron, "seq_len_interpolation_factor", None):
            ours = ours / factor
        worst = float("inf")
        if right.shape == ours.shape:
            worst = ((right - ours).abs() / right.abs().clamp_min(1e-30)).max().item()
        if not worst <= FREQUENCIES:
            raise UserError(
                f"{what}: NeMo's {name} frequencies differ from transformers' by {worst:.1e}; none is written"
            )


def _rotaries(theirs: Any, core: Any) -> dict[str, tuple[Any, Any]]:
    rotary, own = getattr(theirs.model, "rotary_emb", None), getattr(core, "rotary_pos_emb", None)
    if rotary is None or own is None or hasattr(own, "inv_freq_extra"):  # the last is yarn's, made anew in each pass
        return {}
    pairs = {"rotary": (rotary, own)}
    local = getattr(theirs.model, "rotary_emb_local", None)
    return pairs | ({"local rotary": (local, own.rope_local)} if local is not None else {})


@contextmanager
def _wide(model: nn.Module, layers: Any, device: torch.device) -> Iterator[None]:
    """Widen a layer to fp32 while it computes, and all that is outside of the layers for the whole pass."""
    import torch

    layers = list(layers)
    inside = {id(module) for layer in layers for module in layer.modules()}
    with ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "input_in_bf16"):  # Megatron's softmax narrows its result
                stack.enter_context(_wide_softmax(module))
            if id(module) not in inside:
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
    """fp32 on `device` for all tensors of a module (`own`: not those of its children), and then as they were."""
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
def _wide_softmax(module: Any) -> Iterator[None]:
    names = ("input_in_bf16", "input_in_fp16", "input_in_float16")
    was = {name: getattr(module, name) for name in names}
    for name in names:
        setattr(module, name, False)
    try:
        yield
    finally:
        for name, value in was.items():
            setattr(module, name, value)
