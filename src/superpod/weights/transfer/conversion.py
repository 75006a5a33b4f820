"""Converts a Hugging Face folder to a NeMo checkpoint and back, and verifies that both models compute the same logits.

`nemo_class` finds the NeMo class and its fields, `mapping` maps the tensors, and NeMo builds and saves the model. Needs
NeMo, and a process of its own, because NeMo initializes the parallel state of one rank. On a machine without a GPU, the
caller must first apply the patches of a rehearsal, because the model has layers of Transformer Engine.
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

from superpod.common import atomic_folder, custom_code, json_files
from superpod.data import paths
from superpod.errors import UserError
from superpod.weights.families import export_config, families
from superpod.weights.families.nemo_class import DOWNLOAD, NemoClass, find_nemo_class, read_config
from superpod.weights.transfer import hf_folder, load, transformers_model

if TYPE_CHECKING:
    from nemo.collections.llm import GPTModel
    from transformers import PreTrainedModel

FAMILIES = {kind: family.model for kind, family in families.FAMILIES.items()}
"""`model_type` of a config.json -> class of `nemo.collections.llm` in NeMo 2.7.3."""
TOKENIZER_FILES = hf_folder.TOKENIZER_FILES
KEPT = Path("context") / "huggingface"
"""Folder in an imported checkpoint with the configuration and tokenizer of its Hugging Face folder."""
UNCHECKED_NOTE = "no forward check: the NeMo model was not compared with transformers"
"""Note of an import without a forward check."""
RECORD = "import.json"
"""File in `KEPT` with the result of the forward check, the data type of the weights, and notes."""


def check_folder(folder: Path) -> NemoClass:
    """Check that a Hugging Face folder is complete, and return NeMo's class for it. Does not import NeMo.

    Raises:
        UserError: see `hf_folder.check_complete`; for the FP8 weights of DeepSeek-V3, the hint has a workaround.
    """
    if FAMILIES.get(str(read_config(folder).get("model_type"))) == "DeepSeekModel":
        from superpod.collection.registry import models

        model = models()["deepseek_v3"]
        if read_config(folder).get("quantization_config"):
            raise UserError(f"NeMo 2.7.3 cannot import {folder}: {model.not_imported}", model.import_instead)
    return hf_folder.check_complete(folder)


def check_importable(folder: Path, forward_check: bool) -> NemoClass:
    """Check that a Hugging Face folder can be imported, and return NeMo's class for it.

    Args:
        folder: the folder.
        forward_check: whether the import will compare a forward pass with transformers.

    Raises:
        UserError: see `check_folder`; or the forward check would fail, or it is disabled although config.json has an
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
            "omit --no-forward-check, or delete the keys if they have no effect",
        )
    return nemo_class


def import_hf(folder: Path, out: Path, *, forward_check: bool = True) -> dict[str, Any]:
    """Convert a Hugging Face folder to the NeMo checkpoint `out`. After a failure, `out` does not exist.

    With `forward_check`, a forward pass is compared with transformers. Returns a dict: `forward_check` (the comparison
    or None), `dtype`, and `notes` for the user.

    Raises:
        UserError: the folder is incomplete, NeMo computes a different function, or a tensor has no counterpart.
    """
    nemo_class = check_importable(folder, forward_check)
    require_new_output(out)
    theirs, notes = transformers_model.load_reference(folder)
    as_user_error = _as_user_error(f"NeMo cannot import {folder}")
    with atomic_folder.create_atomically(out) as temporary, use_private_tokenizer_folder(), as_user_error:
        record = _convert_model(folder, temporary, nemo_class, theirs, forward_check)
        record["notes"] = notes + _list_import_notes(nemo_class, forward_check) + custom_code.note(folder)
        _keep_hf_files(folder, temporary / KEPT, record)
    return record


@contextmanager
def _as_user_error(problem: str) -> Iterator[None]:
    """Convert exceptions of NeMo and transformers to UserErrors that begin with `problem`; print their traceback."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        import traceback

        traceback.print_exc()
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{problem}: {type(error).__name__}: {reason}; nothing was written") from error


def _convert_model(
    folder: Path, out: Path, nemo_class: NemoClass, hf_model: Any, forward_check: bool
) -> dict[str, Any]:
    """Build NeMo's model, set its weights to those of `hf_model`, save it to `out`, and return its record."""
    from superpod.weights.families import nemo_config
    from superpod.weights.transfer import convert_tensors
    from superpod.weights.transfer import forward_check as check

    load.unset_attention_backend()
    dtype = next(hf_model.parameters()).dtype
    model_class: Any = nemo_config.get_model_class(nemo_class)
    importer: Any = model_class.importer(f"hf://{folder.absolute()}")
    config = nemo_config.build_config(nemo_class, dtype)
    config.generation_config = transformers_model.read_generation_config(folder, hf_model)
    model: Any = model_class(config, tokenizer=_load_tokenizer(importer, folder, nemo_class))
    trainer = importer.nemo_setup(model)
    core = load.unwrap_model(model)
    tensors = convert_tensors.get_tensors(hf_model)
    convert_tensors.load_into_megatron(tensors, core, model.config, hf_model.config.model_type)
    megatron_logits = check.run_megatron(core, model.config) if forward_check else None
    outcome = check.require_equal_logits(hf_model, core, megatron_logits, str(folder)) if megatron_logits else None
    importer.nemo_save(out, trainer)
    return {"forward_check": asdict(outcome) if outcome else None, "dtype": str(dtype).removeprefix("torch.")}


def _load_tokenizer(importer: Any, folder: Path, nemo_class: NemoClass) -> Any:
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer(importer.save_hf_tokenizer_assets(str(folder.absolute())))
    except Exception as error:  # tokenizers raise plain Exceptions
        tokenizer_note = f"the tokenizer of {folder} cannot be read: {str(error)[:300]}"
        if note := custom_code.note(folder):
            raise UserError(
                f"{tokenizer_note}; {note[0]}", "save it as a tokenizer.json, which needs no custom code"
            ) from None
        raise UserError(tokenizer_note, DOWNLOAD) from None
    rows, ids = nemo_class.fields["vocab_size"], len(tokenizer.tokenizer)
    if ids > rows:
        raise UserError(f"the tokenizer of {folder} has {ids} ids, but the model's vocab_size is only {rows}", DOWNLOAD)
    return tokenizer


def _list_import_notes(nemo_class: NemoClass, forward_check: bool) -> list[str]:
    notes = [] if forward_check else [UNCHECKED_NOTE]
    if nemo_class.unknown:
        verified = "; the result equals transformers, which ignores them" if forward_check else ""
        notes.append(f"config.json has unknown keys: {', '.join(nemo_class.unknown)}{verified}")
    return notes


def find_kept_files(checkpoint: Path) -> Path | None:
    """Return the folder with the Hugging Face files of an imported checkpoint, or None if it was not imported."""
    return checkpoint / KEPT if (checkpoint / KEPT).is_dir() else None


def _keep_hf_files(folder: Path, out: Path, record: Mapping[str, Any]) -> None:
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
    """Convert a NeMo checkpoint to the Hugging Face folder `out`. After a failure, `out` does not exist.

    An adapter is merged into its base model. Returns a dict: `merged` (number of matrices with an adapter),
    `forward_check` and `notes` (see `import_hf`).

    Args:
        checkpoint: the NeMo checkpoint.
        out: the folder to write.
        like: Hugging Face folder with the config.json and the tokenizer to use; None for the files kept by the import,
            or, if there are none, a configuration derived from NeMo's.
        dtype: data type of the weights; "" for that of the import, else that of `like`, else bfloat16.
        chat: whether to add the default chat template to a tokenizer that has none.
        forward_check: whether to compare a forward pass with the NeMo model.

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
            check.require_equal_logits(target, load.unwrap_model(model), megatron_logits, str(checkpoint))
            if megatron_logits
            else None
        )
        transformers_model.save_model(target, temporary, getattr(torch, dtype or _choose_dtype(like)))
        _copy_tokenizer(exporter, like, temporary)
        if chat:
            save_plain_template(temporary)
        notes = custom_code.remove_keys(temporary)
    notes += [] if forward_check else ["no forward check: the exported model was not compared with NeMo"]
    return {"merged": merged_count, "forward_check": asdict(outcome) if outcome else None, "notes": notes}


def read_import_notes(checkpoint: Path) -> list[str]:
    """Return the notes that the import recorded in a checkpoint, or [] if there are none."""
    notes = (json_files.read_json(checkpoint / KEPT / RECORD) or {}).get("notes")
    return notes if isinstance(notes, list) else []


def _choose_dtype(like: Path | None) -> str:
    """Return the dtype of an export: that of the import, else that of `like`, else bfloat16."""
    if like is None:
        return "bfloat16"
    record = json_files.read_json(like / RECORD) or {}
    stated_dtype = record.get("dtype") or hf_folder.read_dtype(read_config(like))
    return stated_dtype if stated_dtype in hf_folder.FLOATS.values() else "bfloat16"


def fill_model(config: Any, model: GPTModel) -> PreTrainedModel:
    """Return a transformers model in FP32 with the weights of a NeMo model.

    Args:
        config: transformers' configuration; `tie_word_embeddings` and `quantization_config` are updated.
        model: the NeMo model.

    Raises:
        UserError: the NeMo model computes another function than `config` specifies, or a tensor has no counterpart.
    """
    import torch

    from superpod.weights.families import nemo_config
    from superpod.weights.transfer import convert_tensors

    state = load.get_base_state_dict(model)
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
    """Copy the tokenizer from `like` unchanged; if it is None, save NeMo's tokenizer."""
    from superpod.data.tokens import tokenizer

    if like:
        for file in (*tokenizer.list_files(like), *like.glob("generation_config.json")):
            if file.name not in ("config.json", RECORD):
                shutil.copyfile(file, out / file.name)
    else:
        getattr(exporter.tokenizer, "tokenizer", exporter.tokenizer).save_pretrained(out)


def save_plain_template(folder: Path) -> None:
    """Add `chat.DEFAULT_TEMPLATE`, used for fine-tuning, to a folder whose tokenizer has no chat template."""
    from superpod.data.samples import chat
    from superpod.data.tokens import tokenizer

    if not tokenizer.load_pretrained(str(folder)).chat_template:
        (folder / "chat_template.jinja").write_text(chat.DEFAULT_TEMPLATE, encoding="utf-8")


def require_new_output(out: Path, option: str = "") -> None:
    """Raise UserError if `out` exists or cannot be created. `option` begins the message, for example "--out "."""
    paths.check(atomic_folder.temporary_path(out) if out.name else out, option)
    if out.exists():
        raise UserError(f"{option}{out} already exists", "choose another folder, or remove it")
    paths.check_output_folder(out, "config.json")


@contextmanager
def use_private_tokenizer_folder() -> Iterator[None]:
    """Make NeMo's importers save tokenizers in a private folder, without executing custom code.

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
