"""Jobs of the worker processes of `data build`: train a tokenizer, and tokenize a shard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from superpod.common import atomic_file, atomic_folder
from superpod.data.readers import documents
from superpod.data.tokens import indexed, tokenizer
from superpod.errors import UserError

_BATCH = 1 << 20
"""Characters per call of the tokenizer, to limit the memory of a worker."""
_MAX_CHARACTERS = 1 << 23
"""Maximum length of a text that is tokenized at once; longer texts are split at line ends."""


@dataclass(frozen=True)
class TokenizerJob:
    """Train a tokenizer with at most `vocab` ids on the documents of `pieces`, and write it to the folder `out`."""

    pieces: tuple[documents.Piece, ...]
    json_key: str
    vocab: int
    out: str
    skip: bool = False


@dataclass(frozen=True)
class ShardJob:
    """Tokenize the documents of `pieces`, and write them to the prefix `prefix`."""

    pieces: tuple[documents.Piece, ...]
    json_key: str
    tokenizer: tokenizer.Tokenizer
    prefix: str
    skip: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of text in this shard."""
        return sum(piece.end - piece.start for piece in self.pieces)


@dataclass(frozen=True)
class ShardDone:
    """Counts of a finished shard: documents, tokens, blank documents (`empty`) and skipped lines (`bad`)."""

    documents: int
    tokens: int
    empty: int
    bad: int = 0


def train_tokenizer(job: TokenizerJob) -> int:
    """Train a tokenizer, write it atomically to `job.out`, and return its number of ids."""
    import os

    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # no other job runs at the same time
    ignore: documents.BadLine | None = (lambda *_: None) if job.skip else None
    texts = (text for piece in job.pieces for text in documents.read_documents(piece, job.json_key, ignore))
    with atomic_folder.create_atomically(Path(job.out)) as temporary:
        reached = tokenizer.train(texts, job.vocab, temporary)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return reached


def tokenize_shard(job: ShardJob) -> ShardDone:
    """Tokenize a shard, append the end-of-document id to every document, and return the counts.

    `prefix`.json with the counts is written last, and marks the shard as finished.
    """
    empty = total = count = bad = 0

    def keep(file: str, line: int, reason: str, text: str) -> None:
        nonlocal bad
        bad += 1
        skipped.write(json.dumps({"file": file, "line": line, "reason": reason, "text": text}) + "\n")

    with indexed.Writer(job.prefix, job.tokenizer.vocab) as out, open(bad_lines_path(job.prefix), "w") as skipped:
        for tokens in _encode_documents(job, keep if job.skip else None):
            if not tokens:
                empty += 1
                continue
            tokens.append(job.tokenizer.eod)
            out.add(tokens)
            count, total = count + 1, total + len(tokens)
    result = ShardDone(count, total, empty, bad)
    atomic_file.write(Path(f"{job.prefix}.json"), json.dumps(asdict(result)))
    return result


def bad_lines_path(prefix: str) -> Path:
    """Return the path of the file with the skipped lines of a shard."""
    return Path(f"{prefix}.bad.jsonl")


def read_finished(prefix: str) -> ShardDone | None:
    """Return the counts of a shard, or None if it is not finished or its files are invalid."""
    try:
        result = ShardDone(**json.loads(Path(f"{prefix}.json").read_bytes()))
        if result.documents:
            index = indexed.verify(prefix)
            return result if (index.documents, index.tokens) == (result.documents, result.tokens) else None
    except (OSError, ValueError, TypeError, UserError):
        return None
    return result


def _encode_documents(job: ShardJob, bad: documents.BadLine | None) -> Iterator[list[int]]:
    """Yield the token ids of each document in order, [] for a blank document."""
    encode = _load_encoder(job.tokenizer)
    texts = (text for piece in job.pieces for text in documents.read_documents(piece, job.json_key, bad))
    batch: list[str] = []
    size = 0
    for text in texts:
        if len(text) > _MAX_CHARACTERS:
            yield from encode(batch)
            yield [token for part in _split_long_text(text) for token in encode([part])[0]]
            batch, size = [], 0
            continue
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield from encode(batch)
            batch, size = [], 0
    yield from encode(batch)


def _split_long_text(text: str) -> Iterator[str]:
    """Yield parts of at most `_MAX_CHARACTERS` characters that end at line ends if possible."""
    start = 0
    while start < len(text):
        end = start + _MAX_CHARACTERS
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


@lru_cache(maxsize=1)
def _load_encoder(choice: tokenizer.Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    return tokenizer.load_encoder(choice)  # cached, so that a worker loads it once for all shards
