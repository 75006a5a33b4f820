"""Data folders, the only format that recipes train on: `dataset.json` and the token files that it lists."""

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
from superpod.data import paths
from superpod.data.tokens import indexed
from superpod.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

FILE = "dataset.json"
SCHEMA = 1
DEFAULT_SPLIT = "969,30,1"
"""Shares of training, validation and test documents, as in the examples of NeMo and Megatron."""
HUB = "hf:"
"""Prefix that distinguishes the name of a tokenizer on the Hugging Face Hub from a path."""
MAX_VOCAB = 2**31 - 1
"""Maximum vocabulary size: Megatron's token files store ids as int32 at most."""
SPLITS = ("train", "validation", "test")
_TOKENIZER_FILE_NAMES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def parse_split(split: str) -> tuple[float, float, float]:
    """Return the shares of training, validation and test, scaled to a sum of 1, from text such as "969,30,1".

    The syntax is stricter than in Megatron, which reads every sequence of digits and dots as a number ("1e3" as 1 and
    3).

    Raises:
        UserError: the text is not three numbers with a positive sum.
    """
    parts = split.split(",")
    if len(parts) != len(SPLITS) or not all(re.fullmatch(r"\d+(\.\d*)?|\.\d+", part.strip()) for part in parts):
        hint = f"example: {DEFAULT_SPLIT} for train, validation, test"
        raise UserError(f"split {paths.shorten(repr(split))} must be three numbers separated by commas", hint)
    shares = [float(part) for part in parts]
    if not math.isfinite(sum(shares)):
        message = f"split {paths.shorten(repr(split))} contains numbers that are too large"
        raise UserError(message, f"example: {DEFAULT_SPLIT}")
    if sum(shares) <= 0:
        raise UserError(f"split {split!r} sums to 0: every part would be empty", f"example: {DEFAULT_SPLIT}")
    first, second, third = (share / sum(shares) for share in shares)
    return first, second, third


def split_ranges(split: str, sequences: int) -> list[tuple[int, int]]:
    """Return the ranges [begin, end) of the sequences that Megatron uses for train, validation and test.

    The arithmetic is that of `convert_split_vector_to_split_matrix` and `_build_megatron_dataset_splits` (megatron-core
    0.15.3), including its rounding. A split with share 0 is empty.
    """
    edges = [0.0]
    for share in parse_split(split):
        edges.append(edges[-1] + share)
    marks = [round(edge * float(sequences)) for edge in edges]
    return list(pairwise(marks))


def default_split(sequences: int) -> str:
    """Return "969,30,1"; for few documents, a split by number of documents, such as "8,1,1" for 10."""
    if all(begin < end for begin, end in split_ranges(DEFAULT_SPLIT, sequences)):
        return DEFAULT_SPLIT
    held_out = max(1, round(0.03 * sequences))  # the share of 30 in 969,30,1
    return {1: "1,0,0", 2: "1,1,0"}.get(sequences, f"{sequences - held_out - 1},{held_out},1")


def require_nonempty_splits(split: str, sequences: int, name: str) -> None:
    """Check that train, validation and test each get documents unless their share is 0.

    With an empty split, Megatron would loop forever: `GPTDataset._get_num_epochs` (0.15.3) adds epochs of 0 tokens.

    Args:
        split: shares, such as "969,30,1".
        sequences: number of documents to split.
        name: name of the data for the error message.

    Raises:
        UserError: a split would be empty.
    """
    ranges = zip(SPLITS, parse_split(split), split_ranges(split, sequences), strict=True)
    empty_splits = [part for part, share, (begin, end) in ranges if share and begin == end]
    if empty_splits:
        message = f"{name}: split {split} of {sequences} documents leaves none for {' and '.join(empty_splits)}"
        hint = f"use --split {default_split(sequences)}, or add documents (a JSON lines file has one per line)"
        raise UserError(message, hint)


@dataclass(frozen=True)
class DataFolder:
    """A validated data folder with the fields of dataset.json. Paths inside the folder are relative to it.

    Attributes:
        path: the folder.
        prefixes: paths of the token files without .bin and .idx.
        tokenizer: path of the tokenizer, or `hf:` and its name on the Hub.
        vocab: number of token ids.
        tokens: number of tokens in all prefixes.
        documents: number of documents in all prefixes.
        split: shares of training, validation and test.
        weights: weight per prefix; None for a single prefix, or for a blend by size.
        sha256: digest of .bin followed by .idx per prefix, except for prefixes registered without a digest.
        index_cache: folder of Megatron's sample indices; None for `index_cache` in this folder.
        source: input and options of `data build`.
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
        """Read and validate a data folder.

        Args:
            path: the folder.
            verify_sha: also compare the digests of the token files, which reads them completely.

        Raises:
            UserError: a key, prefix, size, digest or the tokenizer is invalid; the message names the file and the key.
        """
        folder = Path(path).absolute()
        data_folder = cls(path=folder, **_read_dataset_json(folder / FILE).model_dump(exclude={"schema_"}))
        data_folder.check(verify_sha)
        return data_folder

    def check(self, verify_sha: bool = False) -> None:
        """Validate the values of dataset.json and the files. See `load` for `verify_sha` and errors."""
        self._check_keys()
        self._check_files(verify_sha)

    def write(self) -> None:
        """Write dataset.json atomically."""
        atomic_file.write(self.path / FILE, json.dumps(self.as_json(), indent=2) + "\n")

    def as_json(self) -> dict[str, object]:
        """Return the content of dataset.json as a dict."""
        return {"schema": SCHEMA, **{key: value for key, value in vars(self).items() if key != "path"}}

    @property
    def prefix_paths(self) -> tuple[Path, ...]:
        """Absolute path prefixes, in the order of `prefixes`."""
        return tuple(self.path / prefix for prefix in self.prefixes)

    @property
    def tokenizer_path(self) -> Path | None:
        """Absolute path of the tokenizer's folder or .model file; None for a tokenizer on the Hub."""
        return None if self.tokenizer.startswith(HUB) else self.path / self.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """Argument of a tokenizer class: an absolute path, or the name on the Hub."""
        return str(self.tokenizer_path or self.tokenizer.removeprefix(HUB))

    @property
    def is_sentencepiece(self) -> bool:
        """Whether the tokenizer is a single SentencePiece .model file."""
        return self.tokenizer.endswith(".model")

    @property
    def index_cache_path(self) -> Path:
        """Folder of Megatron's sample indices for this data, which may not exist yet.

        Its name contains a digest of the data, because Megatron's cache key contains only the paths of the prefixes, so
        that Megatron would use outdated indices after the data is replaced.
        """
        content = json.dumps([sorted(self.sha256.items()), self.prefixes, self.documents, self.tokens])
        return self.path / (self.index_cache or "index_cache") / hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def blend(self) -> list[str]:
        """Megatron's `--data-path`: [prefix, prefix, ...], or with weights [weight, prefix, weight, prefix, ...]."""
        paths = [str(path) for path in self.prefix_paths]
        if self.weights is None or len(paths) == 1:
            return paths
        # repr is the shortest text that parses to the same number.
        return [part for pair in zip(map(repr, self.weights), paths, strict=True) for part in pair]

    def split_documents(self) -> dict[str, int]:
        """Return the number of documents in each split over all prefixes (sequences, if documents have several)."""
        totals: dict[str, int] = dict.fromkeys(SPLITS, 0)
        for prefix in self.prefix_paths:
            _, sequences, _ = indexed.read_header(prefix)
            for name, (begin, end) in zip(SPLITS, split_ranges(self.split, sequences), strict=True):
                totals[name] += end - begin
        return totals

    def _check_keys(self) -> None:
        file = self.path / FILE
        if self.weights is not None:
            if len(self.weights) != len(self.prefixes):
                raise UserError(
                    f"{file}: weights: {len(self.weights)} weights for {len(self.prefixes)} prefixes",
                    "specify one weight per prefix, or null to blend by size",
                )
            if not all(0 < weight < float("inf") for weight in self.weights):
                raise UserError(f"{file}: weights: {list(self.weights)} must be positive", "remove the prefix instead")
        if len(set(self.prefixes)) < len(self.prefixes):  # Megatron would count its documents twice
            message = f"{file}: prefixes: a prefix is listed twice"
            raise UserError(message, "list it once, with the sum of the weights")
        if self.tokenizer.startswith(HUB):
            check_hub_name(self.tokenizer, f"{file}: tokenizer: ")
        cache = self.path / (self.index_cache or "index_cache")
        paths.check_folder(cache, f"{file}: index_cache: ", "specify a folder, or null for the default")
        try:
            parse_split(self.split)
        except UserError as error:
            raise UserError(f"{file}: {error}", error.hint) from None

    def _check_digests(self) -> None:
        for prefix, digest in self.sha256.items():
            if prefix not in self.prefixes or not re.fullmatch("[0-9a-f]{64}", digest):
                entry = f"{self.path / FILE}: sha256: {paths.shorten(repr(prefix))}: {paths.shorten(repr(digest))}"
                hint = "write 64 hex digits per prefix, or {} for no digests"
                raise UserError(f"{entry} is not the digest of a prefix", hint)

    def _check_files(self, verify_sha: bool) -> None:
        file = self.path / FILE
        indices = [indexed.verify(prefix) for prefix in self.prefix_paths]
        for prefix, index in zip(self.prefix_paths, indices, strict=True):
            require_nonempty_splits(self.split, index.sequences, f"{file}: split: {prefix}")
        totals = {"tokens": sum(i.tokens for i in indices), "documents": sum(i.documents for i in indices)}
        for key, total in totals.items():
            if getattr(self, key) != total:
                message = f"{file}: {key}: {getattr(self, key)}, but the files have {total}"
                raise UserError(message, "the files have been replaced; build or register the folder again")
        self._check_digests()
        self._check_tokenizer()
        if not verify_sha:
            return
        for prefix, registered in self.sha256.items():
            digest = indexed.digest(self.path / prefix)
            if digest != registered:
                message = f"{file}: sha256: {prefix} has {digest[:12]}..., not {registered[:12]}..."
                raise UserError(message, "the files have changed; restore them, or register them again")

    def _check_tokenizer(self) -> None:
        path = self.tokenizer_path
        if path is None:
            return
        where, hint = f"{self.path / FILE}: tokenizer: ", "specify the folder or the .model file of the tokenizer"
        paths.check(path, where, hint)
        files = [path] if self.is_sentencepiece else [path / name for name in _TOKENIZER_FILE_NAMES]
        if not any(file.is_file() for file in files):
            raise UserError(f"{where}{path} contains no tokenizer", hint)


def check_hub_name(tokenizer: str, where: str) -> None:
    """Raise UserError if `tokenizer` is not a valid name on the Hugging Face Hub. `where` begins the message."""
    name = tokenizer.removeprefix(HUB)
    if len(name) > 96 or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        message = f"{where}{paths.shorten(repr(tokenizer))} is not a valid name on the Hub"
        raise UserError(message, f"use {HUB}ORG/NAME, a folder, or a .model file")


def relative_if_inside(path: str | Path, folder: Path) -> str:
    """Return `path` relative to `folder` if it is inside it, otherwise the absolute path."""
    full_path = Path(os.path.abspath(path))
    return str(full_path.relative_to(folder)) if full_path.is_relative_to(folder) else str(full_path)


def _read_dataset_json(file: Path) -> BaseModel:
    from pydantic import ValidationError

    paths.check(file)
    if not file.is_file():
        raise UserError(
            f"{paths.shorten(file.parent)} is not a data folder: it has no {FILE}",
            "create one with `recipes data build` or `recipes data add`",
        )
    if not os.access(file, os.R_OK):
        raise UserError(f"no permission to read {file}", "ask its owner for chmod a+r")
    try:
        return _get_dataset_schema().model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "file"
        raise UserError(f"{file}: {key}: {first['msg']}", "see docs/data.md, or build the folder again") from None


@lru_cache
def _get_dataset_schema() -> type[BaseModel]:
    """Return the schema of dataset.json. Defined on first use, because importing pydantic would slow down `--help`."""
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
