"""Loads, builds and saves the transformers model of a conversion."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.planner.formats.hf_config import to_transformers4_keys
from superpod.weights.families.nemo_class import DOWNLOAD, read_config
from superpod.weights.transfer import hf_folder

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel

ATTENTION = "eager"
"""Attention implementation; others omit Gemma 2's soft caps and gpt-oss's sinks."""


def load_reference(folder: Path) -> tuple[Any, list[str]]:
    """Load the model of a folder in the dtype of its files, and return it with notes on tensors that are ignored.

    Raises:
        UserError: a tensor is missing, unknown, or has the wrong shape, or transformers cannot read the folder.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = read_hf_config(folder)
    dtype = getattr(torch, hf_folder.find_dtype(folder, hf_folder.read_dtype(read_config(folder))))
    options: dict[str, Any] = {}
    # Only gpt-oss: `hf_folder.check_complete` rejects other quantized models.
    if getattr(config, "quantization_config", None):
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
        raise UserError(f"transformers cannot read {folder}: {_describe(error)}", DOWNLOAD) from None
    model, info = loaded
    notes = _check_tensors(folder, model, info)
    if options:
        config.quantization_config = None
    return model, notes


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _check_tensors(folder: Path, model: Any, info: dict[str, Any]) -> list[str]:
    """Return notes on tensors that are ignored. Raises UserError if tensors are missing or unknown."""
    missing_names = sorted(info["missing_keys"])
    if missing_names:
        raise UserError(
            f"{folder} lacks {', '.join(missing_names[:6])}, which transformers would initialize randomly",
            DOWNLOAD,
        )
    if mismatched := [str(entry[0]) for entry in info.get("mismatched_keys") or []]:
        raise UserError(
            f"{folder}: {', '.join(mismatched[:6])} does not have the shape that config.json specifies", DOWNLOAD
        )
    _require_tied(folder, model)
    model_names = set(model.state_dict()) | {"lm_head.weight"}
    kind, layers = model.config.model_type, model.config.num_hidden_layers
    mxfp4_suffixes = ("_blocks", "_scales") if kind == "gpt_oss" else ()  # values and scales of the only MXFP4 family
    unused_names = {
        name
        for name in (*hf_folder.read_tensors(folder), *info["unexpected_keys"])
        if not (name in model_names or name.endswith(mxfp4_suffixes) or hf_folder.DERIVED.fullmatch(name))
    }
    mtp_names = {name for name in unused_names if kind == "deepseek_v3" and _parse_layer_number(name) >= layers}
    if rest := sorted(unused_names - mtp_names):
        raise UserError(
            f"{folder} contains {', '.join(rest[:6])}, which the {kind} model of transformers lacks",
            "the weights in the folder do not match its config.json",
        )
    return (
        [f"ignored the {len(mtp_names)} tensors of multi-token prediction, as transformers does"] if mtp_names else []
    )


def _require_tied(folder: Path, model: Any) -> None:
    """Raise UserError if the output matrix differs from the embedding, but the configuration ties them."""
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
    """Return the tensors among `names` in a weight file, without executing code from it."""
    import torch
    from safetensors import safe_open

    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as stream:
            return {name: stream.get_tensor(name) for name in names if name in stream.keys()}  # noqa: SIM118
    is_zip = zipfile.is_zipfile(file)  # older files do not support mmap
    state_dict = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    return {name: state_dict[name] for name in names if name in state_dict}


def _parse_layer_number(name: str) -> int:
    words = name.split(".")
    return int(words[2]) if name.startswith("model.layers.") and words[2].isdigit() else -1


def read_hf_config(folder: Path) -> Any:
    """Return transformers' configuration of a folder, also with keys of transformers 5. Raises UserError if invalid."""
    from transformers import AutoConfig

    raw = read_config(folder)
    config_values = to_transformers4_keys(raw)
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if config_values is not raw:
            config = type(config).from_dict({**config_values, "rope_parameters": None})
    except Exception as error:  # transformers raises many types for an invalid configuration
        raise UserError(f"transformers cannot read {folder / 'config.json'}: {_describe(error)}", DOWNLOAD) from None
    return config


def read_generation_config(folder: Path, model: Any) -> GenerationConfig:
    """Return the generation configuration of a folder, or transformers' default if it is missing or invalid."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError):
        return GenerationConfig.from_model_config(model.config)


def build_uninitialized(config: Any) -> Any:
    """Return the transformers model of a configuration, with uninitialized FP32 weights."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import no_init_weights

    with no_init_weights():
        return AutoModelForCausalLM.from_config(
            config, torch_dtype=torch.float32, attn_implementation=ATTENTION, trust_remote_code=False
        )


def build_with_tensors(config: Any, tensors: dict[str, torch.Tensor], is_tied: bool) -> PreTrainedModel:
    """Return the transformers model of a configuration with the given parameters and buffers.

    Transformers computes other buffers, such as rotary frequencies.

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
        raise UserError(
            f"NeMo's model has no counterpart for {', '.join(empty_tensors[:6])}", convert_tensors.UNWRITTEN
        )
    return model


def save_model(model: Any, out: Path, dtype: torch.dtype) -> None:
    """Save a transformers model to the folder `out`, in `dtype`, in shards.

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
    model.generation_config = _build_generation_config(model)
    try:
        model.save_pretrained(out)
    except ValueError as error:  # config.json has conflicting settings of generate()
        raise UserError(f"transformers cannot write the model: {_describe(error)}") from None


def _build_generation_config(model: Any) -> GenerationConfig:
    """Return a generation configuration with only the token ids; other settings are copied as a file."""
    from transformers import GenerationConfig

    ids = {name: getattr(model.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return GenerationConfig(**{name: None if value == -1 else value for name, value in ids.items()})
