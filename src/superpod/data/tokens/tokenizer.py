"""Train, load, copy and use tokenizers. All of them load offline, here and in NeMo."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from superpod.common import custom_code
from superpod.data.readers import paths
from superpod.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOD, PAD = "<|endoftext|>", "<|pad|>"
MIN_VOCAB = 256 + 2
"""Every byte, so that any text can be encoded, and two special tokens."""
MAX_TRAINED = 1 << 24
"""More ids than any text needs; the trainer allocates memory for all of them at once."""
_MIN_FREQUENCY = 2
_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "config.json",
)  # fmt: skip
_INSTALL = "pip install -c constraints.txt -e '.[nemo]'"


class BrokenTokenizer(UserError):
    """The file exists, but no tokenizer can be read from it: --vocab-size would not help."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that can encode: ids are 0..vocab-1, `eod` ends a document.

    `engine` is the library that encodes with `file`: "tokenizers" (a tokenizer.json), "transformers" (a folder)
    or "sentencepiece" (a .model).
    """

    engine: str
    file: str
    vocab: int
    eod: int


def train(texts: Iterable[str], vocab: int, out: Path) -> int:
    """Train a byte-level BPE of at most `vocab` ids and write the folder `out`; returns the ids reached.

    The same texts in the same order give the same bytes. Pairs seen once are not merged, so that little text gives
    fewer ids than `vocab`. Id 0 ends documents, id 1 pads. UserError when `vocab` < 258.
    """
    check_vocab(vocab)
    tk = library("tokenizers")
    bpe = tk.Tokenizer(tk.models.BPE())
    bpe.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tk.decoders.ByteLevel()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[EOD, PAD],
        initial_alphabet=tk.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(iter(texts), trainer)
    out.mkdir(parents=True)
    special = {"bos_token": EOD, "eos_token": EOD, "pad_token": PAD}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | special
    settings["model_input_names"] = ["input_ids", "attention_mask"]  # else token_type_ids, which no GPT takes
    _dump(out / "tokenizer_config.json", settings | {"model_max_length": 10**30})
    _dump(out / "special_tokens_map.json", special)
    (out / "tokenizer.json").write_text(bpe.to_str(pretty=True), encoding="utf-8")  # OSError when the disk is full
    return bpe.get_vocab_size()


def check_vocab(vocab: int) -> None:
    """UserError when a vocabulary of `vocab` ids cannot hold every byte, or is too large to train."""
    if vocab > MAX_TRAINED:
        hint = "4096 suits a trial, 32000 to 256000 a real corpus"
        raise UserError(f"--vocab-size {paths.short(vocab)} is above {MAX_TRAINED}, the most that is trained", hint)
    if vocab < MIN_VOCAB:
        raise UserError(
            f"--vocab-size {vocab} is below {MIN_VOCAB}: 256 bytes and {MIN_VOCAB - 256} special tokens",
            f"give {MIN_VOCAB} or more; 4096 suits a trial, 32000 and more a real corpus",
        )


def load(path: Path, backend: Path | None = None) -> Tokenizer:
    """Read a tokenizer folder or .model file, without network.

    A folder whose class needs transformers is resolved once, here, and written to `backend` as a plain
    tokenizer.json, so that workers need not import transformers (seconds each).

    Raises:
        UserError: no tokenizer at `path`, no end-of-sequence token in it, or a library that it needs is missing.
    """
    if path.is_file() and path.suffix == ".model":
        return _load_sentencepiece(path)
    settings = path / "tokenizer_config.json"
    if settings.is_file() and (path / "tokenizer.json").is_file():
        config = json.loads(settings.read_bytes())
        # Added tokens may change ids and splitting in ways that only transformers knows.
        if config.get("tokenizer_class") == "PreTrainedTokenizerFast" and not config.get("added_tokens_decoder"):
            return _load_plain(path, config.get("eos_token") or config.get("sep_token"))
    return _resolve(path, backend)


def _load_sentencepiece(path: Path) -> Tokenizer:
    package = library("sentencepiece")
    try:
        model = package.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError, ValueError) as error:
        message = f"{paths.short(path)} is not a SentencePiece model: {paths.short(str(error).strip())}"
        raise BrokenTokenizer(message, FETCH) from None
    return Tokenizer("sentencepiece", str(path), model.get_piece_size(), _eod(model.eos_id(), path))


def _load_plain(path: Path, end: str | dict[str, str] | None) -> Tokenizer:
    file = str(path / "tokenizer.json")
    plain = library("tokenizers").Tokenizer.from_file(file)
    end = end["content"] if isinstance(end, dict) else end  # an AddedToken as JSON
    return Tokenizer("tokenizers", file, size(plain.get_vocab()), _eod(plain.token_to_id(end or ""), path))


def _resolve(path: Path, backend: Path | None) -> Tokenizer:
    loaded = pretrained(str(path))
    end = loaded.eos_token_id if loaded.eos_token_id is not None else loaded.sep_token_id  # as NeMo's AutoTokenizer
    vocab, eod = size(loaded.get_vocab()), _eod(cast("int | None", end), path)
    backend_tokenizer = getattr(loaded, "backend_tokenizer", None)  # fast tokenizers have one
    if backend_tokenizer is None or backend is None:
        return Tokenizer("transformers", str(path), vocab, eod)
    backend.write_text(backend_tokenizer.to_str(), encoding="utf-8")
    return Tokenizer("tokenizers", str(backend), vocab, eod)


def pretrained(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer through transformers, from a folder or the local hub cache; UserError when it does not load."""
    try:
        return library("transformers").AutoTokenizer.from_pretrained(
            name, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"no tokenizer loads from {name}: {reason}", FETCH) from None


def encoder(tokenizer: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to token ids, without special tokens.

    Text that spells a special token is encoded as ordinary text: only the writer ends documents.
    """
    if tokenizer.engine == "sentencepiece":
        return library("sentencepiece").SentencePieceProcessor(model_file=tokenizer.file).encode
    if tokenizer.engine == "transformers":
        loaded = pretrained(tokenizer.file)

        def encode(texts: list[str]) -> list[list[int]]:
            return loaded(texts, add_special_tokens=False, split_special_tokens=True, verbose=False).data["input_ids"]

        return encode
    fast = library("tokenizers").Tokenizer.from_file(tokenizer.file)
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = True
    return lambda texts: [encoding.ids for encoding in fast.encode_batch_fast(texts, add_special_tokens=False)]


def files(path: Path) -> list[Path]:
    """The files that make up a tokenizer (never the weights beside it), sorted; UserError when there are none."""
    if path.is_file() and path.suffix == ".model":
        return [path]
    candidates = [file for file in sorted(path.glob("*")) if file.is_file()]
    parts = [file for file in candidates if any(fnmatch(file.name, pattern) for pattern in _FILES)]
    if not any(file.name != "config.json" for file in parts):
        raise UserError(f"{path} holds no tokenizer: no tokenizer.json, no tokenizer.model", FETCH)
    return parts


def digest(path: Path) -> str:
    """Hex sha256 over the names and contents of a tokenizer's files."""
    sha256 = hashlib.sha256()
    for file in files(path):
        content = file.read_bytes()
        sha256.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return sha256.hexdigest()


def copy(path: Path, out: Path) -> None:
    """Copy a tokenizer's files to the folder `out`, or a .model file to the file `out`; custom code stays behind."""
    if path.is_file():
        shutil.copyfile(path, out)
        return
    out.mkdir(parents=True)
    for file in files(path):
        shutil.copyfile(file, out / file.name)
    custom_code.drop(out)


def size(vocab: dict[str, int]) -> int:
    """How many ids a vocabulary needs: ids may have gaps, and the highest must fit too."""
    return max(len(vocab), max(vocab.values()) + 1)


def _eod(token: int | None, path: Path) -> int:
    if token is None or token < 0:  # sentencepiece says -1 for none
        raise UserError(f"the tokenizer {path} has no end-of-sequence token to end documents with", "set its eos_token")
    return token


def library(name: str) -> ModuleType:
    """A package of the [nemo] extra, imported when needed; UserError with what to install where it is missing."""
    import importlib
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers imports torch, which warns of packages the user never chose
            return importlib.import_module(name)
    except ImportError:
        hint = "pip install sentencepiece" if name == "sentencepiece" else _INSTALL
        raise UserError(f"this needs the Python package {name}, which is not installed", hint) from None


def _dump(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="ascii")


FETCH = "fetch its files first: hf download NAME --include 'tokenizer*' --include '*.json' --local-dir DIR"
