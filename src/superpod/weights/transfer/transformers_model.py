"""The transformers side of a conversion: the model that an import is held against, and that an export fills."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.planner.formats.hf_config import with_rope_scaling
from superpod.weights.families.nemo_class import FETCH, read_config
from superpod.weights.transfer import hf_folder

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel

ATTENTION = "eager"
"""Attention of the reference: the others leave out Gemma 2's soft caps and gpt-oss's sinks."""


def load_reference(folder: Path) -> tuple[Any, list[str]]:
    """The model of a folder in the number format of its files, and notes on tensors that transformers leaves out.

    Raises:
        UserError: a tensor is missing, left over, or of another shape; or transformers cannot read the folder.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = read_hf_config(folder)
    dtype = getattr(torch, hf_folder.find_dtype(folder, hf_folder.stated_dtype(read_config(folder))))
    options: dict[str, Any] = {}
    if getattr(config, "quantization_config", None):  # gpt-oss alone comes so far
        from transformers.utils.quantization_config import Mxfp4Config

        options, dtype = {"quantization_config": Mxfp4Config(dequantize=True)}, torch.bfloat16
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            torch_dtype=dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            **options,
        )
    except Exception as error:  # whatever transformers makes of a broken folder
        raise UserError(f"transformers cannot read {folder}: {_first_words(error)}", FETCH) from None
    model, info = loaded
    notes = _account(folder, model, info)
    if options:
        config.quantization_config = None
    return model, notes


def _first_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _account(folder: Path, model: Any, info: dict[str, Any]) -> list[str]:
    """Refuse tensors that are missing or left over; a note names what is left out knowingly."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"{folder} lacks {', '.join(missing[:6])}, which transformers would draw at random", FETCH)
    if mismatched := [str(entry[0]) for entry in info.get("mismatched_keys") or []]:
        raise UserError(f"{folder}: {', '.join(mismatched[:6])} has another shape than config.json says", FETCH)
    _tied_alike(folder, model)
    kept = set(model.state_dict()) | {"lm_head.weight"}
    layers = model.config.num_hidden_layers
    left = {name for name in (*hf_folder.read_tensors(folder), *info["unexpected_keys"]) if name not in kept}
    packed = model.config.model_type == "gpt_oss"  # the one family in MXFP4
    left = {name for name in left if not (packed and _packed(name)) and not hf_folder.DERIVED.fullmatch(name)}
    ahead = {name for name in left if model.config.model_type == "deepseek_v3" and _layer(name) >= layers}
    if rest := sorted(left - ahead):
        raise UserError(
            f"{folder} holds {', '.join(rest[:6])}, which a {model.config.model_type} of transformers does not have",
            "the folder and its config.json do not belong together",
        )
    return [f"left out: the {len(ahead)} tensors of multi-token prediction, as transformers does"] if ahead else []


def _tied_alike(folder: Path, model: Any) -> None:
    """Refuse an output matrix of its own in a folder whose configuration ties it: transformers would not read it."""
    import torch

    names = ("lm_head.weight", "model.embed_tokens.weight")
    if not model.config.tie_word_embeddings:
        return
    matrices: dict[str, torch.Tensor] = {}
    for file in hf_folder.find_weights(folder):
        matrices |= _read(file, names)
    if len(matrices) == len(names) and not torch.equal(*(matrices[name] for name in names)):
        raise UserError(
            f"{folder}: tie_word_embeddings is true, and lm_head.weight is not the embedding; it would be lost",
            "set tie_word_embeddings to false where the output matrix is meant",
        )


def _read(file: Path, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Those of the tensors that a file of weights holds; no code from it is run."""
    import torch
    from safetensors import safe_open

    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as stream:
            return {name: stream.get_tensor(name) for name in names if name in stream.keys()}  # noqa: SIM118
    zipped = zipfile.is_zipfile(file)  # older files cannot be mapped
    held = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    return {name: held[name] for name in names if name in held}


def _packed(name: str) -> bool:
    """Whether a tensor is half of an MXFP4 one: numbers or scales."""
    return name.endswith(("_blocks", "_scales"))


def _layer(name: str) -> int:
    words = name.split(".")
    return int(words[2]) if name.startswith("model.layers.") and words[2].isdigit() else -1


def read_hf_config(folder: Path) -> Any:
    """transformers' configuration of a folder, newer spellings read as `nearest` reads them.

    Raises:
        UserError: transformers cannot read it.
    """
    from transformers import AutoConfig

    raw = read_config(folder)
    stated = with_rope_scaling(raw)
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if stated is not raw:
            config = type(config).from_dict({**stated, "rope_parameters": None})
    except Exception as error:  # whatever transformers makes of a broken configuration
        raise UserError(f"transformers cannot read {folder / 'config.json'}: {_first_words(error)}", FETCH) from None
    return config


def generation_config(folder: Path, model: Any) -> GenerationConfig:
    """That of the folder, or transformers' default for the model where it has none or a broken one."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError):
        return GenerationConfig.from_model_config(model.config)


def build_uninitialized(config: Any) -> Any:
    """The transformers model of a configuration, its numbers not set."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import no_init_weights

    with no_init_weights():
        return AutoModelForCausalLM.from_config(
            config, torch_dtype=torch.float32, attn_implementation=ATTENTION, trust_remote_code=False
        )


def build_with_tensors(config: Any, tensors: dict[str, torch.Tensor], tied: bool) -> PreTrainedModel:
    """The model with these tensors; what else it has, such as rotary frequencies, transformers computes.

    Raises:
        UserError: a parameter is left without one.
    """
    import torch

    from superpod.weights.transfer import convert_tensors

    model = build_uninitialized(config)
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:  # nothing uninitialised may stay, and no memory be taken twice
                module._parameters[name] = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    for name, tensor in tensors.items():
        parent, _, last = name.rpartition(".")
        module: Any = model.get_submodule(parent)
        if last in module._buffers:
            module._buffers[last] = tensor
        else:
            module._parameters[last] = torch.nn.Parameter(tensor, requires_grad=False)
    if tied:
        model.tie_weights()
    unset = [name for name, tensor in convert_tensors.get_tensors(model).items() if not tensor.numel()]
    if unset:
        raise UserError(f"no NeMo tensor stands for {', '.join(unset[:6])}", convert_tensors.WHY)
    return model


def save_model(model: Any, out: Path, dtype: torch.dtype) -> None:
    """Write the model in a number format as transformers does, in shards.

    What DeepSeek-V3's router keeps in fp32 stays so.
    """
    wide = {name: buffer for name, buffer in model.named_buffers() if hf_folder.ALWAYS_FP32 in name}
    model.to(dtype)
    for name, buffer in wide.items():
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._buffers[last] = buffer
    import torch

    if dtype is torch.float16:  # which ends at 65,504
        large = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
        if large:
            raise UserError(f"{large[0]} holds numbers beyond float16's range", "--dtype bfloat16")
    model.generation_config = _generation_config(model)
    try:
        model.save_pretrained(out)
    except ValueError as error:  # settings of generate() in config.json that contradict one another
        raise UserError(f"transformers cannot write the model: {_first_words(error)}") from None


def _generation_config(model: Any) -> GenerationConfig:
    """The ids only: a folder's own settings are copied as a file. The -1 of old Llamas means none."""
    from transformers import GenerationConfig

    ids = {name: getattr(model.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return GenerationConfig(**{name: None if value == -1 else value for name, value in ids.items()})
