"""Converts a Hugging Face folder to a NeMo checkpoint and back, and verifies that both models compute the same.

`nemo_class` finds the NeMo class and its fields, and `mapping` the tensors; NeMo builds and saves the model. Needs NeMo
and a separate process, because NeMo initializes the parallel state of one rank. On a machine without a GPU, the caller
must have installed the patches of a rehearsal, because the model has Transformer Engine's layers.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.common import atomic_folder, custom_code
from superpod.data import paths
from superpod.errors import UserError
from superpod.weights.families import export_config, families
from superpod.weights.families.nemo_class import FETCH, NemoClass, find_nemo_class, read_config
from superpod.weights.transfer import hf_folder, load, transformers_model

if TYPE_CHECKING:
    from nemo.collections.llm import GPTModel
    from transformers import PreTrainedModel

FAMILIES = {kind: family.model for kind, family in families.FAMILIES.items()}
"""`model_type` of a config.json -> class of `nemo.collections.llm` in NeMo 2.7.3."""
TOKENIZER_FILES = hf_folder.TOKENIZER_FILES
KEPT = Path("context") / "huggingface"
"""Folder in an imported checkpoint with the configuration and tokenizer of its Hugging Face folder."""
UNCHECKED = "no forward check: the NeMo model was not compared with transformers"
"""Note on an import that was not compared with transformers."""
RECORD = "import.json"
"""File in `KEPT` with the result of the forward check, the data type of the weights, and notes."""


def family(folder: Path) -> str:
    """Return the name of the class of `nemo.collections.llm` for a complete Hugging Face folder; imports nothing.

    Raises:
        UserError: like `hf_folder.check`.
    """
    return check_folder(folder).model


def check_folder(folder: Path) -> NemoClass:
    """Call `hf_folder.check`, with a workaround in the error for the FP8 weights of DeepSeek-V3.

    Raises:
        UserError: like `hf_folder.check`.
    """
    if FAMILIES.get(str(read_config(folder).get("model_type"))) == "DeepSeekModel":
        from superpod.collection.registry import models

        model = models()["deepseek_v3"]
        if read_config(folder).get("quantization_config"):
            raise UserError(f"NeMo 2.7.3 cannot import {folder}: {model.not_imported}", model.import_instead)
    return hf_folder.check(folder)


def check_importable(folder: Path, forward_check: bool) -> NemoClass:
    """Call `check_folder`, and check that the forward check can pass, or is not needed if it is disabled.

    Raises:
        UserError: like `check_folder`; or the forward check would fail, or it is disabled although config.json has an
            unknown key.
    """
    nemo_class = check_folder(folder)
    if forward_check and nemo_class.doubts:
        raise UserError(
            f"{folder}: {'; '.join(nemo_class.doubts)}",
            "--no-forward-check imports it without this comparison",
        )
    if not forward_check and nemo_class.unknown:
        raise UserError(
            f"{folder}: config.json has unknown keys: {', '.join(nemo_class.unknown)}; only the forward check can "
            "detect whether they affect the model",
            "leave out --no-forward-check, or delete the keys if they have no effect",
        )
    return nemo_class


def import_hf(folder: Path, out: Path, *, forward_check: bool = True) -> dict[str, Any]:
    """Convert a Hugging Face folder to the NeMo checkpoint `out`; a failure leaves no folder at `out`.

    With `forward_check`, a forward pass of the result is compared with transformers. Return the record: the result of
    the comparison (None without it), the data type, and notes for the user.

    Raises:
        UserError: the folder is incomplete, NeMo computes a different function, or a tensor has no counterpart.
    """
    nemo_class = check_importable(folder, forward_check)
    require_new_output(out)
    theirs, notes = transformers_model.load_reference(folder)
    as_user_error = _as_user_error(f"NeMo cannot import {folder}")
    with atomic_folder.create_atomically(out) as temporary, own_tokenizer_folder(), as_user_error:
        record = _import(folder, temporary, nemo_class, theirs, forward_check)
        record["notes"] = notes + _notes(nemo_class, forward_check) + custom_code.note(folder)
        _keep(folder, temporary / KEPT, record)
    return record


@contextmanager
def _as_user_error(what: str) -> Iterator[None]:
    """Convert exceptions of NeMo and transformers to UserError, and print the traceback for the log."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        import traceback

        traceback.print_exc()
        words = " ".join(str(error).split())[:300]
        raise UserError(f"{what}: {type(error).__name__}: {words}; nothing was written") from error


def _import(folder: Path, out: Path, nemo_class: NemoClass, hf_config: Any, forward_check: bool) -> dict[str, Any]:
    from superpod.weights.families import nemo_config
    from superpod.weights.transfer import convert_tensors
    from superpod.weights.transfer import forward_check as check

    load.unset_attention_backend()
    dtype = next(hf_config.parameters()).dtype
    importer: Any = nemo_config.model_class(nemo_class).importer(f"hf://{folder.absolute()}")
    config = nemo_config.build(nemo_class, dtype)
    config.generation_config = transformers_model.generation_config(folder, hf_config)
    model: Any = nemo_config.model_class(nemo_class)(config, tokenizer=_tokenizer(importer, folder, nemo_class))
    trainer = importer.nemo_setup(model)
    core = load.unwrap_model(model)
    convert_tensors.to_megatron(convert_tensors.get_tensors(hf_config), core, model.config, hf_config.config.model_type)
    megatron_logits = check.run_megatron(core, model.config) if forward_check else None
    outcome = check.require_equal(hf_config, core, megatron_logits, str(folder)) if megatron_logits else None
    importer.nemo_save(out, trainer)
    return {"forward_check": asdict(outcome) if outcome else None, "dtype": str(dtype).removeprefix("torch.")}


def _tokenizer(importer: Any, folder: Path, nemo_class: NemoClass) -> Any:
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer(importer.save_hf_tokenizer_assets(str(folder.absolute())))
    except Exception as error:  # tokenizers raise plain Exceptions
        tokenizer_note = f"the tokenizer of {folder} cannot be read: {str(error)[:300]}"
        if note := custom_code.note(folder):
            raise UserError(
                f"{tokenizer_note}; {note[0]}", "save it as a tokenizer.json, which needs no custom code"
            ) from None
        raise UserError(tokenizer_note, FETCH) from None
    rows, ids = nemo_class.fields["vocab_size"], len(tokenizer.tokenizer)
    if ids > rows:
        raise UserError(f"the tokenizer of {folder} has {ids} ids, but the model's vocab_size is only {rows}", FETCH)
    return tokenizer


def _notes(nemo_class: NemoClass, forward_check: bool) -> list[str]:
    notes = [] if forward_check else [UNCHECKED]
    if nemo_class.unknown:
        verified = "; the result equals transformers, which ignores them" if forward_check else ""
        notes.append(f"config.json has unknown keys: {', '.join(nemo_class.unknown)}{verified}")
    return notes


def find_kept_files(checkpoint: Path) -> Path | None:
    """Return the folder of an imported checkpoint with its Hugging Face files; None if it was not imported."""
    return checkpoint / KEPT if (checkpoint / KEPT).is_dir() else None


def _keep(folder: Path, out: Path, record: Mapping[str, Any]) -> None:
    from superpod.data.tokens import tokenizer

    out.mkdir(parents=True)
    for file in {folder / "config.json", *folder.glob("generation_config.json"), *tokenizer.list_files(folder)}:
        shutil.copyfile(file, out / file.name)
    (out / RECORD).write_text(json.dumps(record, indent=1))


def export_hf(
    checkpoint: Path,
    out: Path,
    like: Path | None = None,
    dtype: str = "",
    chat: bool = False,
    *,
    forward_check: bool = True,
) -> dict[str, Any]:
    """Convert a NeMo checkpoint to the Hugging Face folder `out`; a failure leaves no folder at `out`.

    An adapter is merged into its base model. Return the number of merged matrices, `forward_check` and `notes` as in
    `import_hf`.

    Args:
        checkpoint: the NeMo checkpoint.
        out: the folder to write.
        like: the Hugging Face folder that the model was imported from. Names, shapes, config.json and tokenizer are
            taken from it. Default: the files that the import kept; without them, the configuration is derived from
            NeMo's, and must specify everything that the model computes.
        dtype: data type of the weights. Default: as imported, else that of `like`, else bfloat16.
        chat: add the plain chat template to a tokenizer that has none.
        forward_check: compare a forward pass with the NeMo model.

    Raises:
        UserError: `out` exists, the base model of an adapter is missing, or the result would be a different model.
    """
    from superpod.weights.transfer import forward_check as check

    require_new_output(out)
    checkpoint = checkpoint.absolute()
    like = like or find_kept_files(load.find_base_checkpoint(checkpoint) or checkpoint)
    import torch
    from nemo.lightning.io import api

    exporter: Any = api.load_connector_from_trainer_ckpt(checkpoint, "hf")
    exporter.trust_remote_code = False
    with atomic_folder.create_atomically(out) as temporary, _as_user_error(f"{checkpoint} cannot be exported"):
        model = load.load_model(checkpoint, torch.float32)
        # Before the adapter is merged, as in training.
        megatron_logits = check.run_megatron(load.unwrap_model(model), model.config) if forward_check else None
        merged_count = load.merge_adapters(model)
        config = (
            transformers_model.read_hf_config(like)
            if like
            else export_config.build_hf_config(model, exporter.tokenizer)
        )
        target = fill_model(config, model)
        outcome = (
            check.require_equal(target, load.unwrap_model(model), megatron_logits, str(checkpoint))
            if megatron_logits
            else None
        )
        transformers_model.save_model(target, temporary, getattr(torch, dtype or _kept_dtype(like)))
        _copy_tokenizer(exporter, like, temporary)
        if chat:
            save_plain_template(temporary)
        notes = custom_code.remove_keys(temporary)
    notes += [] if forward_check else ["no forward check: the exported model was not compared with NeMo"]
    return {"merged": merged_count, "forward_check": asdict(outcome) if outcome else None, "notes": notes}


def import_notes(checkpoint: Path) -> list[str]:
    """Return the notes that the import recorded in the checkpoint."""
    try:
        return list(json.loads((checkpoint / KEPT / RECORD).read_bytes())["notes"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _kept_dtype(like: Path | None) -> str:
    if like is None:
        return "bfloat16"
    try:
        stated_dtype = json.loads((like / RECORD).read_bytes())["dtype"]
    except (OSError, ValueError, KeyError, TypeError):
        stated_dtype = hf_folder.read_dtype(read_config(like))
    return stated_dtype if stated_dtype in hf_folder.FLOATS.values() else "bfloat16"


def fill_model(config: Any, model: GPTModel) -> PreTrainedModel:
    """Return the transformers model of a configuration, in FP32, with the weights of a loaded NeMo model.

    Raises:
        UserError: NeMo's model computes a different function than `config` specifies, or a tensor has no counterpart.
    """
    import torch

    from superpod.weights.families import nemo_config
    from superpod.weights.transfer import convert_tensors

    state = load.base_state_dict(model)
    embeddings = state["embedding.word_embeddings.weight"]
    is_tied = bool(config.tie_word_embeddings) and (
        "output_layer.weight" not in state or torch.equal(state["output_layer.weight"], embeddings)
    )
    config.tie_word_embeddings = is_tied
    vars(config).pop("quantization_config", None)  # the weights are dequantized
    nemo_config.require_match(find_nemo_class(config.to_dict(), "the exported config.json"), model)
    with torch.device("meta"):
        target = transformers_model.build_uninitialized(config)
    expected = convert_tensors.get_tensors(target)
    if is_tied:
        expected.pop(convert_tensors.HEAD, None)
    tensors = convert_tensors.from_megatron(state, model.config, config.model_type, expected, is_tied)
    return transformers_model.build_with_tensors(config, tensors, is_tied)


def _copy_tokenizer(exporter: Any, like: Path | None, out: Path) -> None:
    """Copy the tokenizer's files unchanged from `like`; without it, save NeMo's copy."""
    from superpod.data.tokens import tokenizer

    if like:
        for file in (*tokenizer.list_files(like), *like.glob("generation_config.json")):
            if file.name not in ("config.json", RECORD):
                shutil.copyfile(file, out / file.name)
    else:
        getattr(exporter.tokenizer, "tokenizer", exporter.tokenizer).save_pretrained(out)


def save_plain_template(folder: Path) -> None:
    """Add the plain chat template, with which the model was fine-tuned, to a folder whose tokenizer has none."""
    from superpod.data.samples import chat
    from superpod.data.tokens import tokenizer

    if not tokenizer.load_pretrained(str(folder)).chat_template:
        (folder / "chat_template.jinja").write_text(chat.DEFAULT_TEMPLATE, encoding="utf-8")


def require_new_output(out: Path, option: str = "") -> None:
    """Raise UserError if `out` exists or cannot be created; `option` is its option for the message."""
    paths.check(atomic_folder.temporary_path(out) if out.name else out, option)
    if out.exists():
        raise UserError(f"{option}{out} already exists", "choose another folder, or remove it")
    paths.check_output_folder(out, "config.json")


@contextmanager
def own_tokenizer_folder() -> Iterator[None]:
    """Make NeMo's importers save the tokenizer in a folder of this process, without executing code of the model.

    `ModelConnector.save_hf_tokenizer_assets` of NeMo 2.7.3 uses /tmp/nemo_tokenizer, which simultaneous imports would
    share, and trusts remote code.
    """
    from nemo.lightning.io.connector import ModelConnector

    original = ModelConnector.save_hf_tokenizer_assets
    scratch = tempfile.mkdtemp(prefix="recipes-tokenizer-")

    def save(self: ModelConnector, name: str, save_path: str = "") -> str:
        from transformers import AutoTokenizer

        folder = os.path.join(scratch, "nemo_tokenizer")  # NeMo looks for this name
        AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False).save_pretrained(folder)
        return folder

    ModelConnector.save_hf_tokenizer_assets = save  # type: ignore[method-assign]
    try:
        yield
    finally:
        ModelConnector.save_hf_tokenizer_assets = original  # type: ignore[method-assign]
        shutil.rmtree(scratch, ignore_errors=True)
