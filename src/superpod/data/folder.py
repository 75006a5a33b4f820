"""The data folder: `dataset.json` and the files it names. Recipes take data in this form only."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.common import atomic_file
from superpod.data.readers import paths
from superpod.data.tokens import indexed
from superpod.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

FILE = "dataset.json"
SCHEMA = 1
DEFAULT_SPLIT = "969,30,1"
"""Shares of training, validation and test documents: what NeMo's and Megatron's examples use."""
HUB = "hf:"
"""Prefix of a tokenizer that is a name on the Hugging Face hub, not a path."""
MAX_VOCAB = 2**31 - 1
"""Megatron's token files hold ids as int32 at most."""
SPLITS = ("train", "validation", "test")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def parse_split(split: str) -> tuple[float, float, float]:
    """The three shares of "train,validation,test", normalised to sum to 1; UserError when they are anything else.

    Stricter than Megatron, which takes every run of digits and dots for a number ("1e3" for 1 and 3).
    """
    parts = split.split(",")
    if len(parts) != len(SPLITS) or not all(re.fullmatch(r"\d+(\.\d*)?|\.\d+", part.strip()) for part in parts):
        hint = f"for example {DEFAULT_SPLIT}: train, validation, test"
        raise UserError(f"split {paths.short(repr(split))} is not three plain numbers with commas between", hint)
    shares = [float(part) for part in parts]
    if not math.isfinite(sum(shares)):
        message = f"split {paths.short(repr(split))} holds numbers too large to add up"
        raise UserError(message, f"for example {DEFAULT_SPLIT}")
    if sum(shares) <= 0:
        raise UserError(f"split {split!r} sums to 0: every part would be empty", f"for example {DEFAULT_SPLIT}")
    first, second, third = (share / sum(shares) for share in shares)
    return first, second, third


def split_ranges(split: str, sequences: int) -> list[tuple[int, int]]:
    """[begin, end) of the sequences that Megatron gives to train, validation and test, in file order.

    The arithmetic of `convert_split_vector_to_split_matrix` and `_build_megatron_dataset_splits` (megatron-core
    0.15.3), rounding included. A part with share 0 is empty.
    """
    edges = [0.0]
    for share in parse_split(split):
        edges.append(edges[-1] + share)
    marks = [round(edge * float(sequences)) for edge in edges]
    return list(pairwise(marks))


def default_split(sequences: int) -> str:
    """969,30,1; where that leaves a part empty, the nearest split by whole documents that does not."""
    if all(begin < end for begin, end in split_ranges(DEFAULT_SPLIT, sequences)):
        return DEFAULT_SPLIT
    held_out = max(1, round(0.03 * sequences))  # the share of 30 in 969,30,1
    return {1: "1,0,0", 2: "1,1,0"}.get(sequences, f"{sequences - held_out - 1},{held_out},1")


def check_parts(split: str, sequences: int, whose: str) -> None:
    """UserError when a part with a share gets none of the documents.

    Megatron would never end: `GPTDataset._get_num_epochs` (0.15.3) adds the part's 0 tokens until they suffice.
    """
    ranges = zip(SPLITS, parse_split(split), split_ranges(split, sequences), strict=True)
    if empty := [name for name, share, (begin, end) in ranges if share and begin == end]:
        message = f"{whose}: split {split} leaves none of {sequences} documents for {' and '.join(empty)}"
        hint = f"--split {default_split(sequences)}, or more documents (JSON lines hold many in a file)"
        raise UserError(message, hint)


@dataclass(frozen=True)
class DataFolder:
    """A checked data folder. Its fields are those of dataset.json; paths inside the folder are relative to it.

    `weights` is None for a single prefix, or for a blend by size. `tokens` and `documents` are sums over the
    prefixes. `sha256` maps a prefix to the digest of its .bin followed by its .idx; prefixes that were registered
    without hashing are absent. `source` says what `data build` made it from.
    """

    path: Path
    prefixes: tuple[str, ...]
    tokenizer: str
    vocab: int
    tokens: int
    documents: int
    split: str = DEFAULT_SPLIT
    weights: tuple[float, ...] | None = None
    sha256: dict[str, str] = field(default_factory=dict)
    index_cache: str | None = None
    source: dict[str, object] | None = None

    @classmethod
    def load(cls, path: str | Path, verify_sha: bool = False) -> DataFolder:
        """Read and check a data folder: keys, prefixes, sizes, tokenizer; digests too with `verify_sha` (slow).

        Raises:
            UserError: anything that would break a run later, with the file and the key.
        """
        folder = Path(path).absolute()
        data_folder = cls(path=folder, **_read(folder / FILE).model_dump(exclude={"schema_"}))
        data_folder.check(verify_sha)
        return data_folder

    def check(self, verify_sha: bool = False) -> None:
        """What `load` checks beyond the form of dataset.json; UserError as there."""
        self._check_keys()
        self._check_files(verify_sha)

    def write(self) -> None:
        """Write dataset.json atomically."""
        atomic_file.write(self.path / FILE, json.dumps(self.facts(), indent=2) + "\n")

    def facts(self) -> dict[str, object]:
        """The content of dataset.json."""
        return {"schema": SCHEMA, **{key: value for key, value in vars(self).items() if key != "path"}}

    @property
    def prefix_paths(self) -> tuple[Path, ...]:
        """Absolute path prefixes, in the order of `prefixes`."""
        return tuple(self.path / prefix for prefix in self.prefixes)

    @property
    def tokenizer_path(self) -> Path | None:
        """Absolute path of the tokenizer's folder or .model file; None when it is a name on the hub."""
        return None if self.tokenizer.startswith(HUB) else self.path / self.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """What a tokenizer class takes: an absolute path, or the name on the hub."""
        return str(self.tokenizer_path or self.tokenizer.removeprefix(HUB))

    @property
    def is_sentencepiece(self) -> bool:
        """Whether the tokenizer is a single SentencePiece .model file."""
        return self.tokenizer.endswith(".model")

    @property
    def index_cache_path(self) -> Path:
        """Where Megatron keeps its sample indices for exactly this data; nothing is created here.

        The subfolder's name depends on the content. Megatron's own cache key knows only the path of a prefix, and would
        use old indices for data that has been replaced since.
        """
        content = json.dumps([sorted(self.sha256.items()), self.prefixes, self.documents, self.tokens])
        return self.path / (self.index_cache or "index_cache") / hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def blend(self) -> list[str]:
        """Megatron's form: [prefix...], or with weights the flattened [weight, prefix, weight, prefix...]."""
        paths = [str(path) for path in self.prefix_paths]
        if self.weights is None or len(paths) == 1:
            return paths
        # repr gives the shortest text that reads back as the same number.
        return [part for pair in zip(map(repr, self.weights), paths, strict=True) for part in pair]

    def split_documents(self) -> dict[str, int]:
        """Documents (sequences, where a file has several a document) per part, summed over the prefixes."""
        totals: dict[str, int] = dict.fromkeys(SPLITS, 0)
        for prefix in self.prefix_paths:
            for name, (begin, end) in zip(SPLITS, split_ranges(self.split, _sequences(prefix)), strict=True):
                totals[name] += end - begin
        return totals

    def _check_keys(self) -> None:
        file = self.path / FILE
        if self.weights is not None:
            if len(self.weights) != len(self.prefixes):
                raise UserError(
                    f"{file}: weights: {len(self.weights)} weights for {len(self.prefixes)} prefixes",
                    "give one weight for each prefix, or null to blend by size",
                )
            if not all(0 < weight < float("inf") for weight in self.weights):
                raise UserError(f"{file}: weights: {list(self.weights)} must be positive", "leave a prefix out instead")
        if len(set(self.prefixes)) < len(self.prefixes):  # Megatron would count its documents twice
            raise UserError(f"{file}: prefixes: one is named twice", "name it once, with the sum of the weights")
        if self.tokenizer.startswith(HUB):
            check_hub_name(self.tokenizer, f"{file}: tokenizer: ")
        cache = self.path / (self.index_cache or "index_cache")
        paths.check_folder(cache, f"{file}: index_cache: ", "name a folder, or none for the one in the data folder")
        try:
            parse_split(self.split)
        except UserError as error:
            raise UserError(f"{file}: {error}", error.hint) from None

    def _check_digests(self) -> None:
        for prefix, digest in self.sha256.items():
            if prefix not in self.prefixes or not re.fullmatch("[0-9a-f]{64}", digest):
                entry = f"{self.path / FILE}: sha256: {paths.short(repr(prefix))}: {paths.short(repr(digest))}"
                hint = "64 hex digits for each prefix, or none at all: {}"
                raise UserError(f"{entry} is not the digest of a prefix", hint)

    def _check_files(self, verify_sha: bool) -> None:
        file = self.path / FILE
        indices = [indexed.verify(prefix) for prefix in self.prefix_paths]
        for prefix, index in zip(self.prefix_paths, indices, strict=True):
            check_parts(self.split, index.sequences, f"{file}: split: {prefix}")
        totals = {"tokens": sum(i.tokens for i in indices), "documents": sum(i.documents for i in indices)}
        for key, total in totals.items():
            if getattr(self, key) != total:
                message = f"{file}: {key}: says {getattr(self, key)}, the files hold {total}"
                raise UserError(message, "the files were replaced since: make or register the folder again")
        self._check_digests()
        self._check_tokenizer()
        for prefix, registered in self.sha256.items() if verify_sha else ():
            if (digest := indexed.digest(self.path / prefix)) != registered:
                message = f"{file}: sha256: {prefix} has {digest[:12]}..., not {registered[:12]}..."
                raise UserError(message, "the files changed since they were registered: restore or register them again")

    def _check_tokenizer(self) -> None:
        path = self.tokenizer_path
        if path is None:
            return
        where, hint = f"{self.path / FILE}: tokenizer: ", "give its folder, or its .model file"
        paths.check(path, where, hint)
        files = [path] if self.is_sentencepiece else [path / name for name in _TOKENIZER_FILES]
        if not any(file.is_file() for file in files):
            raise UserError(f"{where}{path} holds no tokenizer", hint)


def check_hub_name(tokenizer: str, where: str) -> None:
    """UserError unless "hf:..." names a repository as the Hugging Face hub allows."""
    name = tokenizer.removeprefix(HUB)
    if len(name) > 96 or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        message = f"{where}{paths.short(repr(tokenizer))} names nothing on the hub"
        raise UserError(message, f"give {HUB}ORG/NAME, a folder, or a .model file")


def name_in_folder(path: str | Path, folder: Path) -> str:
    """How dataset.json names a path: relative to the folder when inside it, absolute otherwise."""
    full = Path(os.path.abspath(path))
    return str(full.relative_to(folder)) if full.is_relative_to(folder) else str(full)


def _sequences(prefix: Path) -> int:
    return indexed.read_header(prefix)[1]


def _read(file: Path) -> BaseModel:
    from pydantic import ValidationError

    paths.check(file)
    if not file.is_file():
        raise UserError(
            f"{paths.short(file.parent)} is not a data folder: it has no {FILE}",
            "make one with recipes data build or add",
        )
    if not os.access(file, os.R_OK):
        raise UserError(f"cannot read {file}", "its owner must allow it: chmod a+r")
    try:
        return _schema().model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]  # one is enough to act on
        key = ".".join(map(str, first["loc"])) or "the whole file"
        raise UserError(f"{file}: {key}: {first['msg']}", "see docs/data.md, or build the folder again") from None


@lru_cache
def _schema() -> type[BaseModel]:
    """The form of dataset.json. Made when first needed: importing pydantic costs time that --help does not have."""
    from pydantic import BaseModel, ConfigDict, Field

    class Dataset(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        schema_: int = Field(alias="schema", ge=SCHEMA, le=SCHEMA)
        prefixes: tuple[str, ...] = Field(min_length=1)
        weights: tuple[float, ...] | None = None
        split: str
        tokenizer: str = Field(min_length=1)
        vocab: int = Field(gt=0, le=MAX_VOCAB)
        tokens: int = Field(gt=0)
        documents: int = Field(gt=0)
        sha256: dict[str, str]
        index_cache: str | None = None
        source: dict[str, object] | None = None

    return Dataset
