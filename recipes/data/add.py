"""`recipes data add`: token files that are already there, registered as a data folder. Nothing is copied."""

import os
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from superpod.errors import UserError
from superpod.recipes.data import indexed, paths, tokenizer
from superpod.recipes.data.folder import (
    DEFAULT_SPLIT,
    FILE,
    HUB,
    MAX_VOCAB,
    DataFolder,
    check_hub_name,
    parse_split,
    stored,
)

_SAMPLE = 1 << 18
"""Tokens looked at in each of three places of a prefix, to see that their ids fit the vocabulary."""


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
    """Write `out`/dataset.json for existing prefixes (with or without .bin/.idx) and return the checked folder.

    `tokenizer_name` is a folder, a .model file or a name on the Hugging Face hub; `vocab_size` is needed only where
    the tokenizer cannot be read here. `sha256` hashes every file, reporting bytes to `progress`. Registering the
    same again changes nothing. UserError for whatever `DataFolder.load` refuses, for token ids beyond the
    vocabulary, and for a folder that holds something else.
    """
    folder = Path(out).absolute()
    paths.check_out(folder, FILE)
    if vocab_size is not None and not 0 < vocab_size <= MAX_VOCAB:
        said = f"--vocab-size {paths.short(vocab_size)} is outside 1..{MAX_VOCAB}"
        raise UserError(said, "leave it out where the tokenizer can be read here")
    for given in (*prefixes, tokenizer_name, *([index_cache] if index_cache else [])):
        paths.check(given)
    plain = [_bare(prefix) for prefix in prefixes]
    if not plain:
        raise UserError("data add needs at least one --prefix", "give the path of a .bin/.idx pair without the ending")
    parse_split(split)
    facts = [indexed.verify(prefix) for prefix in plain]
    name = _stored_tokenizer(tokenizer_name, folder)
    vocab = _vocab(name, folder, vocab_size)
    for prefix, found in zip(plain, facts, strict=True):
        _check_ids(prefix, found, vocab)
    named = tuple(stored(prefix, folder) for prefix in plain)
    made = DataFolder(
        path=folder,
        prefixes=named,
        weights=tuple(weights) if weights else None,
        split=split,
        tokenizer=name,
        vocab=vocab,
        tokens=sum(found.tokens for found in facts),
        documents=sum(found.documents for found in facts),
        index_cache=stored(index_cache, folder) if index_cache else None,
    )
    made.check()
    _refuse_other(made)
    return _register(replace(made, sha256=_digests(named, plain, progress)) if sha256 else made)


def _refuse_other(made: DataFolder) -> None:
    folder = made.path
    if (folder / FILE).exists() or not folder.exists():
        return
    if os.listdir(folder) and all(map(os.path.isabs, made.prefixes)):  # none of them lies in it
        raise UserError(f"{folder} holds something else", "choose another --out, or an empty folder")


def _register(made: DataFolder) -> DataFolder:
    folder = made.path
    if (folder / FILE).exists():
        there = DataFolder.load(folder)
        if there.facts() != made.facts():
            changed = [key for key, value in made.facts().items() if there.facts()[key] != value]
            said = f"{folder} is another data folder already: {', '.join(changed)} would change"
            raise UserError(said, f"choose another --out, or delete {folder / FILE}")
        return there
    folder.mkdir(parents=True, exist_ok=True)
    made.write()
    return DataFolder.load(folder)


def _bare(prefix: str) -> str:
    ending = prefix.endswith((".bin", ".idx")) and not os.path.exists(f"{prefix}.bin")
    return os.path.abspath(os.path.expanduser(prefix[:-4] if ending else prefix))


def _stored_tokenizer(name: str, folder: Path) -> str:
    if name.startswith(HUB) or (not os.path.exists(name) and re.fullmatch(r"[\w.-]*\w/[\w.-]+", name)):
        check_hub_name(name, "--tokenizer ")
        return HUB + name.removeprefix(HUB)
    if not os.path.exists(name):
        raise UserError(
            f"--tokenizer {paths.short(name)} does not exist",
            f"a folder, a .model file, or ORG/NAME ({HUB}NAME) on the hub",
        )
    return stored(name, folder)


def _vocab(name: str, folder: Path, given: int | None) -> int:
    try:
        if name.startswith(HUB):
            found = tokenizer.size(tokenizer.pretrained(name.removeprefix(HUB)).get_vocab())
        else:
            found = tokenizer.load(folder / name).vocab
    except tokenizer.BrokenTokenizer:
        raise
    except UserError as error:
        if given:
            return given
        raise UserError(str(error), f"{error.hint}; or say --vocab-size") from None
    if given and given != found:
        raise UserError(f"--vocab-size {given}, but the tokenizer {name} has {found}", "leave out --vocab-size")
    return found


def _check_ids(prefix: str, facts: indexed.IndexFacts, vocab: int) -> None:
    with open(indexed.bin_path(prefix), "rb") as stream:
        for start in (0, facts.tokens // 2, max(facts.tokens - _SAMPLE, 0)):
            stream.seek(start * facts.itemsize)
            ids = array(indexed.TYPECODES[facts.dtype], stream.read(_SAMPLE * facts.itemsize))
            if ids and not (min(ids) >= 0 and max(ids) < vocab):
                wrong = max(ids) if max(ids) >= vocab else min(ids)
                said = f"{indexed.bin_path(prefix)} holds token id {wrong}, but the tokenizer has ids 0..{vocab - 1}"
                raise UserError(said, "give the tokenizer that these files were made with")


def _digests(names: Sequence[str], prefixes: Sequence[str], progress: Callable[[int, int], None]) -> dict[str, str]:
    sizes = [path(prefix).stat().st_size for prefix in prefixes for path in (indexed.bin_path, indexed.idx_path)]
    done, total = 0, sum(sizes)

    def more(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return {name: indexed.digest(prefix, more) for name, prefix in zip(names, prefixes, strict=True)}
