"""Converts weights between a transformers model and a Megatron model with the rules of `mapping`. Needs torch.

In both directions, every source tensor must be used and every target tensor must be set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.weights.transfer import mapping

if TYPE_CHECKING:
    from torch import Tensor, nn

MAX_NAMES = 6
"""Maximum number of tensor names in a message."""
UNWRITTEN = "nothing was written, because the result would be a different model"


def get_tensor_names(core: nn.Module) -> list[str]:
    """Return the names of a Megatron model's parameters and saved buffers."""
    return [name for name, _ in (*core.named_parameters(), *_saved_buffers(core))]


def load_into_megatron(source: Mapping[str, Tensor], core: nn.Module, config: Any, kind: str) -> None:
    """Set the parameters and saved buffers of a Megatron model to those of a transformers model.

    Args:
        source: tensors of the transformers model by name; tied ones may be missing.
        core: the Megatron model; its parameters may be on the meta device.
        config: Megatron's configuration.
        kind: `model_type` of the transformers model.

    Raises:
        UserError: a tensor of either model has no counterpart, has a different shape, or contains NaN or infinity.
    """
    import torch

    table = _build_table(get_tensor_names(core), config, kind)
    used: set[mapping.Piece] = set()
    for name, old in (*core.named_parameters(), *_saved_buffers(core)):
        rule = table[name]
        parts = [_get_part(source, piece) for piece in rule.pieces]
        tensor = rule.join(parts).contiguous()
        if tensor.shape != old.shape:
            sources = [f"{piece.name} {list(part.shape)}" for piece, part in zip(rule.pieces, parts, strict=True)]
            shapes = f"shape {list(tensor.shape)}, but NeMo's {name} has shape {list(old.shape)}"
            raise UserError(f"{', '.join(sources)} is converted to {shapes}", UNWRITTEN)
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{rule.pieces[0].name} contains NaN or infinity", "download the model again")
        used |= set(rule.pieces)
        _set_tensor(core, name, tensor.to(old.dtype))
    unused_names = _find_unused(source, used, is_tied=bool(config.share_embeddings_and_output_weights))
    if unused_names:
        raise UserError(f"NeMo's {type(core).__name__} has no counterpart for {_format_names(unused_names)}", UNWRITTEN)


def from_megatron(
    state: Mapping[str, Tensor], config: Any, kind: str, expected: Mapping[str, Tensor], is_tied: bool
) -> dict[str, Tensor]:
    """Return the tensors of a transformers model by name, converted from those of a Megatron model.

    Args:
        state: tensors of the Megatron model by name.
        config: Megatron's configuration.
        kind: `model_type` of the transformers model.
        expected: tensors with the names and shapes of the transformers model; may be on the meta device.
        is_tied: whether the transformers model ties its output matrix to the embedding.

    Raises:
        UserError: a tensor of either model has no counterpart, has a different shape, or contains NaN or infinity.
    """
    import torch

    table = _build_table(state, config, kind)
    parts_by_piece: dict[mapping.Piece, Tensor] = {}
    for name, rule in table.items():
        parts_by_piece |= dict(zip(rule.pieces, rule.split(state[name]), strict=True))
    tensors = _stack_experts(parts_by_piece)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    is_equal = torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    if is_tied and not is_equal:
        raise UserError("the output matrix differs from the embedding, but the Hugging Face model ties them", UNWRITTEN)
    tensors = {name: tensor for name, tensor in tensors.items() if name in expected or not (is_tied and name == HEAD)}
    if extra := sorted(tensors.keys() - expected.keys()):
        raise UserError(f"the Hugging Face model has no counterpart for {_format_names(extra)}", UNWRITTEN)
    if missing := sorted(expected.keys() - tensors.keys()):
        raise UserError(f"NeMo's model has no counterpart for {_format_names(missing)}", UNWRITTEN)
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{list(tensor.shape)}, but in the Hugging Face model it is {list(expected[name].shape)}"
            raise UserError(f"the shape of {name} would be {shapes}", UNWRITTEN)
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{name} contains NaN or infinity", "use an earlier checkpoint")
    return tensors


HEAD = "lm_head.weight"


def get_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and saved buffers of a model by name; a tied one has an entry per name."""
    state = {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}
    return state | {name: buffer.detach() for name, buffer in _saved_buffers(model)}


def _build_table(names: Iterable[str], config: Any, kind: str) -> dict[str, mapping.Rule]:
    """Return the rule for each Megatron tensor by name. Raises UserError if a tensor has none."""
    try:
        return mapping.build_rules(names, config, kind)
    except mapping.UnmappedError as unmapped:
        raise UserError(str(unmapped), UNWRITTEN) from None


def _get_part(source: Mapping[str, Tensor], piece: mapping.Piece) -> Tensor:
    if piece.name not in source:
        raise UserError(f"the Hugging Face model has no {piece.name}, which NeMo's class requires", UNWRITTEN)
    tensor = source[piece.name]
    return tensor if piece.expert is None else tensor[piece.expert]


def _find_unused(source: Mapping[str, Tensor], used_pieces: set[mapping.Piece], is_tied: bool) -> list[str]:
    """Return the names of source tensors, or parts of them, that no target tensor uses."""
    used_names = {piece.name for piece in used_pieces if piece.expert is None}
    used_experts: dict[str, set[int]] = {}
    for piece in used_pieces:
        if piece.expert is not None:
            used_experts.setdefault(piece.name, set()).add(piece.expert)
    unused_names: list[str] = []
    for name, tensor in source.items():
        if name in used_names or (is_tied and name == HEAD):
            continue
        if name not in used_experts:
            unused_names.append(name)
        elif missing := set(range(tensor.shape[0])) - used_experts[name]:
            unused_names.append(f"{name}[{min(missing)}]")
    return unused_names


def _stack_experts(parts_by_piece: Mapping[mapping.Piece, Tensor]) -> dict[str, Tensor]:
    """Return tensors by name; the parts of single experts are stacked into one tensor [experts, ...]."""
    import torch

    tensors = {piece.name: part.contiguous() for piece, part in parts_by_piece.items() if piece.expert is None}
    stacks: dict[str, dict[int, Tensor]] = {}
    for piece, part in parts_by_piece.items():
        if piece.expert is not None:
            stacks.setdefault(piece.name, {})[piece.expert] = part
    for name, parts in stacks.items():
        tensors[name] = torch.stack([parts[expert] for expert in range(len(parts))])
    return tensors


def _saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    out: list[tuple[str, Tensor]] = []
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                out.append((f"{prefix}.{name}" if prefix else name, buffer))
    return out


def _set_tensor(core: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or buffer by `value`, and keep the attributes that Megatron has set on a parameter."""
    import torch

    parent, _, last = name.rpartition(".")
    module: Any = core.get_submodule(parent)
    if last in module._buffers:
        module._buffers[last] = value
        return
    old: Any = module._parameters[last]
    new: Any = torch.nn.Parameter(value, requires_grad=old.requires_grad)
    for key, attribute in vars(old).items():  # tensor_model_parallel, partition_dim, allreduce, sequence_parallel, ...
        setattr(new, key, attribute)
    module._parameters[last] = new


def _format_names(names: list[str]) -> str:
    more_text = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more_text
