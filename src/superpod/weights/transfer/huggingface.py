"""Convert a Hugging Face folder to a NeMo checkpoint and back, with a proof that both compute the same.

The class and its fields are `nearest`'s, the tensors' places `mapping`'s; NeMo sets up the model and writes it. Needs
NeMo, and a process of its own, because NeMo sets up a world of one rank. On a machine without a GPU the caller must
have installed the rehearsal's patches, because the model has Transformer Engine's layers.
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
from superpod.data.readers import paths
from superpod.errors import UserError
from superpod.weights.families import families, own_config
from superpod.weights.families.nearest import FETCH, Nearest, nearest_class, read_config
from superpod.weights.transfer import folder as hf_folder
from superpod.weights.transfer import load, reference

if TYPE_CHECKING:
    from nemo.collections.llm import GPTModel
    from transformers import PreTrainedModel

FAMILIES = {kind: family.model for kind, family in families.FAMILIES.items()}
"""model_type of a config.json -> class of `nemo.collections.llm` that computes it (NeMo 2.7.3)."""
TOKENIZER_FILES = hf_folder.TOKENIZER_FILES
KEPT = Path("context") / "huggingface"
"""Where an imported checkpoint keeps the configuration and tokenizer of its Hugging Face folder."""
UNCHECKED = "no forward check: nothing shows that NeMo computes what transformers does"
"""What is said of an import that was not held against transformers."""
RECORD = "import.json"
"""File in `KEPT`: what the import showed, and the number format of the weights."""


def family(folder: Path) -> str:
    """The class of `nemo.collections.llm` for a whole Hugging Face folder; imports nothing.

    Raises:
        UserError: as `folder.check`.
    """
    return checked(folder).model


def checked(folder: Path) -> Nearest:
    """`folder.check`, with the way round FP8 weights of DeepSeek's.

    Raises:
        UserError: as `folder.check`.
    """
    if FAMILIES.get(str(read_config(folder).get("model_type"))) == "DeepSeekModel":
        from superpod.collection.registry import models

        model = models()["deepseek_v3"]
        if read_config(folder).get("quantization_config"):
            raise UserError(f"NeMo 2.7.3 does not import {folder}: {model.not_imported}", model.import_instead)
    return hf_folder.check(folder)


def importable(folder: Path, forward_check: bool) -> Nearest:
    """`checked`, where the forward check can show what is claimed, or nothing is left for it to show.

    Raises:
        UserError: as `checked`; the check would fail, or is off though a key of config.json is unknown.
    """
    nearest = checked(folder)
    if forward_check and nearest.doubts:
        raise UserError(f"{folder}: {'; '.join(nearest.doubts)}", "--no-forward-check imports it as NeMo computes it")
    if not forward_check and nearest.unknown:
        raise UserError(
            f"{folder}: nobody here knows what {', '.join(nearest.unknown)} in config.json change, and without a "
            "forward check nothing would show it",
            "leave out --no-forward-check; or delete the keys where they change nothing",
        )
    return nearest


def import_hf(folder: Path, out: Path, *, forward_check: bool = True) -> dict[str, Any]:
    """Write the NeMo checkpoint `out` from a Hugging Face folder; a failure leaves nothing at `out`.

    Ends with one forward pass held against transformers, unless `forward_check` is off. Returns the record: what the
    pass showed (None: it was left out), the number format, and notes for the user.

    Raises:
        UserError: the folder is not whole, NeMo computes another function, or a tensor has no place.
    """
    nearest = importable(folder, forward_check)
    must_be_new(out)
    theirs, notes = reference.load(folder)
    words = _in_words(f"NeMo cannot import {folder}")
    with atomic_folder.complete_or_absent(out) as temporary, own_tokenizer_folder(), words:
        record = _import(folder, temporary, nearest, theirs, forward_check)
        record["notes"] = notes + _notes(nearest, forward_check) + custom_code.note(folder)
        _keep(folder, temporary / KEPT, record)
    return record


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    """NeMo's and transformers' raw exceptions as the user's error; the log keeps the traceback."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        import traceback

        traceback.print_exc()
        words = " ".join(str(error).split())[:300]
        raise UserError(f"{what}: {type(error).__name__}: {words}; nothing is written") from error


def _import(folder: Path, out: Path, nearest: Nearest, theirs: Any, forward_check: bool) -> dict[str, Any]:
    from superpod.weights.families import nemo_config
    from superpod.weights.transfer import forward_check as check
    from superpod.weights.transfer import transfer

    load.forget_attention_backend()
    dtype = next(theirs.parameters()).dtype
    importer: Any = nemo_config.model_class(nearest).importer(f"hf://{folder.absolute()}")
    config = nemo_config.build(nearest, dtype)
    config.generation_config = reference.generation_config(folder, theirs)
    model: Any = nemo_config.model_class(nearest)(config, tokenizer=_tokenizer(importer, folder, nearest))
    trainer = importer.nemo_setup(model)
    core = load.core(model)
    transfer.to_megatron(transfer.tensors_of(theirs), core, model.config, theirs.config.model_type)
    ours = check.of_megatron(core, model.config) if forward_check else None
    outcome = check.must_agree(theirs, core, ours, str(folder)) if ours else None
    importer.nemo_save(out, trainer)
    return {"forward_check": asdict(outcome) if outcome else None, "dtype": str(dtype).removeprefix("torch.")}


def _tokenizer(importer: Any, folder: Path, nearest: Nearest) -> Any:
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer(importer.save_hf_tokenizer_assets(str(folder.absolute())))
    except Exception as error:  # tokenizers raise bare Exceptions
        unread = f"the tokenizer of {folder} cannot be read: {str(error)[:300]}"
        if note := custom_code.note(folder):
            raise UserError(f"{unread}; {note[0]}", "save it as a tokenizer.json, which needs no code") from None
        raise UserError(unread, FETCH) from None
    rows, ids = nearest.fields["vocab_size"], len(tokenizer.tokenizer)
    if ids > rows:
        raise UserError(f"the tokenizer of {folder} has {ids} ids, and the model's vocab_size is {rows}", FETCH)
    return tokenizer


def _notes(nearest: Nearest, forward_check: bool) -> list[str]:
    notes = [] if forward_check else [UNCHECKED]
    if nearest.unknown:
        proof = "; the forward pass is that of transformers, which does not read them" if forward_check else ""
        notes.append(f"config.json has keys that nobody here knows: {', '.join(nearest.unknown)}{proof}")
    return notes


def kept(checkpoint: Path) -> Path | None:
    """The kept Hugging Face files of an imported checkpoint; None if the checkpoint was not imported."""
    return checkpoint / KEPT if (checkpoint / KEPT).is_dir() else None


def _keep(folder: Path, into: Path, record: Mapping[str, Any]) -> None:
    from superpod.data.tokens import tokenizer

    into.mkdir(parents=True)
    for file in {folder / "config.json", *folder.glob("generation_config.json"), *tokenizer.files(folder)}:
        shutil.copyfile(file, into / file.name)
    (into / RECORD).write_text(json.dumps(record, indent=1))


def export_hf(
    checkpoint: Path,
    out: Path,
    like: Path | None = None,
    dtype: str = "",
    chat: bool = False,
    *,
    forward_check: bool = True,
) -> dict[str, Any]:
    """Write the Hugging Face folder `out` from a NeMo checkpoint; a failure leaves nothing at `out`.

    An adapter is merged into its base. `like` is the Hugging Face folder that the model came from (default: what the
    import kept of it): names, shapes, config.json and tokenizer are then the same. Without one the configuration is
    made from NeMo's, and must say all that the model computes. `dtype` is that of the weights; default: as imported,
    else that of `like`, else bfloat16. With `chat`, a tokenizer without a chat template gets the plain one. Returns
    `merged`, how many matrices an adapter was added to, and `forward_check` and `notes` as the import does.

    Raises:
        UserError: `out` exists, an adapter's base is gone, or the folder would be another model.
    """
    from superpod.weights.transfer import forward_check as check

    must_be_new(out)
    checkpoint = checkpoint.absolute()
    like = like or kept(load.base_of(checkpoint) or checkpoint)
    import torch
    from nemo.lightning.io import api

    exporter: Any = api.load_connector_from_trainer_ckpt(checkpoint, "hf")
    exporter.trust_remote_code = False
    with atomic_folder.complete_or_absent(out) as temporary, _in_words(f"{checkpoint} cannot be exported"):
        model = load.load(checkpoint, torch.float32)
        ours = check.of_megatron(load.core(model), model.config) if forward_check else None  # as trained: not merged
        merged = load.merge(model)
        config = reference.config_of(like) if like else own_config.of_model(model, exporter.tokenizer)
        target = filled(config, model)
        outcome = check.must_agree(target, load.core(model), ours, str(checkpoint)) if ours else None
        reference.save(target, temporary, getattr(torch, dtype or _kept_dtype(like)))
        _copy_tokenizer(exporter, like, temporary)
        if chat:
            keep_template(temporary)
        notes = custom_code.drop(temporary)
    notes += [] if forward_check else ["no forward check: nothing shows that transformers computes what NeMo does"]
    return {"merged": merged, "forward_check": asdict(outcome) if outcome else None, "notes": notes}


def import_notes(checkpoint: Path) -> list[str]:
    """What an import had to tell the user, as its checkpoint keeps it."""
    try:
        return list(json.loads((checkpoint / KEPT / RECORD).read_bytes())["notes"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _kept_dtype(like: Path | None) -> str:
    if like is None:
        return "bfloat16"
    try:
        stated = json.loads((like / RECORD).read_bytes())["dtype"]
    except (OSError, ValueError, KeyError, TypeError):
        stated = hf_folder.stated_format(read_config(like))
    return stated if stated in hf_folder.FLOATS.values() else "bfloat16"


def filled(config: Any, model: GPTModel) -> PreTrainedModel:
    """The transformers model of a configuration, in fp32, with the weights of a loaded NeMo model.

    Raises:
        UserError: NeMo's model computes another function than `config` says, or a tensor has no place.
    """
    import torch

    from superpod.weights.families import nemo_config
    from superpod.weights.transfer import transfer

    state = load.state(model)
    embeddings = state["embedding.word_embeddings.weight"]
    tied = bool(config.tie_word_embeddings) and (
        "output_layer.weight" not in state or torch.equal(state["output_layer.weight"], embeddings)
    )
    config.tie_word_embeddings = tied
    vars(config).pop("quantization_config", None)  # the weights are numbers again
    nemo_config.must_match(nearest_class(config.to_dict(), "the exported config.json"), model)
    with torch.device("meta"):
        target = reference.empty(config)
    expected = transfer.tensors_of(target)
    if tied:
        expected.pop(transfer.HEAD, None)
    tensors = transfer.from_megatron(state, model.config, config.model_type, expected, tied)
    return reference.with_tensors(config, tensors, tied)


def _copy_tokenizer(exporter: Any, like: Path | None, out: Path) -> None:
    """Copy the tokenizer's files unchanged from `like`; without it, save NeMo's copy."""
    from superpod.data.tokens import tokenizer

    if like:
        for file in (*tokenizer.files(like), *like.glob("generation_config.json")):
            if file.name not in ("config.json", RECORD):
                shutil.copyfile(file, out / file.name)
    else:
        getattr(exporter.tokenizer, "tokenizer", exporter.tokenizer).save_pretrained(out)


def keep_template(folder: Path) -> None:
    """Give a folder's tokenizer the plain chat template if it has none: it was fine-tuned with that one."""
    from superpod.data.samples import chat
    from superpod.data.tokens import tokenizer

    if not tokenizer.pretrained(str(folder)).chat_template:
        (folder / "chat_template.jinja").write_text(chat.PLAIN, encoding="utf-8")


def must_be_new(out: Path, option: str = "") -> None:
    """UserError when `out` exists or cannot be made; `option` names it in the message."""
    paths.check(atomic_folder.temporary_path(out) if out.name else out, option)
    if out.exists():
        raise UserError(f"{option}{out} exists already", "name another folder, or remove it")
    paths.check_out(out, "config.json")


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
        AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False).save_pretrained(folder)
        return folder

    ModelConnector.save_hf_tokenizer_assets = save  # type: ignore[method-assign]
    try:
        yield
    finally:
        ModelConnector.save_hf_tokenizer_assets = original  # type: ignore[method-assign]
        shutil.rmtree(scratch, ignore_errors=True)
