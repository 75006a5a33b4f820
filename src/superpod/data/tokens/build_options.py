"""What a user chooses for `recipes data build`."""

from dataclasses import dataclass
from pathlib import Path

from superpod.data.folder import default_split, parse_split
from superpod.data.readers import paths
from superpod.data.samples.samples import MAX_BAD_SHARE, Reading
from superpod.data.tokens import tokenizer
from superpod.errors import UserError


@dataclass(frozen=True)
class BuildOptions:
    """Everything that decides the bytes of a build, apart from the text.

    `split` None means 969,30,1, or for 500 documents and fewer a split that leaves at least one for each part.
    `skip` leaves out lines that are no documents, up to a share of all.
    Exactly one of `vocab_size` (train a tokenizer of so many ids) and `tokenizer` (a folder or .model file) is set.
    """

    vocab_size: int | None = None
    tokenizer: Path | None = None
    json_key: str = "text"
    seed: int = 1234
    split: str | None = None
    skip: bool = False
    max_bad_share: float = MAX_BAD_SHARE

    def check(self) -> None:
        """UserError for a contradiction or an impossible value."""
        Reading(skip=self.skip, max_bad_share=self.max_bad_share).check()
        if self.split is not None:
            parse_split(self.split)
        if (self.vocab_size is None) == (self.tokenizer is None):
            which = "neither" if self.tokenizer is None else "both"
            hint = "--vocab-size 4096 trains a tokenizer; --tokenizer PATH takes one as it is"
            raise UserError(f"one of --vocab-size and --tokenizer is needed, not {which}", hint)
        if self.vocab_size is not None:
            tokenizer.check_vocab(self.vocab_size)
        if self.tokenizer is not None:
            paths.check(self.tokenizer, "--tokenizer ", tokenizer.FETCH)
            if not self.tokenizer.exists():
                raise UserError(f"--tokenizer {self.tokenizer} does not exist", tokenizer.FETCH)
            tokenizer.files(self.tokenizer)
            if self.tokenizer.is_file():
                tokenizer.load(self.tokenizer)  # fails in a moment, where reading the text first would take minutes
        if not 0 <= self.seed < 1 << 32:
            raise UserError(f"--seed {self.seed} is outside 0..{2**32 - 1}", "any number in that range")

    def split_for(self, documents: int) -> str:
        """The split for so many documents."""
        return self.split or default_split(documents)

    def encoding(self) -> dict[str, int | str | None]:
        """The options that the encoded shards depend on, as JSON values: all but the split."""
        digest = tokenizer.digest(self.tokenizer) if self.tokenizer else None
        return {"vocab_size": self.vocab_size, "tokenizer": digest, "json_key": self.json_key, "seed": self.seed}
