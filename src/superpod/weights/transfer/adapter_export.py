"""Exports a trained adapter in PEFT's format: adapter_config.json and adapter_model.safetensors. Needs NeMo and peft.

NeMo adapts Megatron's matrices, which fuse queries, keys and values, and gate and up projections; PEFT adapts the
separate matrices of transformers. To determine the rows of a fused matrix that belong to a matrix of transformers, this
module converts matrices that contain their own row and column numbers, with the table for weights (`mapping`). NeMo
2.7.3 itself can export adapters only for Llama and gpt-oss.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.common import atomic_folder, custom_code
from superpod.errors import UserError
from superpod.weights.transfer import conversion, load, mapping, transformers_model

if TYPE_CHECKING:
    import torch
    from nemo.collections.llm import GPTModel
    from peft import LoraConfig
    from transformers import PreTrainedModel

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of every name in `WEIGHTS` (peft 0.21, PeftModel)."""
_ROW_COLUMN = 0
"""Column of a position matrix with the row numbers; every other column contains its own number."""


@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix of a transformers model that has an adapter."""

    name: str
    """Name of the module, such as model.layers.0.self_attn.q_proj."""
    layer: Any
    """NeMo's LoRALinear or DoRALinear that contains the matrix."""
    rows: torch.Tensor
    """Its rows in that layer's matrix, in order."""


def export_adapter(checkpoint: Path, out: Path, like: Path | None, base: str, *, chat: bool = False) -> int:
    """Write the adapter of a NeMo checkpoint to the folder `out`, and return the number of adapted matrices.

    After a failure, `out` does not exist.

    Args:
        checkpoint: the NeMo checkpoint of the adapter.
        out: the folder to write.
        like: Hugging Face folder of the base model; None for the files kept by its import.
        base: name or folder of the base model, written to adapter_config.json.
        chat: whether to add the default chat template to a tokenizer that has none.

    Raises:
        UserError: `out` exists, the checkpoint has no adapter, or PEFT cannot represent the adapter.
    """
    conversion.require_new_output(out)
    checkpoint = checkpoint.absolute()
    original = load.find_base_checkpoint(checkpoint)
    if original is None:
        raise UserError(*NO_ADAPTER)
    like = like or conversion.find_kept_files(original)
    if like is None:
        raise UserError(f"{original} has no copy of its Hugging Face config.json", "pass its folder with --like")
    import torch

    with atomic_folder.create_atomically(out) as temporary:
        count = write_adapter(load.load_model(checkpoint, torch.float32), like, base, temporary)
        _copy_tokenizer(like, temporary, chat)
    return count


NO_ADAPTER = ("the checkpoint has no adapter", "only lora and dora recipes train one; omit --adapter")


def _copy_tokenizer(like: Path, out: Path, chat: bool) -> None:
    """Copy the tokenizer of `like` without custom code; with `chat`, add the default chat template if it has none."""
    from superpod.data.tokens import tokenizer

    for file in tokenizer.list_files(like):
        if file.name != "config.json":  # with it, the folder would look like a complete model
            shutil.copyfile(file, out / file.name)
    if chat:
        conversion.save_plain_template(out)
    custom_code.remove_keys(out)


def write_adapter(model: GPTModel, like: Path, base: str, out: Path) -> int:
    """Write the adapter of a loaded model to the folder `out`, and return the number of adapted matrices.

    Args:
        model: a model from `load.load_model`, whose adapter may already be merged.
        like: Hugging Face folder with the config.json of the base model.
        base: name or folder of the base model, written to adapter_config.json.
        out: an empty or nonexistent folder.

    Raises:
        UserError: the model has no adapter, PEFT cannot represent it, or it contains NaN or infinity.
    """
    import torch
    from safetensors.torch import save_file

    with torch.device("meta"):
        target: PreTrainedModel = transformers_model.build_uninitialized(transformers_model.read_hf_config(like))
    adapted = _locate_rows(model, target)
    tensors: dict[str, torch.Tensor] = {}
    for part in adapted:
        adapter, name = part.layer.adapter, PREFIX + part.name
        tensors[f"{name}.lora_A.weight"] = adapter.linear_in.weight.detach().float().cpu().clone()
        tensors[f"{name}.lora_B.weight"] = adapter.linear_out.weight.detach().float().cpu()[part.rows].contiguous()
        if _is_dora(part.layer):
            magnitude = adapter.get_weight_magnitude().detach().float().cpu()
            tensors[f"{name}.lora_magnitude_vector"] = magnitude[part.rows].contiguous()
    nonfinite_names = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if nonfinite_names:
        raise UserError(f"the adapter contains NaN or infinity, first in {nonfinite_names[0]}")
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    build_lora_config(adapted, target, base).save_pretrained(str(out))
    return len(adapted)


def build_lora_config(adapted: list[AdaptedMatrix], target: PreTrainedModel, base: str) -> LoraConfig:
    """Return PEFT's configuration of the adapter. Raises UserError if the layers have different ranks or alphas."""
    from peft import LoraConfig

    sizes = {(part.layer.adapter.dim, part.layer.adapter.alpha) for part in adapted}
    if len(sizes) > 1:
        raise UserError(f"the adapter's layers have different (rank, alpha): {sorted(sizes)}; PEFT supports only one")
    rank, alpha = sizes.pop()
    dropout = getattr(adapted[0].layer.adapter, "dropout", None)
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout.p if dropout is not None else 0.0,
        target_modules=choose_target_modules([part.name for part in adapted], _list_linear_layers(target)),
        use_dora=_is_dora(adapted[0].layer),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )


def choose_target_modules(adapted: list[str], linears: list[str]) -> list[str]:
    """Return PEFT's `target_modules`: the last parts of the adapted names if they identify them, else complete names.

    vLLM and other servers read only the last part, such as q_proj. `linears` are the names of all linear layers.
    """
    last = {name.rpartition(".")[2] for name in adapted}
    target_names = [name for name in linears if name.rpartition(".")[2] in last]
    return sorted(last) if set(target_names) == set(adapted) else sorted(adapted)


def _locate_rows(model: GPTModel, target: PreTrainedModel) -> list[AdaptedMatrix]:
    """Return the adapted matrices of the transformers model, with their rows in NeMo's matrices.

    Raises:
        UserError: there is no adapter, or a matrix is not a separate linear layer in transformers, or has another order
            of columns.
    """
    layers, state, kind = _list_adapted_matrices(model), load.get_base_state_dict(model), target.config.model_type
    if not layers:
        raise UserError(*NO_ADAPTER)
    linears, located = set(_list_linear_layers(target)), list[AdaptedMatrix]()
    try:
        table = mapping.build_rules(state, model.config, kind)
    except mapping.UnmappedError as unmapped:
        raise UserError(f"PEFT cannot represent this adapter: {unmapped}", EXPORT_MERGED) from None
    for name, layer in layers:
        rule = table[name]
        for piece, part in zip(rule.pieces, rule.split(_build_position_matrix(state[name])), strict=True):
            rows, module = _read_row_numbers(part), piece.name.removesuffix(".weight")
            if rows is None or piece.expert is not None or module not in linears:
                raise UserError(
                    f"PEFT cannot represent this adapter: {name} is {piece.name} in transformers' {kind}, which is not "
                    "a separate linear layer",
                    EXPORT_MERGED,
                )
            located.append(AdaptedMatrix(module, layer, rows))
    return located


EXPORT_MERGED = "export the merged model, or train with peft.target_modules that contain only attention layers"


def _list_adapted_matrices(model: GPTModel) -> list[tuple[str, Any]]:
    """Return (name in `load.get_base_state_dict`, layer) of each adapted matrix. Grouped experts share a layer."""
    layers: list[tuple[str, Any]] = []
    for name, layer in load.find_adapted_layers(model):
        is_single = hasattr(layer.to_wrap, "weight")
        count = 1 if is_single else layer.to_wrap.num_gemms
        layers += [(f"{name}.weight{'' if is_single else n}", layer) for n in range(count)]
    return layers


def _is_dora(layer: object) -> bool:
    return hasattr(getattr(layer, "adapter", None), "get_weight_magnitude")


def _build_position_matrix(weight: torch.Tensor) -> torch.Tensor:
    """Return an FP32 matrix of the shape of `weight` with row and column numbers, which are exact up to 2^24."""
    import torch

    rows, columns = weight.shape
    positions = torch.arange(columns, dtype=torch.float32).repeat(rows, 1)
    positions[:, _ROW_COLUMN] = torch.arange(rows, dtype=torch.float32)
    return positions


def _read_row_numbers(part: torch.Tensor) -> torch.Tensor | None:
    """Return the row numbers in a part of a position matrix; None if its columns are not in order."""
    import torch

    columns = torch.arange(1, part.shape[-1], dtype=part.dtype)
    if part.dim() != 2 or not torch.equal(part[:, 1:], columns.expand(len(part), -1)):
        return None
    return part[:, _ROW_COLUMN].long()


def _list_linear_layers(target: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers of the transformers model, which PEFT can adapt."""
    import torch

    return [name for name, module in target.named_modules() if isinstance(module, torch.nn.Linear)]
