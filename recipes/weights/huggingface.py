"""Convert a Hugging Face folder to a NeMo checkpoint and back, through NeMo's own importers and exporters.

Needs NeMo, and a process of its own, because NeMo sets up a world of one rank. On a machine without a GPU the caller
must have installed the rehearsal's patches, because the converters build layers with Transformer Engine's names.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.recipes.data import paths
from superpod.recipes.weights import load

if TYPE_CHECKING:
    from nemo.collections.llm import GPTModel
    from transformers import PreTrainedModel

FAMILIES = {
    "llama": "LlamaModel",
    "mistral": "MistralModel",
    "mixtral": "MixtralModel",
    "qwen2": "Qwen2Model",
    "qwen3": "Qwen3Model",
    "qwen3_moe": "Qwen3Model",
    "gemma": "GemmaModel",
    "gemma2": "Gemma2Model",
    "gemma3_text": "Gemma3Model",
    "nemotron": "NemotronModel",
    "phi3": "Phi3Model",
    "starcoder2": "Starcoder2Model",
    "deepseek_v2": "DeepSeekModel",
    "deepseek_v3": "DeepSeekModel",
    "gpt_oss": "GPTOSSModel",
}
"""model_type of a config.json -> class of `nemo.collections.llm` whose importer reads it (NeMo 2.7.3)."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files that a tokenizer is read from; a folder must have one of them."""


def family(folder: Path) -> str:
    """The class of `nemo.collections.llm` for a Hugging Face folder; imports nothing.

    Raises:
        UserError: no config.json, no weights, or an architecture that NeMo has no importer for.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
        kind = str(config.get("model_type") or "")
    except FileNotFoundError:
        raise UserError(f"{folder} is not a Hugging Face folder: it has no config.json", FETCH) from None
    except AttributeError:
        raise UserError(f"{folder / 'config.json'} is not a JSON object", FETCH) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read: {error}", FETCH) from None
    if kind not in FAMILIES:
        hint = f"known: {', '.join(FAMILIES)}"
        raise UserError(f"{folder}: model_type {kind!r} has no importer in NeMo 2.7.3", hint)
    if FAMILIES[kind] == "DeepSeekModel" and config.get("quantization_config"):
        from superpod.recipes.models.deepseek import AS_BF16, FP8_WEIGHTS

        raise UserError(f"NeMo 2.7.3 does not import {folder}: {FP8_WEIGHTS}", AS_BF16)
    files = weights(folder)
    if not files:
        raise UserError(f"{folder} holds no weights: no *.safetensors, no *.bin", FETCH)
    for file in files:
        if file.suffix == ".safetensors" and not _is_whole(file):
            raise UserError(f"{file} is cut off, or not a safetensors file", FETCH)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}", FETCH)
    return FAMILIES[kind]


def _is_whole(file: Path) -> bool:
    """Whether a safetensors file is as long as its header says: 8 bytes of header length, a JSON header, the data."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length >= file.stat().st_size:
                return False
            tensors = json.loads(stream.read(length))
        ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
        return file.stat().st_size >= 8 + length + max(ends, default=0)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, IndexError):
        return False


def weights(folder: Path) -> list[Path]:
    """The weight files: safetensors, or PyTorch's where there are none."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def import_hf(folder: Path, out: Path) -> None:
    """Write the NeMo checkpoint `out` from a Hugging Face folder; a failure leaves nothing at `out`."""
    name = family(folder)
    must_be_new(out)
    from nemo.collections import llm

    importer = getattr(llm, name).importer(f"hf://{folder.absolute()}")
    with _complete_or_absent(out) as temporary, own_tokenizer_folder():
        importer(output_path=temporary)
        _keep(folder, temporary / KEPT)


KEPT = Path("context") / "huggingface"
"""Where an imported checkpoint keeps the configuration and tokenizer of its Hugging Face folder."""


def kept(checkpoint: Path) -> Path | None:
    """That folder of an imported checkpoint; None if the checkpoint was not imported."""
    return checkpoint / KEPT if (checkpoint / KEPT).is_dir() else None


def _keep(folder: Path, into: Path) -> None:
    from superpod.recipes.data import tokenizer

    into.mkdir(parents=True)
    for file in {folder / "config.json", *folder.glob("generation_config.json"), *tokenizer.files(folder)}:
        shutil.copyfile(file, into / file.name)


def export_hf(
    checkpoint: Path, out: Path, like: Path | None = None, dtype: str = "", chat: bool = False
) -> dict[str, int]:
    """Write the Hugging Face folder `out` from a NeMo checkpoint; a failure leaves nothing at `out`.

    An adapter is merged into its base. `like` is the Hugging Face folder that the model came from (default: what the
    import kept of it): names, shapes, config.json and tokenizer are then the same. Without one the configuration is
    NeMo's own guess. `dtype` is that of the weights; default: that of `like`, else bfloat16. With `chat`, a tokenizer
    without a chat template gets the plain one. Returns `merged`, how many matrices an adapter was added to.

    Raises:
        UserError: `out` exists, or an adapter's base is gone.
    """
    must_be_new(out)
    checkpoint = checkpoint.absolute()
    like = like or kept(load.base_of(checkpoint) or checkpoint)
    import torch
    from nemo.lightning.io import api

    exporter: Any = api.load_connector_from_trainer_ckpt(checkpoint, "hf")
    exporter.trust_remote_code = False
    with _complete_or_absent(out) as temporary:
        if type(exporter).__name__ in READ_CHECKPOINTS:
            exporter(output_path=temporary)
            return {"merged": 0}
        model = load.load(checkpoint, torch.float32)
        merged = load.merge(model)
        _convert(exporter, model, like, dtype).save_pretrained(temporary)
        _copy_tokenizer(exporter, like, temporary)
        if chat:
            keep_template(temporary)
    return {"merged": merged}


READ_CHECKPOINTS = ("HFDeepSeekExporter", "HFGemma3Exporter", "HFGPTOSSExporter")
"""NeMo's exporters that read the checkpoint themselves; of the others we use the mapping of names and shapes."""


def _convert(exporter: Any, model: GPTModel, like: Path | None, dtype: str) -> PreTrainedModel:
    """The transformers model with the weights of a loaded one.

    NeMo 2.7.3's own exporters cut the vocabulary to the tokenizer's, untie Qwen's embeddings, and Mixtral's fails on
    bf16; the mapping of names and shapes is theirs, the model it fills is ours.
    """
    import torch
    from nemo.lightning.io.state import _ModelState
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import no_init_weights

    state = load.state(model)
    embeddings = state["embedding.word_embeddings.weight"]
    state.setdefault("output_layer.weight", embeddings)  # tied: Megatron has no matrix of its own for the output
    config = AutoConfig.from_pretrained(like) if like else exporter.config
    config.tie_word_embeddings = config.tie_word_embeddings and torch.equal(state["output_layer.weight"], embeddings)
    out_dtype = getattr(torch, dtype or str((like and config.torch_dtype) or "bfloat16").removeprefix("torch."))
    with no_init_weights():  # random numbers for billions of weights take minutes, and all are replaced
        target = AutoModelForCausalLM.from_config(config, torch_dtype=embeddings.dtype)
    target = exporter.convert_state(_ModelState(state, model.config), target)
    target.tie_weights()
    return target.to(out_dtype)


def _copy_tokenizer(exporter: Any, like: Path | None, out: Path) -> None:
    """Copy the tokenizer's files unchanged from `like`; without it, save NeMo's copy."""
    from superpod.recipes.data import tokenizer

    if like:
        for file in (*tokenizer.files(like), *like.glob("generation_config.json")):
            if file.name != "config.json":
                shutil.copyfile(file, out / file.name)
    else:
        getattr(exporter.tokenizer, "tokenizer", exporter.tokenizer).save_pretrained(out)


def keep_template(folder: Path) -> None:
    """Give a folder's tokenizer the plain chat template if it has none: it was fine-tuned with that one."""
    from superpod.recipes.data import chat, tokenizer

    if not tokenizer.pretrained(str(folder)).chat_template:
        (folder / "chat_template.jinja").write_text(chat.PLAIN, encoding="utf-8")


def must_be_new(out: Path, option: str = "") -> None:
    """UserError when `out` exists or cannot be made; `option` names it in the message."""
    if out.exists():
        raise UserError(f"{option}{out} exists already", "name another folder, or remove it")
    paths.check_out(out, "config.json")


@contextmanager
def _complete_or_absent(out: Path) -> Iterator[Path]:
    """A path beside `out`, renamed to `out` on success and removed on failure."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        temporary = Path(scratch) / out.name
        yield temporary
        os.rename(temporary, out)


@contextmanager
def own_tokenizer_folder() -> Iterator[None]:
    """Make NeMo's importers save the tokenizer in a folder of this process, and without running a model folder's code.

    `ModelConnector.save_hf_tokenizer_assets` of NeMo 2.7.3 uses /tmp/nemo_tokenizer, which two imports at once would
    share, and trusts remote code.
    """
    from nemo.lightning.io.connector import ModelConnector

    original = ModelConnector.save_hf_tokenizer_assets
    scratch = tempfile.mkdtemp(prefix="recipes-tokenizer-")

    def save(self: ModelConnector, name: str, save_path: str = "") -> str:
        from transformers import AutoTokenizer

        folder = os.path.join(scratch, "nemo_tokenizer")  # NeMo looks for this name
        AutoTokenizer.from_pretrained(name, local_files_only=True).save_pretrained(folder)
        return folder

    ModelConnector.save_hf_tokenizer_assets = save  # type: ignore[method-assign]
    try:
        yield
    finally:
        ModelConnector.save_hf_tokenizer_assets = original  # type: ignore[method-assign]
        shutil.rmtree(scratch, ignore_errors=True)


FETCH = "fetch it first: hf download ORG/NAME --local-dir DIR, then name DIR"
