"""`recipes data add`: register existing token files as a data folder without copying them."""

import os
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from superpod.data import paths
from superpod.data.folder import (
    DEFAULT_SPLIT,
    FILE,
    HUB,
    MAX_VOCAB,
    DataFolder,
    check_hub_name,
    parse_split,
    relative_if_inside,
)
from superpod.data.tokens import indexed, tokenizer
from superpod.errors import UserError

_CHECKED_TOKENS = 1 << 18
"""Tokens checked at the beginning, the middle and the end of a prefix; reading all of a corpus takes minutes."""


def add(
    out: str | Path,
    prefixes: Sequence[str],
    tokenizer_name: str,
    *,
    weights: Sequence[float] | None = None,
    split: str = DEFAULT_SPLIT,
    vocab_size: int | None = None,
    index_cache: str | Path | None = None,
    sha256: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DataFolder:
    """Register existing token files in `out`/dataset.json, and return the validated data folder.

    Registering the same files again has no effect.

    Args:
        out: the data folder.
        prefixes: paths of the token files, with or without .bin or .idx.
        tokenizer_name: a folder, a .model file or a name on the Hugging Face Hub.
        weights: weight per prefix; None for a blend by number of tokens.
        split: shares of training, validation and test.
        vocab_size: number of token ids; required only if the tokenizer cannot be read on this machine.
        index_cache: folder for Megatron's sample indices.
        sha256: whether to compute a digest of each prefix.
        progress: called with (processed bytes, total bytes) while digests are computed.

    Raises:
        UserError: the folder is invalid (see `DataFolder.load`) or contains other files, or token ids exceed the
            vocabulary.
    """
    folder = Path(out).absolute()
    paths.check_output_folder(folder, FILE)
    if vocab_size is not None and not 0 < vocab_size <= MAX_VOCAB:
        message = f"--vocab-size is {paths.shorten(vocab_size)}; it must be between 1 and {MAX_VOCAB}"
        raise UserError(message, "omit it if the tokenizer can be read on this machine")
    for option, value in (*(("--prefix", prefix) for prefix in prefixes), ("--tokenizer", tokenizer_name)):
        if not value.strip():
            raise UserError(f"{option} is empty", "pass a path")
        paths.check(value)
    if index_cache:
        paths.check(index_cache)
    prefix_paths = [_strip_suffix(prefix) for prefix in prefixes]
    if not prefix_paths:
        raise UserError("at least one --prefix is required", "pass the path of a .bin/.idx pair without its suffix")
    parse_split(split)
    indices = [indexed.verify(prefix) for prefix in prefix_paths]
    name = _locate_tokenizer(tokenizer_name, folder)
    vocab = _find_vocab_size(name, folder, vocab_size)
    for prefix, index in zip(prefix_paths, indices, strict=True):
        _check_token_ids(prefix, index, vocab)
    names = tuple(relative_if_inside(prefix, folder) for prefix in prefix_paths)
    data_folder = DataFolder(
        path=folder,
        prefixes=names,
        weights=tuple(weights) if weights else None,
        split=split,
        tokenizer=name,
        vocab=vocab,
        tokens=sum(index.tokens for index in indices),
        documents=sum(index.documents for index in indices),
        index_cache=relative_if_inside(index_cache, folder) if index_cache else None,
    )
    _check_with_option_names(data_folder)
    _require_empty_or_data_folder(data_folder)
    if sha256:
        data_folder = replace(data_folder, sha256=_compute_digests(names, prefix_paths, progress))
    _require_distinct_tokens(data_folder)
    return _register(data_folder)


def _require_distinct_tokens(data_folder: DataFolder) -> None:
    """Raise UserError if two prefixes are links to the same files, or copies with the same digest."""
    seen: dict[object, str] = {}
    for prefix, path in zip(data_folder.prefixes, data_folder.prefix_paths, strict=True):
        for identity in (indexed.bin_path(path).resolve(), data_folder.sha256.get(prefix)):
            if identity in seen:
                message = f"--prefix: {prefix} has the same tokens as {seen[identity]}"
                raise UserError(message, "pass it once, with the sum of the weights")
            if identity is not None:
                seen[identity] = prefix


_OPTIONS = {"weights": "--weight", "prefixes": "--prefix", "index_cache": "--index-cache"}
"""Key of dataset.json -> option, if their names differ."""


def _check_with_option_names(data_folder: DataFolder) -> None:
    """Call `DataFolder.check`, and replace the keys of dataset.json in its error by the options that set them."""
    try:
        data_folder.check()
    except UserError as error:
        key, colon, rest = str(error).removeprefix(f"{data_folder.path / FILE}: ").partition(": ")
        option = _OPTIONS.get(key, f"--{key}")
        if not str(error).startswith(f"{data_folder.path / FILE}: "):
            raise
        raise UserError(f"{option}: {rest}" if colon else key, error.hint) from None


def _require_empty_or_data_folder(data_folder: DataFolder) -> None:
    """Raise UserError if the folder contains files that are neither a data folder nor one of its prefixes."""
    folder = data_folder.path
    if (folder / FILE).exists() or not folder.exists():
        return
    if os.listdir(folder) and all(map(os.path.isabs, data_folder.prefixes)):  # all prefixes are outside
        raise UserError(f"{folder} contains other files", "choose another --out, or an empty folder")


def _register(data_folder: DataFolder) -> DataFolder:
    """Write dataset.json and return the validated folder. Raises UserError if the file exists with other values."""
    folder = data_folder.path
    if (folder / FILE).exists():
        existing_folder = DataFolder.load(folder)
        if existing_folder.as_json() != data_folder.as_json():
            changed = [key for key, value in data_folder.as_json().items() if existing_folder.as_json()[key] != value]
            message = f"{folder} is a data folder with different values of {', '.join(changed)}"
            raise UserError(message, f"choose another --out, or delete {folder / FILE}")
        return existing_folder
    folder.mkdir(parents=True, exist_ok=True)
    data_folder.write()
    return DataFolder.load(folder)


def _strip_suffix(prefix: str) -> str:
    """Return the absolute path of a prefix without .bin or .idx."""
    # A prefix may itself end in .bin; its files are then x.bin.bin and x.bin.idx.
    has_suffix = prefix.endswith((".bin", ".idx")) and not os.path.exists(f"{prefix}.bin")
    return os.path.abspath(os.path.expanduser(prefix[:-4] if has_suffix else prefix))


def _locate_tokenizer(name: str, folder: Path) -> str:
    """Return the `tokenizer` key of dataset.json: a path, or "hf:" and a name on the Hub."""
    if name.startswith(HUB) or (not os.path.exists(name) and re.fullmatch(r"[\w.-]*\w/[\w.-]+", name)):
        check_hub_name(name, "--tokenizer ")
        return HUB + name.removeprefix(HUB)
    if not os.path.exists(name):
        raise UserError(
            f"--tokenizer {paths.shorten(name)} does not exist",
            f"pass a folder, a .model file, or ORG/NAME ({HUB}NAME) on the Hub",
        )
    return relative_if_inside(name, folder)


def _find_vocab_size(name: str, folder: Path, vocab_size: int | None) -> int:
    """Return the tokenizer's number of ids, or `vocab_size` if it cannot be read on this machine.

    Raises:
        UserError: the tokenizer cannot be read and `vocab_size` is None, or they differ.
    """
    try:
        if name.startswith(HUB):
            vocab = tokenizer.compute_vocab_size(tokenizer.load_pretrained(name.removeprefix(HUB)).get_vocab())
        else:
            vocab = tokenizer.load(folder / name).vocab
    except tokenizer.BrokenTokenizer:
        raise
    except UserError as error:
        if vocab_size:
            return vocab_size
        raise UserError(str(error), f"{error.hint}; or pass --vocab-size") from None
    if vocab_size and vocab_size != vocab:
        message = f"--vocab-size is {vocab_size}, but the tokenizer {name} has {vocab} ids"
        raise UserError(message, "omit --vocab-size")
    return vocab


def _check_token_ids(prefix: str, index: indexed.IndexSummary, vocab: int) -> None:
    """Raise UserError if one of the first, middle or last `_CHECKED_TOKENS` token ids is not in the vocabulary."""
    with open(indexed.bin_path(prefix), "rb") as stream:
        for start in (0, index.tokens // 2, max(index.tokens - _CHECKED_TOKENS, 0)):
            stream.seek(start * index.itemsize)
            ids = array(indexed.TYPECODES[index.dtype], stream.read(_CHECKED_TOKENS * index.itemsize))
            if ids and not (min(ids) >= 0 and max(ids) < vocab):
                wrong_id = max(ids) if max(ids) >= vocab else min(ids)
                file = indexed.bin_path(prefix)
                message = f"{file} contains token id {wrong_id}, but the tokenizer has ids 0 to {vocab - 1}"
                raise UserError(message, "pass the tokenizer with which these files were built")


def _compute_digests(
    names: Sequence[str], prefixes: Sequence[str], progress: Callable[[int, int], None]
) -> dict[str, str]:
    """Return the sha256 of each prefix by name; `progress` is called with (processed bytes, total bytes)."""
    sizes = [path(prefix).stat().st_size for prefix in prefixes for path in (indexed.bin_path, indexed.idx_path)]
    done, total = 0, sum(sizes)

    def add_bytes(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return {name: indexed.digest(prefix, add_bytes) for name, prefix in zip(names, prefixes, strict=True)}
