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
"""256 bytes, so that any text can be encoded, and two special tokens."""
MAX_TRAINED = 1 << 24
"""Maximum vocabulary size for training, because the trainer allocates memory for all ids at once."""
_MIN_FREQUENCY = 2
_FILE_PATTERNS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "config.json",
)  # fmt: skip
_INSTALL = "pip install -c constraints.txt -e '.[nemo]'"


class BrokenTokenizer(UserError):
    """A tokenizer file is corrupt, so --vocab-size would not help."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with `vocab` ids, of which `eod` ends a document.

    `engine` is the library that loads `file`: "tokenizers" (tokenizer.json), "transformers" (a folder) or
    "sentencepiece" (a .model file).
    """

    engine: str
    file: str
    vocab: int
    eod: int


def train(texts: Iterable[str], vocab: int, out: Path) -> int:
    """Train a byte-level BPE with at most `vocab` ids, write it to the folder `out`, and return its number of ids.

    The files are reproducible for the same texts in the same order. Pairs that occur once are not merged, so short
    texts may give fewer than `vocab` ids. Id 0 ends documents, id 1 is for padding. Raises UserError if `vocab` is
    below 258.
    """
    check_vocab_size(vocab)
    tk = import_package("tokenizers")
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
    _write_json(out / "tokenizer_config.json", settings | {"model_max_length": 10**30})
    _write_json(out / "special_tokens_map.json", special)
    # Not bpe.save, which does not raise OSError if the disk is full.
    (out / "tokenizer.json").write_text(bpe.to_str(pretty=True), encoding="utf-8")
    return bpe.get_vocab_size()


def check_vocab_size(vocab: int) -> None:
    """Raise UserError if a vocabulary is too small to contain all bytes, or too large to train."""
    if not MIN_VOCAB <= vocab <= MAX_TRAINED:
        raise UserError(
            f"--vocab-size is {paths.shorten(vocab)}; it must be between {MIN_VOCAB} (256 bytes and "
            f"{MIN_VOCAB - 256} special tokens) and {MAX_TRAINED}",
            "use 4096 for a trial, 32000 to 256000 for a real corpus",
        )


def load(path: Path, backend: Path | None = None) -> Tokenizer:
    """Load a tokenizer folder or .model file without network access.

    Args:
        path: the folder or file.
        backend: if the tokenizer's class needs transformers, whose import takes seconds, the tokenizer is converted to
            this tokenizer.json, from which workers load it. None to load it with transformers.

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
            return _load_tokenizer_json(path, config.get("eos_token") or config.get("sep_token"))
    return _load_with_transformers(path, backend)


def _load_sentencepiece(path: Path) -> Tokenizer:
    package = import_package("sentencepiece")
    try:
        model = package.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError, ValueError) as error:
        message = f"{paths.shorten(path)} is not a SentencePiece model: {paths.shorten(str(error).strip())}"
        raise BrokenTokenizer(message, DOWNLOAD_HINT) from None
    return Tokenizer("sentencepiece", str(path), model.get_piece_size(), _require_eod(model.eos_id(), path))


def _load_tokenizer_json(path: Path, end: str | dict[str, str] | None) -> Tokenizer:
    file = str(path / "tokenizer.json")
    backend = import_package("tokenizers").Tokenizer.from_file(file)
    end = end["content"] if isinstance(end, dict) else end  # an AddedToken as JSON
    eod = _require_eod(backend.token_to_id(end or ""), path)
    return Tokenizer("tokenizers", file, compute_vocab_size(backend.get_vocab()), eod)


def _load_with_transformers(path: Path, backend: Path | None) -> Tokenizer:
    loaded = load_pretrained(str(path))
    end = loaded.eos_token_id if loaded.eos_token_id is not None else loaded.sep_token_id  # as in NeMo's AutoTokenizer
    vocab, eod = compute_vocab_size(loaded.get_vocab()), _require_eod(cast("int | None", end), path)
    backend_tokenizer = getattr(loaded, "backend_tokenizer", None)  # fast tokenizers have one
    if backend_tokenizer is None or backend is None:
        return Tokenizer("transformers", str(path), vocab, eod)
    backend.write_text(backend_tokenizer.to_str(), encoding="utf-8")
    return Tokenizer("tokenizers", str(backend), vocab, eod)


def load_pretrained(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, or by name from the Hub cache. Raises UserError if that fails."""
    try:
        return import_package("transformers").AutoTokenizer.from_pretrained(
            name, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"cannot load a tokenizer from {name}: {reason}", DOWNLOAD_HINT) from None


def load_encoder(tokenizer: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    """Return a function that converts a list of texts to lists of token ids, without special tokens.

    Text that looks like a special token is tokenized like other text.
    """
    if tokenizer.engine == "sentencepiece":
        return import_package("sentencepiece").SentencePieceProcessor(model_file=tokenizer.file).encode
    if tokenizer.engine == "transformers":
        loaded = load_pretrained(tokenizer.file)

        def encode(texts: list[str]) -> list[list[int]]:
            return loaded(texts, add_special_tokens=False, split_special_tokens=True, verbose=False).data["input_ids"]

        return encode
    fast = import_package("tokenizers").Tokenizer.from_file(tokenizer.file)
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = True
    return lambda texts: [encoding.ids for encoding in fast.encode_batch_fast(texts, add_special_tokens=False)]


def list_files(path: Path) -> list[Path]:
    """Return the sorted tokenizer files in a folder, without model weights. Raises UserError if there are none."""
    if path.is_file() and path.suffix == ".model":
        return [path]
    candidates = [file for file in sorted(path.glob("*")) if file.is_file()]
    parts = [file for file in candidates if any(fnmatch(file.name, pattern) for pattern in _FILE_PATTERNS)]
    if not any(file.name != "config.json" for file in parts):
        raise UserError(f"{path} contains no tokenizer: neither tokenizer.json nor tokenizer.model", DOWNLOAD_HINT)
    return parts


def digest(path: Path) -> str:
    """Return the hex SHA-256 of the names and contents of a tokenizer's files."""
    sha256 = hashlib.sha256()
    for file in list_files(path):
        content = file.read_bytes()
        sha256.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return sha256.hexdigest()


def copy_files(path: Path, out: Path) -> None:
    """Copy a tokenizer's files, without custom code, to the folder `out`, or a .model file to the file `out`."""
    if path.is_file():
        shutil.copyfile(path, out)
        return
    out.mkdir(parents=True)
    for file in list_files(path):
        shutil.copyfile(file, out / file.name)
    custom_code.remove_keys(out)


def compute_vocab_size(vocab: dict[str, int]) -> int:
    """Return the vocabulary size (largest id + 1, because ids may have gaps) of a token -> id table."""
    return max(len(vocab), max(vocab.values()) + 1)


def _require_eod(token: int | None, path: Path) -> int:
    if token is None or token < 0:  # sentencepiece returns -1 if there is none
        raise UserError(f"the tokenizer {path} has no end-of-sequence token to end documents with", "set its eos_token")
    return token


def import_package(name: str) -> ModuleType:
    """Import and return a package of the [nemo] extra. Raises UserError with the install command if it is missing."""
    import importlib
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own dependencies
            return importlib.import_module(name)
    except ImportError:
        hint = "pip install sentencepiece" if name == "sentencepiece" else _INSTALL
        raise UserError(f"the Python package {name} is required but not installed", hint) from None


def _write_json(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="ascii")


DOWNLOAD_HINT = "download it with `hf download NAME --include 'tokenizer*' --include '*.json' --local-dir DIR`"
