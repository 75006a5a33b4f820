"""Options of `recipes data build`."""

from dataclasses import dataclass
from pathlib import Path

from superpod.data import paths
from superpod.data.folder import parse_split
from superpod.data.samples.samples import MAX_BAD_SHARE, ReadOptions
from superpod.data.tokens import tokenizer
from superpod.errors import UserError


@dataclass(frozen=True)
class BuildOptions:
    """All options that determine the result of a build.

    Attributes:
        vocab_size: number of ids of the tokenizer to train. Exactly one of `vocab_size` and `tokenizer` is set.
        tokenizer: folder or .model file of an existing tokenizer.
        json_key: key of the text in JSON lines and tables.
        seed: seed for shuffling the documents.
        split: shares of training, validation and test; None for `default_split`.
        skip: whether to skip lines that are not documents, up to `max_bad_share` of all lines.
        max_bad_share: maximum share of skipped lines.
    """

    vocab_size: int | None = None
    tokenizer: Path | None = None
    json_key: str = "text"
    seed: int = 1234
    split: str | None = None
    skip: bool = False
    max_bad_share: float = MAX_BAD_SHARE

    def check(self) -> None:
        """Raise UserError if options conflict or have invalid values."""
        ReadOptions(skip=self.skip, max_bad_share=self.max_bad_share).check()
        if self.split is not None:
            parse_split(self.split)
        if (self.vocab_size is None) == (self.tokenizer is None):
            given_text = "neither" if self.tokenizer is None else "both"
            hint = "--vocab-size 4096 trains a tokenizer; --tokenizer PATH uses an existing one"
            raise UserError(f"exactly one of --vocab-size and --tokenizer is required, not {given_text}", hint)
        if self.vocab_size is not None:
            tokenizer.check_vocab_size(self.vocab_size)
        if self.tokenizer is not None:
            paths.check(self.tokenizer, "--tokenizer ", tokenizer.DOWNLOAD_HINT)
            if not self.tokenizer.exists():
                raise UserError(f"--tokenizer {self.tokenizer} does not exist", tokenizer.DOWNLOAD_HINT)
            tokenizer.list_files(self.tokenizer)
            if self.tokenizer.is_file():
                tokenizer.load(self.tokenizer)  # report an invalid file before minutes of reading text
        if not 0 <= self.seed < 1 << 32:
            raise UserError(
                f"--seed is {self.seed}; it must be between 0 and {2**32 - 1}", "choose a seed in this range"
            )

    def encoding(self) -> dict[str, int | str | None]:
        """Return the options that affect the tokens, as a dict of JSON values."""
        digest = tokenizer.digest(self.tokenizer) if self.tokenizer else None
        return {"vocab_size": self.vocab_size, "tokenizer": digest, "json_key": self.json_key, "seed": self.seed}
