"""Move weights between a transformers model and a Megatron model by the table of `mapping`, with an account of both.

Import: every source tensor is used, every target tensor set. Export: the same the other way. Otherwise refused by name.
Needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.weights.transfer import mapping

if TYPE_CHECKING:
    from torch import Tensor, nn

LISTED = 6
"""So many names in a message."""
WHY = "nothing is written: the model would be another one"


def get_tensor_names(core: nn.Module) -> list[str]:
    """Names of the Megatron model's parameters and saved buffers."""
    return [name for name, _ in core.named_parameters()] + [name for name, _ in _saved_buffers(core)]


def to_megatron(source: Mapping[str, Tensor], core: nn.Module, config: Any, kind: str) -> None:
    """Set every tensor of the Megatron model `core`.

    Args:
        source: the transformers model's parameters and saved buffers, by name; tied ones may be there or not.
        core: parameters may be on the meta device.
        config: Megatron's configuration.
        kind: `model_type`.

    Raises:
        UserError: a tensor of either side is left over, has another shape, or holds NaN or infinity.
    """
    import torch

    table = _table(core, config, kind)
    used: set[mapping.Piece] = set()
    for name, old in _slots(core):
        rule = table[name]
        parts = [_part(source, piece) for piece in rule.pieces]
        new = rule.join(parts).contiguous()
        if new.shape != old.shape:
            what = ", ".join(f"{piece.name} {list(part.shape)}" for piece, part in zip(rule.pieces, parts, strict=True))
            raise UserError(f"{what} gives {list(new.shape)}, and NeMo's {name} is {list(old.shape)}", WHY)
        if not bool(torch.isfinite(new).all()):
            raise UserError(f"{rule.pieces[0].name} holds NaN or infinity", "fetch the model anew")
        used |= set(rule.pieces)
        _set(core, name, new.to(old.dtype))
    left = _left_over(source, used, tied=bool(config.share_embeddings_and_output_weights))
    if left:
        raise UserError(f"NeMo's {type(core).__name__} has no place for {_list(left)}", WHY)


def from_megatron(
    state: Mapping[str, Tensor], config: Any, kind: str, expected: Mapping[str, Tensor], tied: bool
) -> dict[str, Tensor]:
    """The transformers model's tensors from a Megatron model's.

    Args:
        state: the Megatron model's tensors by name.
        config: Megatron's configuration.
        kind: `model_type`.
        expected: the transformers model's own parameters and saved buffers, for names and shapes; may be on meta.
        tied: whether the transformers model's output matrix is its embedding.

    Raises:
        UserError: a tensor of either side is left over, has another shape, or holds NaN or infinity.
    """
    import torch

    try:
        table = mapping.rules(state, config, kind)
    except mapping.Unmapped as unmapped:
        raise UserError(str(unmapped), WHY) from None
    made: dict[mapping.Piece, Tensor] = {}
    for name, rule in table.items():
        made |= dict(zip(rule.pieces, rule.split(state[name]), strict=True))
    tensors = _whole(made)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    same = torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    if tied and not same:
        raise UserError("the output matrix is no longer the embedding, and the Hugging Face model ties them", WHY)
    tensors = {name: tensor for name, tensor in tensors.items() if name in expected or not (tied and name == HEAD)}
    if extra := sorted(tensors.keys() - expected.keys()):
        raise UserError(f"the Hugging Face model has no place for {_list(extra)}", WHY)
    if missing := sorted(expected.keys() - tensors.keys()):
        raise UserError(f"no NeMo tensor stands for {_list(missing)}", WHY)
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{list(tensor.shape)}, and the Hugging Face model's is {list(expected[name].shape)}"
            raise UserError(f"{name} would be {shapes}", WHY)
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{name} holds NaN or infinity", "take an earlier checkpoint")
    return tensors


HEAD = "lm_head.weight"


def get_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, each name once, tied ones under every name."""
    state = {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}
    return state | {name: buffer.detach() for name, buffer in _saved_buffers(model)}


def _table(core: nn.Module, config: Any, kind: str) -> dict[str, mapping.Rule]:
    try:
        return mapping.rules(get_tensor_names(core), config, kind)
    except mapping.Unmapped as unmapped:
        raise UserError(str(unmapped), WHY) from None


def _part(source: Mapping[str, Tensor], piece: mapping.Piece) -> Tensor:
    if piece.name not in source:
        raise UserError(f"the Hugging Face model has no {piece.name}, which NeMo's class computes with", WHY)
    tensor = source[piece.name]
    return tensor if piece.expert is None else tensor[piece.expert]


def _left_over(source: Mapping[str, Tensor], used: set[mapping.Piece], tied: bool) -> list[str]:
    """Source tensors, or experts of one, that no target took."""
    whole = {piece.name for piece in used if piece.expert is None}
    sliced: dict[str, set[int]] = {}
    for piece in used:
        if piece.expert is not None:
            sliced.setdefault(piece.name, set()).add(piece.expert)
    left: list[str] = []
    for name, tensor in source.items():
        if name in whole or (tied and name == HEAD):
            continue
        if name not in sliced:
            left.append(name)
        elif missing := set(range(tensor.shape[0])) - sliced[name]:
            left.append(f"{name}[{min(missing)}]")
    return left


def _whole(made: Mapping[mapping.Piece, Tensor]) -> dict[str, Tensor]:
    """Experts stacked into the tensor that holds all of them."""
    import torch

    tensors = {piece.name: part.contiguous() for piece, part in made.items() if piece.expert is None}
    stacks: dict[str, dict[int, Tensor]] = {}
    for piece, part in made.items():
        if piece.expert is not None:
            stacks.setdefault(piece.name, {})[piece.expert] = part
    for name, parts in stacks.items():
        tensors[name] = torch.stack([parts[expert] for expert in range(len(parts))])
    return tensors


def _slots(core: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from list(core.named_parameters())
    yield from _saved_buffers(core)


def _saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    out: list[tuple[str, Tensor]] = []
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                out.append((f"{prefix}.{name}" if prefix else name, buffer))
    return out


def _set(core: nn.Module, name: str, value: Tensor) -> None:
    """Put `value` in the place of a parameter or buffer, with the marks that Megatron has put on it."""
    import torch

    parent, _, last = name.rpartition(".")
    module: Any = core.get_submodule(parent)
    if last in module._buffers:
        module._buffers[last] = value
        return
    old: Any = module._parameters[last]
    new: Any = torch.nn.Parameter(value, requires_grad=old.requires_grad)
    for key, mark in vars(old).items():  # tensor_model_parallel, partition_dim, allreduce, sequence_parallel, ...
        setattr(new, key, mark)
    module._parameters[last] = new


def _list(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
