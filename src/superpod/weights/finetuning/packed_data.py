"""Converts the samples of `--data` to the packed files that fine-tuning reads, and counts samples and tokens."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from superpod.data.readers import sources
from superpod.data.readers.sources import Source
from superpod.data.samples import chat, chat_template, duplicate_samples, mixing, packing, samples
from superpod.data.samples.chat import Encoded
from superpod.data.samples.samples import DEFAULT, SKIPPED_FILE, BadLines, ReadOptions
from superpod.errors import UserError, counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from superpod.weights.finetuning.data_and_weights import PackingSizes

VALIDATION_SHARE = 0.05
"""Default share of the samples to hold out for validation."""
COUNTS_FILE = "counts.json"
"""File with the counts, written after the packed samples in the same folder."""

_TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class DataOptions:
    """Options for the data of a fine-tuning run.

    Attributes:
        data: absolute paths or globs of the training samples.
        validation_data: the same for validation; empty to hold out samples of `data`.
        weights: weight per entry of `data`, or empty.
        share: share of samples to hold out for validation; None for `VALIDATION_SHARE`.
        seed: seed for held-out samples, repetitions and packing.
        long: how to handle samples that are too long, from `packing.LONG`.
        pack: whether a sequence contains several samples.
        reading: options for reading samples.
        template: path of a chat template; "" for the tokenizer's own.
        learn: messages of a chat to train on, from `chat.LEARN`.
    """

    data: tuple[str, ...]
    validation_data: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    share: float | None = None
    seed: int = 1234
    long: str = packing.LONG[0]
    pack: bool = True
    reading: ReadOptions = DEFAULT
    template: str = ""
    learn: str = chat.LEARN[0]


class Filling(TypedDict):
    """Counts of the training or validation data; `filled` is the share of tokens that are not padding."""

    samples: int
    tokens: int
    sequences: int
    filled: float


class Counts(TypedDict):
    """Counts of all data.

    `read` has the counts of each source, `mix` their shares of an epoch (empty without weights), and `skipped` the path
    of the file with the skipped lines ("" if there are none).
    """

    read: list[dict[str, object]]
    mix: list[dict[str, object]]
    skipped: str
    training: Filling
    validation: Filling


def check_data(options: DataOptions) -> None:
    """Check options and samples as far as possible without a tokenizer. All samples are read once.

    Raises:
        UserError: an option is invalid, a source contains no samples, or too many lines are not samples.
    """
    if options.long not in packing.LONG:
        raise UserError(f"--long {options.long} is not one of {', '.join(packing.LONG)}")
    if options.learn not in chat.LEARN:
        raise UserError(f"--learn {options.learn} is not one of {', '.join(chat.LEARN)}")
    options.reading.check()
    if options.template:
        chat_template.read(Path(options.template))
    training, validation = _find_sources(options)
    if options.share is not None and not 0 < options.share < 1:
        raise UserError(
            f"--validation must be a fraction between 0 and 1, not {options.share}", "0.05 holds out one sample in 20"
        )

    distinct_samples = duplicate_samples.DistinctSamples()
    for source in validation:  # first, so that duplicates are removed from the training data
        _count_distinct(source, options.reading, distinct_samples)
    counts = [_count_distinct(source, options.reading, distinct_samples) for source in training]
    if not validation and max(counts) < 2:
        raise UserError(
            f"{training[0].name} contains only one sample, but validation needs another one", "add --validation-data"
        )
    if options.weights:
        mixing.compute_epoch(counts, options.weights)


def _find_sources(options: DataOptions) -> tuple[list[Source], list[Source]]:
    """Return the training and validation sources. The latter are empty if samples are held out instead.

    Validation sources are those of `--validation-data`, or else the validation splits of dataset folders.

    Raises:
        UserError: a source is missing, or only some dataset folders have a validation split.
    """
    training = sources.find_sources(options.data)
    validation = [
        Source(f"--validation-data {source.name}", source.files)
        for source in sources.find_sources(options.validation_data, validation=True)
    ]
    if validation:
        return training, validation

    own_validation = [source for source in training if source.validation]
    if own_validation and options.share is not None:
        raise UserError(
            f"{own_validation[0].name} has its own validation split, but --validation would hold out other samples",
            "omit --validation, or pass the files to train on",
        )
    if own_validation and len(own_validation) < len(training):
        other_source = next(source.name for source in training if not source.validation)
        raise UserError(
            f"{own_validation[0].name} has a validation split, but {other_source} has none",
            "pass the files to validate on with --validation-data",
        )
    return training, [Source(f"{source.name} (validation)", source.validation) for source in own_validation]


def _count_distinct(source: Source, reading: ReadOptions, distinct: duplicate_samples.DistinctSamples) -> int:
    """Return the number of samples of a source that do not duplicate earlier ones."""
    bad = BadLines(reading)
    distinct.start(source.name)
    count = new = 0
    for sample in samples.stream_samples(source.files, bad):
        count += 1
        new += distinct.is_new(duplicate_samples.serialize_content(sample))
    bad.check(count, source.name)
    distinct.count_repeats()
    return new


def prepare_tokenizer_folder(options: DataOptions, folder: Path, out: Path) -> Path:
    """Return the tokenizer folder to train with: `folder`, or a copy in `out` with the user's chat template."""
    if not options.template:
        return folder
    copy = out / _TOKENIZER
    if not (out / COUNTS_FILE).is_file():  # a resumed run keeps the tokenizer that packed its data
        chat_template.copy_tokenizer_with_template(folder, chat_template.read(Path(options.template)), copy)
    return copy


def find_export_source(run_folder: Path, folder: Path) -> Path:
    """Return the tokenizer folder for an export: the run's copy with the user's chat template, or else `folder`."""
    copy = run_folder / "data" / _TOKENIZER
    return copy if copy.is_dir() else folder


def pack(options: DataOptions, sizes: PackingSizes, tokenizer: PreTrainedTokenizerBase, out: Path) -> Counts:
    """Pack samples, write packed.json and the .npy files to `out`, and return the counts.

    Raises:
        UserError: a sample is too long and `options.long` is "refuse", there are too few samples, or the chat template
            rejects a sample.
    """
    from superpod.weights.finetuning.data_and_weights import METADATA, TRAIN, VALIDATION

    out.mkdir(parents=True, exist_ok=True)
    skipped_file = out / SKIPPED_FILE
    # Lines of an interrupted packing would be reported again.
    skipped_file.unlink(missing_ok=True)
    reader = _SampleReader(options, sizes, tokenizer, skipped_file)
    training, validation = _find_sources(options)
    held_out = [sample for source in validation for sample in reader.read(source)]
    train = [reader.read(source) for source in training]
    if not validation:
        share = VALIDATION_SHARE if options.share is None else options.share
        train, held_out = mixing.hold_out(train, share, options.seed)

    mix = mixing.compute_epoch([len(part) for part in train], options.weights)
    train_bins = _pack_bins(mixing.split_into_rounds(train, mix, options.seed), options, sizes)
    validation_bins = _pack_bins([held_out], options, sizes)
    filler = cast("int", tokenizer.eos_token_id)  # `chat.load_tokenizer` rejects a tokenizer without one
    for name, bins, batch in ((TRAIN, train_bins, 1), (VALIDATION, validation_bins, sizes.batch)):
        packing.write_bins(bins, out / name, multiple=sizes.multiple, filler=filler, batch=batch)
    packing.write_metadata([train_bins, validation_bins], out / METADATA)

    named_parts: list[dict[str, object]] = []
    if options.weights:
        named_parts = [{"source": source.name, **asdict(part)} for source, part in zip(training, mix, strict=True)]
    return Counts(
        read=reader.counts[len(validation) :] + reader.counts[: len(validation)],
        mix=named_parts,
        skipped=str(skipped_file) if skipped_file.is_file() else "",
        training=_measure_filling(train_bins, sizes),
        validation=_measure_filling(validation_bins, sizes),
    )


@dataclass
class _SampleReader:
    """Reads and tokenizes the samples of sources, removes duplicates, and keeps counts of each source."""

    options: DataOptions
    sizes: PackingSizes
    tokenizer: PreTrainedTokenizerBase
    skipped: Path

    def __post_init__(self) -> None:
        self.counts: list[dict[str, object]] = []
        self.distinct = duplicate_samples.DistinctSamples()

    def read(self, source: Source) -> list[Encoded]:
        """Return the tokenized samples of a source, truncated or dropped by length, without duplicates.

        Samples are duplicates if their remaining token ids are equal.
        """
        bad = BadLines(self.options.reading, self.skipped if self.options.reading.skip else None)
        encoded: list[Encoded] = []
        count = 0
        length = self.sizes.longest + 1 if self.options.long == "cut" else None
        self.distinct.start(source.name)
        for sample in samples.stream_samples(source.files, bad):
            try:
                packed_arrays = _to_arrays(chat.encode_sample(sample, self.tokenizer, self.options.learn))
            except chat.BadSampleError as error:
                if not self.options.reading.skip:
                    raise
                bad.add(sample.file, sample.line, error.reason, str(dict(messages=sample.messages)))
                continue
            count += 1
            if self.distinct.is_new(bytes(packed_arrays.ids[:length])):
                encoded.append(packed_arrays)
        bad.check(count, source.name)
        repeats = self.distinct.count_repeats()
        kept, counts = packing.limit_lengths(encoded, self.sizes.longest, self.options.long)
        facts = {"source": source.name, "length": self.sizes.longest, "skipped": bad.count, "reasons": bad.summary,
                "duplicates": repeats}  # fmt: skip
        self.counts.append({**asdict(counts), **facts})
        return kept


def _to_arrays(sample: Encoded) -> Encoded:
    """Return a sample with arrays instead of lists: 5 bytes per token instead of 40."""
    return Encoded(sample.line, array("i", sample.ids), bytes(map(int, sample.loss_mask)), sample.file)


def _pack_bins(rounds: Sequence[Sequence[Encoded]], options: DataOptions, sizes: PackingSizes) -> list[list[Encoded]]:
    """Return the sequences of an epoch; each is a list of samples. Rounds are packed separately."""
    bins: list[list[Encoded]] = []
    for part in rounds:
        if options.pack:
            bins += packing.pack(part, sizes.size, sizes.multiple, options.seed)
        else:
            bins += [[sample] for sample in part]
    if len(rounds) > 1:  # so that repeated samples do not come last
        random.Random(options.seed).shuffle(bins)
    return bins


def _measure_filling(bins: Sequence[Sequence[Encoded]], sizes: PackingSizes) -> Filling:
    lengths = [len(sample.ids) - 1 for sequence in bins for sample in sequence]  # the last id is only a target
    filled_fraction = round(sum(lengths) / (len(bins) * sizes.size), 3)
    return Filling(samples=len(lengths), tokens=sum(lengths), sequences=len(bins), filled=filled_fraction)


def format_counts(counts: Counts) -> list[str]:
    """Return the counts as lines of text."""
    lines = []
    several = len(counts["read"]) > 1
    for file in counts["read"]:
        name = f"{Path(str(file['source'])).name}: " if several and "source" in file else ""
        lines.append(f"{name}{file['samples']} samples, {file['learnt']} tokens to train on")
        if file["cut"] or file["dropped"]:
            lines.append(
                f"  longer than {file.get('length', 'a sequence')} tokens: {file['cut']} truncated (chats lose their "
                f"last messages), {file['dropped']} dropped; the longest had {file['longest']} tokens"
            )
        repeats = file.get("duplicates")  # missing in runs of older versions
        if repeats:
            lines.append(
                f"  {duplicate_samples.describe_removed(str(file['source']), cast('dict[str, int]', repeats))}"
            )
        if file.get("skipped"):
            skipped = counted(cast("int", file["skipped"]), "bad line")
            lines.append(f"  skipped {skipped} ({file['reasons']}), copied to {counts['skipped']}")
    for part in counts.get("mix", []):
        times = cast("int", part["taken"]) / cast("int", part["samples"])
        name = Path(str(part["source"])).name
        lines.append(f"{name}: {part['share']:.1%} of an epoch, {part['taken']} samples, each {times:.2f} times")
    for name in ("training", "validation"):
        filling = counts[name]
        sequences = counted(filling["sequences"], "sequence")
        lines.append(f"{name}: {filling['samples']} samples in {sequences}, {filling['filled']:.0%} full")
    return lines
