"""Write a trained adapter in PEFT's format: adapter_config.json and adapter_model.safetensors. Needs NeMo and peft.

NeMo adapts Megatron's matrices, where queries, keys and values are one and gate and up are one; PEFT adapts those of
transformers. NeMo 2.7.3 exports Llama's and gpt-oss's to PEFT only. Here the table by which whole weights are exported
(`mapping`) says which rows of which matrix become which: it is given matrices whose numbers are their own places.
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
"""Before every name in `WEIGHTS` (peft 0.21, PeftModel)."""
_ROW = 0
"""Column of a marked matrix that holds the row's number; every other column holds its own number."""


@dataclass(frozen=True)
class Adapted:
    """A matrix of transformers' with an adapter."""

    name: str
    """Of the module: model.layers.0.self_attn.q_proj."""
    layer: Any
    """NeMo's LoRALinear or DoRALinear that the matrix is a part of."""
    rows: torch.Tensor
    """Which rows of that layer's matrix it consists of, in order."""


def export(checkpoint: Path, out: Path, like: Path | None, base: str, *, chat: bool = False) -> int:
    """Write the adapter of a NeMo checkpoint to the new folder `out`; a failure leaves nothing there.

    Args:
        checkpoint: an adapter's.
        out: the folder to write.
        like: Hugging Face folder of the base model; None: what the import kept of it.
        base: name or folder of the base model, for whoever loads the adapter.
        chat: a tokenizer without a chat template gets the plain one.

    Raises:
        UserError: `out` exists, the checkpoint is no adapter's, or PEFT has no way to say it.
    """
    conversion.require_new_output(out)
    checkpoint = checkpoint.absolute()
    original = load.find_base_checkpoint(checkpoint)
    if original is None:
        raise UserError(*NO_ADAPTER)
    like = like or conversion.find_kept_files(original)
    if like is None:
        raise UserError(f"{original} keeps no config.json of its Hugging Face folder", "name that folder with --like")
    import torch

    with atomic_folder.complete_or_absent(out) as temporary:
        count = write(load.load_model(checkpoint, torch.float32), like, base, temporary)
        _copy_tokenizer(like, temporary, chat)
    return count


NO_ADAPTER = ("the checkpoint has no adapter", "only lora and dora recipes train one; leave out --adapter")


def _copy_tokenizer(like: Path, out: Path, chat: bool) -> None:
    """With the chat template that the adapter was trained on."""
    from superpod.data.tokens import tokenizer

    for file in tokenizer.files(like):
        if file.name != "config.json":  # of the base model: beside an adapter's it would look like a whole model
            shutil.copyfile(file, out / file.name)
    if chat:
        conversion.save_plain_template(out)
    custom_code.drop(out)


def write(model: GPTModel, like: Path, base: str, out: Path) -> int:
    """Write the adapter of a loaded model to the folder `out`; returns how many matrices of transformers' it adapts.

    Args:
        model: as `load.load_model` gives it, with its adapter; merged or not.
        like: a Hugging Face folder with the config.json of the base model.
        base: name or folder of the base model, for whoever loads the adapter.
        out: an empty folder, or none yet.

    Raises:
        UserError: there is no adapter, or PEFT has no way to say it.
    """
    import torch
    from safetensors.torch import save_file

    with torch.device("meta"):
        target: PreTrainedModel = transformers_model.build_uninitialized(transformers_model.read_hf_config(like))
    adapted = _placed(model, target)
    tensors: dict[str, torch.Tensor] = {}
    for part in adapted:
        adapter, name = part.layer.adapter, PREFIX + part.name
        tensors[f"{name}.lora_A.weight"] = adapter.linear_in.weight.detach().float().cpu().clone()
        tensors[f"{name}.lora_B.weight"] = adapter.linear_out.weight.detach().float().cpu()[part.rows].contiguous()
        if _is_dora(part.layer):
            magnitude = adapter.get_weight_magnitude().detach().float().cpu()
            tensors[f"{name}.lora_magnitude_vector"] = magnitude[part.rows].contiguous()
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise UserError(f"the adapter holds numbers that are none (NaN or infinite), first in {broken[0]}")
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    config(adapted, target, base).save_pretrained(str(out))
    return len(adapted)


def config(adapted: list[Adapted], target: PreTrainedModel, base: str) -> LoraConfig:
    """PEFT's description of the adapter.

    Raises:
        UserError: layers differ in rank or scale.
    """
    from peft import LoraConfig

    sizes = {(part.layer.adapter.dim, part.layer.adapter.alpha) for part in adapted}
    if len(sizes) > 1:
        raise UserError(f"the adapter's layers differ in (rank, alpha): {sorted(sizes)}; one pair is exported only")
    rank, alpha = sizes.pop()
    dropout = getattr(adapted[0].layer.adapter, "dropout", None)
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout.p if dropout is not None else 0.0,
        target_modules=modules([part.name for part in adapted], _linears(target)),
        use_dora=_is_dora(adapted[0].layer),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )


def modules(adapted: list[str], linears: list[str]) -> list[str]:
    """`target_modules`: last names such as q_proj where every layer of that name is adapted, else the whole names.

    vLLM and others that serve adapters look at last names.
    """
    last = {name.rpartition(".")[2] for name in adapted}
    meant = [name for name in linears if name.rpartition(".")[2] in last]
    return sorted(last) if set(meant) == set(adapted) else sorted(adapted)


def _placed(model: GPTModel, target: PreTrainedModel) -> list[Adapted]:
    """Where every row of every adapted matrix is in transformers' model.

    Raises:
        UserError: no adapter, or a matrix that is no linear layer there or has its columns in another order.
    """
    layers, state, kind = _layers(model), load.base_state_dict(model), target.config.model_type
    if not layers:
        raise UserError(*NO_ADAPTER)
    linears, placed = set(_linears(target)), list[Adapted]()
    try:
        table = mapping.rules(state, model.config, kind)
    except mapping.Unmapped as unmapped:
        raise UserError(f"PEFT cannot say this adapter: {unmapped}", MERGED) from None
    for name, layer in layers:
        rule = table[name]
        for piece, part in zip(rule.pieces, rule.split(_marked(state[name])), strict=True):
            rows, module = _rows(part), piece.name.removesuffix(".weight")
            if rows is None or piece.expert is not None or module not in linears:
                raise UserError(
                    f"PEFT cannot say this adapter: {name} is {piece.name} in transformers' {kind}, no linear layer of "
                    "its own",
                    MERGED,
                )
            placed.append(Adapted(module, layer, rows))
    return placed


MERGED = "export it merged; or train with peft.target_modules of the attention alone"


def _layers(model: GPTModel) -> list[tuple[str, Any]]:
    """Names of adapted matrices in `load.base_state_dict`, with their layers; experts of one grouped layer share it."""
    layers: list[tuple[str, Any]] = []
    for name, layer in load.find_adapted_layers(model):
        single = hasattr(layer.to_wrap, "weight")
        count = 1 if single else layer.to_wrap.num_gemms
        layers += [(f"{name}.weight{'' if single else n}", layer) for n in range(count)]
    return layers


def _is_dora(layer: object) -> bool:
    return hasattr(getattr(layer, "adapter", None), "get_weight_magnitude")


def _marked(weight: torch.Tensor) -> torch.Tensor:
    """A matrix of the same shape whose numbers say where they are; float32 holds whole numbers up to 2^24."""
    import torch

    rows, columns = weight.shape
    marks = torch.arange(columns, dtype=torch.float32).repeat(rows, 1)
    marks[:, _ROW] = torch.arange(rows, dtype=torch.float32)
    return marks


def _rows(part: torch.Tensor) -> torch.Tensor | None:
    """The rows that a part of a marked matrix consists of; None where its columns are not in their order."""
    import torch

    columns = torch.arange(1, part.shape[-1], dtype=part.dtype)
    if part.dim() != 2 or not torch.equal(part[:, 1:], columns.expand(len(part), -1)):
        return None
    return part[:, _ROW].long()


def _linears(target: PreTrainedModel) -> list[str]:
    """The linear layers of transformers' model, which are what PEFT adapts."""
    import torch

    return [name for name, module in target.named_modules() if isinstance(module, torch.nn.Linear)]
