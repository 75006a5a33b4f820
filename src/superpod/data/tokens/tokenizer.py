"""Train, load, copy and apply tokenizers, without network access."""

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
from superpod.data import paths
from superpod.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOD, PAD = "<|endoftext|>", "<|pad|>"
MIN_VOCAB = 256 + 2
"""All bytes, so that any text can be encoded, plus two special tokens."""
MAX_TRAINED = 1 << 24
"""Maximum vocabulary size for training; the trainer allocates memory for all ids at once."""
_MIN_FREQUENCY = 2
_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "config.json",
)  # fmt: skip
_INSTALL = "pip install -c constraints.txt -e '.[nemo]'"


class BrokenTokenizer(UserError):
    """A tokenizer file exists but cannot be read, so --vocab-size would not help."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with ids 0..vocab-1, of which `eod` ends a document.

    `engine` is the library for `file`: "tokenizers" (a tokenizer.json), "transformers" (a folder) or "sentencepiece"
    (a .model).
    """

    engine: str
    file: str
    vocab: int
    eod: int


def train(texts: Iterable[str], vocab: int, out: Path) -> int:
    """Train a byte-level BPE with at most `vocab` ids, write it to the folder `out`, and return its number of ids.

    The same texts in the same order give the same bytes. Pairs that occur once are not merged, so a short text may give
    fewer ids than `vocab`. Id 0 ends documents, id 1 is for padding. Raises UserError if `vocab` is below 258.
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
    settings["model_input_names"] = ["input_ids", "attention_mask"]  # without token_type_ids, which GPTs do not accept
    _dump(out / "tokenizer_config.json", settings | {"model_max_length": 10**30})
    _dump(out / "special_tokens_map.json", special)
    # Not bpe.save, which does not raise OSError if the disk is full.
    (out / "tokenizer.json").write_text(bpe.to_str(pretty=True), encoding="utf-8")
    return bpe.get_vocab_size()


def check_vocab(vocab: int) -> None:
    """Reject a vocabulary size that does not cover all bytes, or that is too large to train. Raises UserError."""
    if not MIN_VOCAB <= vocab <= MAX_TRAINED:
        raise UserError(
            f"--vocab-size is {paths.shorten(vocab)}; it must be between {MIN_VOCAB} (256 bytes and "
            f"{MIN_VOCAB - 256} special tokens) and {MAX_TRAINED}",
            "use 4096 for a trial, 32000 to 256000 for a real corpus",
        )


def load(path: Path, backend: Path | None = None) -> Tokenizer:
    """Load a tokenizer folder or .model file without network access.

    If the tokenizer's class needs transformers, the tokenizer is converted once to a plain tokenizer.json at `backend`,
    so that workers do not have to import transformers, which takes seconds.

    Raises:
        UserError: there is no tokenizer at `path`, it has no end-of-sequence token, or a required library is missing.
    """
    if path.is_file() and path.suffix == ".model":
        return _load_sentencepiece(path)
    settings = path / "tokenizer_config.json"
    if settings.is_file() and (path / "tokenizer.json").is_file():
        config = json.loads(settings.read_bytes())
        # Only transformers handles added tokens correctly; they may change ids and the splitting of text.
        if config.get("tokenizer_class") == "PreTrainedTokenizerFast" and not config.get("added_tokens_decoder"):
            return _load_plain(path, config.get("eos_token") or config.get("sep_token"))
    return _resolve(path, backend)


def _load_sentencepiece(path: Path) -> Tokenizer:
    package = library("sentencepiece")
    try:
        model = package.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError, ValueError) as error:
        message = f"{paths.shorten(path)} is not a SentencePiece model: {paths.shorten(str(error).strip())}"
        raise BrokenTokenizer(message, FETCH) from None
    return Tokenizer("sentencepiece", str(path), model.get_piece_size(), _eod(model.eos_id(), path))


def _load_plain(path: Path, end: str | dict[str, str] | None) -> Tokenizer:
    file = str(path / "tokenizer.json")
    backend = library("tokenizers").Tokenizer.from_file(file)
    end = end["content"] if isinstance(end, dict) else end  # an AddedToken as JSON
    return Tokenizer("tokenizers", file, size(backend.get_vocab()), _eod(backend.token_to_id(end or ""), path))


def _resolve(path: Path, backend: Path | None) -> Tokenizer:
    loaded = load_pretrained(str(path))
    end = loaded.eos_token_id if loaded.eos_token_id is not None else loaded.sep_token_id  # as in NeMo's AutoTokenizer
    vocab, eod = size(loaded.get_vocab()), _eod(cast("int | None", end), path)
    backend_tokenizer = getattr(loaded, "backend_tokenizer", None)  # fast tokenizers have one
    if backend_tokenizer is None or backend is None:
        return Tokenizer("transformers", str(path), vocab, eod)
    backend.write_text(backend_tokenizer.to_str(), encoding="utf-8")
    return Tokenizer("tokenizers", str(backend), vocab, eod)


def load_pretrained(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer with transformers from a folder or the local Hub cache. Raises UserError if that fails."""
    try:
        return library("transformers").AutoTokenizer.from_pretrained(
            name, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"no tokenizer can be loaded from {name}: {reason}", FETCH) from None


def encoder(tokenizer: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    """Return a function that converts texts to token ids without special tokens.

    Text that looks like a special token is tokenized as ordinary text; only the writer adds end-of-document tokens.
    """
    if tokenizer.engine == "sentencepiece":
        return library("sentencepiece").SentencePieceProcessor(model_file=tokenizer.file).encode
    if tokenizer.engine == "transformers":
        loaded = load_pretrained(tokenizer.file)

        def encode(texts: list[str]) -> list[list[int]]:
            return loaded(texts, add_special_tokens=False, split_special_tokens=True, verbose=False).data["input_ids"]

        return encode
    fast = library("tokenizers").Tokenizer.from_file(tokenizer.file)
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = True
    return lambda texts: [encoding.ids for encoding in fast.encode_batch_fast(texts, add_special_tokens=False)]


def files(path: Path) -> list[Path]:
    """Return the tokenizer files in a folder, sorted, excluding model weights. Raises UserError if there are none."""
    if path.is_file() and path.suffix == ".model":
        return [path]
    candidates = [file for file in sorted(path.glob("*")) if file.is_file()]
    parts = [file for file in candidates if any(fnmatch(file.name, pattern) for pattern in _FILES)]
    if not any(file.name != "config.json" for file in parts):
        raise UserError(f"{path} contains no tokenizer: neither tokenizer.json nor tokenizer.model", FETCH)
    return parts


def digest(path: Path) -> str:
    """Return the hex SHA-256 of the names and contents of a tokenizer's files."""
    sha256 = hashlib.sha256()
    for file in files(path):
        content = file.read_bytes()
        sha256.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return sha256.hexdigest()


def copy(path: Path, out: Path) -> None:
    """Copy a tokenizer's files to the folder `out`, or a .model file to the file `out`, without custom code."""
    if path.is_file():
        shutil.copyfile(path, out)
        return
    out.mkdir(parents=True)
    for file in files(path):
        shutil.copyfile(file, out / file.name)
    custom_code.remove_keys(out)


def size(vocab: dict[str, int]) -> int:
    """Return the vocabulary size that covers all ids, which may have gaps."""
    return max(len(vocab), max(vocab.values()) + 1)


def _eod(token: int | None, path: Path) -> int:
    if token is None or token < 0:  # sentencepiece returns -1 if there is none
        raise UserError(
            f"the tokenizer {path} has no end-of-sequence token, which must end each document", "set its eos_token"
        )
    return token


def library(name: str) -> ModuleType:
    """Import a package of the [nemo] extra. Raises UserError with the command to install it if it is missing."""
    import importlib
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own dependencies
            return importlib.import_module(name)
    except ImportError:
        hint = "pip install sentencepiece" if name == "sentencepiece" else _INSTALL
        raise UserError(f"the Python package {name} is required but not installed", hint) from None


def _dump(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="ascii")


FETCH = "download its files: hf download NAME --include 'tokenizer*' --include '*.json' --local-dir DIR"
