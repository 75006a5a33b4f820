"""From `--data` to the packed files that a fine-tuning reads, and what is said of them on the way."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from superpod.data.readers import sources
from superpod.data.readers.sources import Source
from superpod.data.samples import chat, chat_template, duplicates, mixing, packing, samples
from superpod.data.samples.chat import Encoded
from superpod.data.samples.samples import DEFAULT, SKIPPED, BadLines, Reading
from superpod.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from superpod.weights.finetune_setup import Sizes

SHARE = 0.05
"""Share of the samples held out where there are no others to validate on."""
COUNTS = "counts.json"
"""Beside the packed samples, and written after them."""

_TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class DataOptions:
    """What to fine-tune on. Names are absolute; `weights` has one number for each of `data`, or none."""

    data: tuple[str, ...]
    validation_data: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    share: float | None = None
    seed: int = 1234
    long: str = packing.LONG[0]
    pack: bool = True
    reading: Reading = DEFAULT
    template: str = ""
    learn: str = chat.LEARN[0]


class Filling(TypedDict):
    """How full the sequences of a part are."""

    samples: int
    tokens: int
    sequences: int
    filled: float


class Counts(TypedDict):
    """What was read and made of it; `mix` and `skipped` are empty where there were no weights and no bad lines."""

    read: list[dict[str, object]]
    mix: list[dict[str, object]]
    skipped: str
    training: Filling
    validation: Filling


def check(options: DataOptions) -> None:
    """Read all samples once, without keeping them, and refuse what needs no tokenizer to be refused.

    Raises:
        UserError: an option that means nothing, a source without samples, or lines that are none.
    """
    if options.long not in packing.LONG:
        raise UserError(f"--long {options.long} is not one of {', '.join(packing.LONG)}")
    if options.learn not in chat.LEARN:
        raise UserError(f"--learn {options.learn} is not one of {', '.join(chat.LEARN)}")
    options.reading.check()
    if options.template:
        chat_template.read(Path(options.template))
    training, validation = _sources_of(options)
    if options.share is not None and not 0 < options.share < 1:
        raise UserError(f"--validation {options.share} is not a share of the samples", "0.05 holds out one in twenty")
    distinct = duplicates.Distinct()
    for source in validation:  # first: what is validated on is left out of the training, not the other way round
        _count(source, options.reading, distinct)
    counts = [_count(source, options.reading, distinct) for source in training]
    if not validation and max(counts) < 2:
        raise UserError(f"{training[0].name} holds one sample, and validation needs another one",
                        "give --validation-data as well")  # fmt: skip
    if options.weights:
        mixing.parts(counts, options.weights)


def _sources_of(options: DataOptions) -> tuple[list[Source], list[Source]]:
    """The sources to train on, and those to validate on: given, or a folder's own validation split."""
    training = sources.find(options.data)
    validation = [
        Source(f"--validation-data {source.name}", source.files)
        for source in sources.find(options.validation_data, validation=True)
    ]
    if not validation:
        own = [source for source in training if source.validation]
        if own and options.share is not None:
            raise UserError(
                f"{own[0].name} has a validation split of its own, and --validation would hold out other samples",
                "leave out --validation, or name the files to train on",
            )
        validation = [Source(f"{source.name} (validation)", source.validation) for source in own]
        if own and len(own) < len(training):
            other = next(source.name for source in training if not source.validation)
            raise UserError(
                f"{own[0].name} has a validation split, and {other} has none",
                "--validation-data names what to validate on",
            )
    return training, validation


def _count(source: Source, reading: Reading, distinct: duplicates.Distinct) -> int:
    """How many samples of a source no earlier one has."""
    bad = BadLines(reading)
    distinct.start(source.name)
    count = new = 0
    for sample in samples.stream(source.files, bad):
        count += 1
        new += distinct.is_new(duplicates.content(sample))
    bad.check(count, source.name)
    distinct.repeats()
    return new


def tokenizer_folder(options: DataOptions, folder: Path, out: Path) -> Path:
    """The folder of the tokenizer to train with: the model's `folder`, or a copy in `out` with the user's template."""
    if not options.template:
        return folder
    copy = out / _TOKENIZER
    if not (out / COUNTS).is_file():  # a resumed run keeps what it was packed with
        chat_template.copy_with(folder, chat_template.read(Path(options.template)), copy)
    return copy


def kept(run_folder: Path, folder: Path) -> Path:
    """Where a run has tokenizer and configuration for its export: `folder`, or its copy with the user's template."""
    copy = run_folder / "data" / _TOKENIZER
    return copy if copy.is_dir() else folder


def pack(options: DataOptions, sizes: Sizes, tokenizer: PreTrainedTokenizerBase, out: Path) -> Counts:
    """Write packed.json and the .npy files to `out`; returns the counts of both parts.

    Raises:
        UserError: a sample is too long and `options.long` refuses it, there are too few, or a template refuses one.
    """
    from superpod.weights.finetune_setup import METADATA, TRAIN, VALIDATION

    out.mkdir(parents=True, exist_ok=True)
    skipped = out / SKIPPED
    skipped.unlink(missing_ok=True)
    reader = _Reader(options, sizes, tokenizer, skipped)
    training, validation = _sources_of(options)
    held = [sample for source in validation for sample in reader.read(source)]
    train = [reader.read(source) for source in training]
    if not validation:
        train, held = mixing.hold_out(train, SHARE if options.share is None else options.share, options.seed)
    mix = mixing.parts([len(part) for part in train], options.weights)
    bins = [_bins(mixing.rounds(train, mix, options.seed), options, sizes), _bins([held], options, sizes)]
    filler = cast("int", tokenizer.eos_token_id)  # `chat.load` refuses a tokenizer without one
    for name, part_bins, batch in ((TRAIN, bins[0], 1), (VALIDATION, bins[1], sizes.batch)):
        packing.write(part_bins, out / name, multiple=sizes.multiple, filler=filler, batch=batch)
    packing.write_metadata(bins, out / METADATA)
    named = [{"source": source.name, **asdict(part)} for source, part in zip(training, mix, strict=True)]
    return Counts(
        read=reader.counts[len(validation) :] + reader.counts[: len(validation)],
        mix=named if options.weights else [],
        skipped=str(skipped) if skipped.is_file() else "",
        training=_filling(bins[0], sizes),
        validation=_filling(bins[1], sizes),
    )


@dataclass
class _Reader:
    """Reads sources, encodes their samples, leaves out duplicates, and counts."""

    options: DataOptions
    sizes: Sizes
    tokenizer: PreTrainedTokenizerBase
    skipped: Path

    def __post_init__(self) -> None:
        self.counts: list[dict[str, object]] = []
        self.distinct = duplicates.Distinct()

    def read(self, source: Source) -> list[Encoded]:
        """The samples of a source that fit and that no earlier one equals in the token ids that are kept of it."""
        bad = BadLines(self.options.reading, self.skipped if self.options.reading.skip else None)
        encoded: list[Encoded] = []
        count = 0
        length = self.sizes.longest + 1 if self.options.long == "cut" else None
        self.distinct.start(source.name)
        for sample in samples.stream(source.files, bad):
            try:
                made = _small(chat.encode(sample, self.tokenizer, self.options.learn))
            except chat.BadSample as error:
                if not self.options.reading.skip:
                    raise
                bad.add(sample.file, sample.line, error.reason, str(dict(messages=sample.messages)))
                continue
            count += 1
            if self.distinct.is_new(bytes(made.ids[:length])):  # an array: its buffer
                encoded.append(made)
        bad.check(count, source.name)
        repeats = self.distinct.repeats()
        kept, counts = packing.fit(encoded, self.sizes.longest, self.options.long)
        more = {"source": source.name, "length": self.sizes.longest, "skipped": bad.count, "reasons": bad.summary,
                "duplicates": repeats}  # fmt: skip
        self.counts.append({**asdict(counts), **more})
        return kept


def _small(encoded: Encoded) -> Encoded:
    """The same in 5 bytes a token, where lists have 40."""
    return Encoded(encoded.line, array("i", encoded.ids), bytes(map(int, encoded.loss_mask)), encoded.file)


def _bins(rounds: Sequence[Sequence[Encoded]], options: DataOptions, sizes: Sizes) -> list[list[Encoded]]:
    if not options.pack:
        bins = [[sample] for samples in rounds for sample in samples]
    else:
        bins = [b for samples in rounds for b in packing.pack(samples, sizes.size, sizes.multiple, options.seed)]
    if len(rounds) > 1:  # otherwise the repeats would come last
        random.Random(options.seed).shuffle(bins)
    return bins


def _filling(bins: Sequence[Sequence[Encoded]], sizes: Sizes) -> Filling:
    lengths = [len(sample.ids) - 1 for sequence in bins for sample in sequence]  # the last id is only predicted
    filled = round(sum(lengths) / (len(bins) * sizes.size), 3)
    return Filling(samples=len(lengths), tokens=sum(lengths), sequences=len(bins), filled=filled)


def lines(counts: Counts) -> list[str]:
    """What to print of the counts, a line each."""
    printed = []
    several = len(counts["read"]) > 1
    for file in counts["read"]:
        name = f"{Path(str(file['source'])).name}: " if several and "source" in file else ""
        printed.append(f"{name}{file['samples']} samples, {file['learnt']} tokens to learn")
        if file["cut"] or file["dropped"]:
            printed.append(
                f"  longer than {file.get('length', 'a sequence')} tokens: {file['cut']} cut at their end "
                f"(of a chat, the later turns), {file['dropped']} left out; the longest had {file['longest']}"
            )
        if repeats := file.get("duplicates"):  # runs of older versions have none
            printed.append(f"  {duplicates.line(str(file['source']), cast('dict[str, int]', repeats))}")
        if file.get("skipped"):
            printed.append(f"  skipped {file['skipped']} bad lines ({file['reasons']}): {counts['skipped']}")
    for part in counts.get("mix", []):
        times = cast("int", part["taken"]) / cast("int", part["samples"])
        printed.append(f"{Path(str(part['source'])).name}: {part['share']:.1%} of an epoch, {part['taken']} samples, "
                    f"each {times:.2f} times")  # fmt: skip
    for name in ("training", "validation"):
        filling = counts[name]
        count = f"{filling['sequences']} sequence{'s' if filling['sequences'] > 1 else ''}"
        printed.append(f"{name}: {filling['samples']} samples in {count}, {filling['filled']:.0%} full")
    return printed
