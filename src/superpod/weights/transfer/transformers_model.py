"""The transformers side of a conversion: the model that an import is compared with, and that an export fills."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.planner.formats.hf_config import to_transformers4_keys
from superpod.weights.families.nemo_class import FETCH, read_config
from superpod.weights.transfer import hf_folder

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel

ATTENTION = "eager"
"""Attention of the reference: other implementations omit Gemma 2's soft caps and gpt-oss's sinks."""


def load_reference(folder: Path) -> tuple[Any, list[str]]:
    """Return the model of a folder in the data type of its files, and notes on tensors that transformers ignores.

    Raises:
        UserError: a tensor is missing, unknown, or has the wrong shape, or transformers cannot read the folder.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = read_hf_config(folder)
    dtype = getattr(torch, hf_folder.find_dtype(folder, hf_folder.read_dtype(read_config(folder))))
    options: dict[str, Any] = {}
    if getattr(config, "quantization_config", None):  # only gpt-oss: `hf_folder.check` rejects other quantized models
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
    except Exception as error:  # transformers raises many types for a corrupt folder
        raise UserError(f"transformers cannot read {folder}: {_summarize(error)}", FETCH) from None
    model, info = loaded
    notes = _check_tensors(folder, model, info)
    if options:
        config.quantization_config = None
    return model, notes


def _summarize(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _check_tensors(folder: Path, model: Any, info: dict[str, Any]) -> list[str]:
    """Reject missing or unknown tensors; return notes on tensors that are ignored on purpose."""
    missing_names = sorted(info["missing_keys"])
    if missing_names:
        raise UserError(
            f"{folder} lacks {', '.join(missing_names[:6])}, which transformers would initialize randomly", FETCH
        )
    if mismatched := [str(entry[0]) for entry in info.get("mismatched_keys") or []]:
        raise UserError(
            f"{folder}: {', '.join(mismatched[:6])} does not have the shape that config.json specifies", FETCH
        )
    _require_tied(folder, model)
    model_names = set(model.state_dict()) | {"lm_head.weight"}
    layers = model.config.num_hidden_layers
    unused_names = {
        name for name in (*hf_folder.read_tensors(folder), *info["unexpected_keys"]) if name not in model_names
    }
    is_mxfp4_model = model.config.model_type == "gpt_oss"  # the only family in MXFP4
    unused_names = {
        name
        for name in unused_names
        if not (is_mxfp4_model and _is_mxfp4(name)) and not hf_folder.DERIVED.fullmatch(name)
    }
    mtp_names = {
        name for name in unused_names if model.config.model_type == "deepseek_v3" and _layer_number(name) >= layers
    }
    if rest := sorted(unused_names - mtp_names):
        raise UserError(
            f"{folder} contains {', '.join(rest[:6])}, which the {model.config.model_type} model of transformers lacks",
            "the weights in the folder do not match its config.json",
        )
    return (
        [f"ignored the {len(mtp_names)} tensors of multi-token prediction, as transformers does"] if mtp_names else []
    )


def _require_tied(folder: Path, model: Any) -> None:
    """Reject a separate output matrix if the configuration ties it to the embedding: transformers would ignore it."""
    import torch

    names = ("lm_head.weight", "model.embed_tokens.weight")
    if not model.config.tie_word_embeddings:
        return
    matrices: dict[str, torch.Tensor] = {}
    for file in hf_folder.find_weights(folder):
        matrices |= _read_tensors(file, names)
    if len(matrices) == len(names) and not torch.equal(*(matrices[name] for name in names)):
        raise UserError(
            f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from the embedding, and would be lost",
            "set tie_word_embeddings to false to keep the output matrix",
        )


def _read_tensors(file: Path, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return the tensors with these names that a weights file contains, without executing code from it."""
    import torch
    from safetensors import safe_open

    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as stream:
            return {name: stream.get_tensor(name) for name in names if name in stream.keys()}  # noqa: SIM118
    is_zip = zipfile.is_zipfile(file)  # older files do not support mmap
    state_dict = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    return {name: state_dict[name] for name in names if name in state_dict}


def _is_mxfp4(name: str) -> bool:
    """Return whether a tensor contains the values or the scales of an MXFP4 matrix."""
    return name.endswith(("_blocks", "_scales"))


def _layer_number(name: str) -> int:
    words = name.split(".")
    return int(words[2]) if name.startswith("model.layers.") and words[2].isdigit() else -1


def read_hf_config(folder: Path) -> Any:
    """Return transformers' configuration of a folder; newer names of keys are supported.

    Raises:
        UserError: transformers cannot read it.
    """
    from transformers import AutoConfig

    raw = read_config(folder)
    config_values = to_transformers4_keys(raw)
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if config_values is not raw:
            config = type(config).from_dict({**config_values, "rope_parameters": None})
    except Exception as error:  # transformers raises many types for an invalid configuration
        raise UserError(f"transformers cannot read {folder / 'config.json'}: {_summarize(error)}", FETCH) from None
    return config


def generation_config(folder: Path, model: Any) -> GenerationConfig:
    """Return the folder's generation configuration, or transformers' default if it is missing or invalid."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError):
        return GenerationConfig.from_model_config(model.config)


def build_uninitialized(config: Any) -> Any:
    """Build the transformers model of a configuration with uninitialized weights."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import no_init_weights

    with no_init_weights():
        return AutoModelForCausalLM.from_config(
            config, torch_dtype=torch.float32, attn_implementation=ATTENTION, trust_remote_code=False
        )


def build_with_tensors(config: Any, tensors: dict[str, torch.Tensor], is_tied: bool) -> PreTrainedModel:
    """Build the model with these tensors; transformers computes all others, such as rotary frequencies.

    Raises:
        UserError: a parameter is not among the tensors.
    """
    import torch

    from superpod.weights.transfer import convert_tensors

    model = build_uninitialized(config)
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:  # to detect missing tensors, and to save memory
                module._parameters[name] = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    for name, tensor in tensors.items():
        parent, _, last = name.rpartition(".")
        module: Any = model.get_submodule(parent)
        if last in module._buffers:
            module._buffers[last] = tensor
        else:
            module._parameters[last] = torch.nn.Parameter(tensor, requires_grad=False)
    if is_tied:
        model.tie_weights()
    empty_tensors = [name for name, tensor in convert_tensors.get_tensors(model).items() if not tensor.numel()]
    if empty_tensors:
        raise UserError(f"NeMo's model has no counterpart for {', '.join(empty_tensors[:6])}", convert_tensors.WHY)
    return model


def save_model(model: Any, out: Path, dtype: torch.dtype) -> None:
    """Save the model in a data type and in shards, with transformers.

    The correction bias of DeepSeek-V3's router stays in FP32.

    Raises:
        UserError: a value exceeds the range of float16, or transformers cannot save the model.
    """
    wide = {name: buffer for name, buffer in model.named_buffers() if hf_folder.ALWAYS_FP32 in name}
    model.to(dtype)
    for name, buffer in wide.items():
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._buffers[last] = buffer
    import torch

    if dtype is torch.float16:  # its maximum is 65,504
        nonfinite_names = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
        if nonfinite_names:
            raise UserError(
                f"{nonfinite_names[0]} contains values that exceed the range of float16", "use --dtype bfloat16"
            )
    model.generation_config = _generation_config(model)
    try:
        model.save_pretrained(out)
    except ValueError as error:  # config.json has conflicting settings of generate()
        raise UserError(f"transformers cannot write the model: {_summarize(error)}") from None


def _generation_config(model: Any) -> GenerationConfig:
    """Return a configuration with the token ids only: other settings are copied as a file. An id of -1 means none."""
    from transformers import GenerationConfig

    ids = {name: getattr(model.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return GenerationConfig(**{name: None if value == -1 else value for name, value in ids.items()})
