"""`recipes data build`: tokenize text into a data folder with worker processes. An interrupted build can be resumed."""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from superpod.common.cpu_threads import usable_cores
from superpod.data import paths
from superpod.data.folder import FILE, DataFolder, default_split, require_nonempty_splits
from superpod.data.readers import documents
from superpod.data.samples.samples import SKIPPED_FILE, BadLines, ReadOptions
from superpod.data.tokens import distinct_documents, shards, tokenizer, worker_pool
from superpod.data.tokens.build_options import BuildOptions
from superpod.data.tokens.unfinished import UnfinishedBuild
from superpod.errors import UserError, counted

PREFIX = "text"
"""Prefix of the token files in a built folder: text.bin and text.idx."""
FORMAT = 1
"""Version of the tokenization. Increase it if a change alters the tokens, so that old builds are not resumed."""
TRAINING_BYTES = 1 << 30
"""Approximate maximum bytes of text to train a tokenizer on, sampled evenly."""
_JOB_FILES = 64
"""Files that one job reads and hashes."""

Progress = Callable[[str, int, int], None]
"""Function progress(phase, done, total). The phases are "read" (in files), "tokenizer" (total 0: unknown), "encode" (in
bytes of text) and "write" (in documents)."""


@dataclass(frozen=True)
class Report:
    """Result of a build: the data folder, its counts and notes."""

    folder: DataFolder
    up_to_date: bool = False
    """Whether the folder was complete before."""
    shards: int = 0
    resumed: int = 0
    """Shards that an interrupted build had already completed."""
    skipped: list[str] = field(default_factory=list)
    """Files that are not UTF-8."""
    empty: int = 0
    """Number of blank documents, which are left out."""
    duplicates: int = 0
    """Number of documents that repeat an earlier one, which are left out."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    """Messages for the user."""


def build(
    text: Sequence[str],
    out: str | Path,
    options: BuildOptions,
    *,
    workers: int | None = None,
    strict: bool = False,
    shard_bytes: int | None = None,
    progress: Progress = lambda phase, done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> Report:
    """Build the data folder `out` from the files that match the patterns in `text` (see `documents.find_files`).

    The result depends only on `options` and on the content and order of the files, not on the number of workers or on
    interruptions. A finished folder of the same input is not changed; an unfinished one is resumed.

    Args:
        text: files, globs (`**` for any depth), or "stdlib".
        out: the data folder.
        options: all options that affect the result.
        workers: number of worker processes; None for one per core.
        strict: whether files that are not UTF-8 are an error; if not, they are skipped.
        shard_bytes: approximate bytes of text per shard; None to choose it by the amount of text.
        progress: called with (phase, done, total); see `Progress`.
        note: called with messages that the user should see immediately.

    Raises:
        UserError: see docs/data.md, "What is refused".
        OSError: the disk is full (ENOSPC). Incomplete files have temporary names, and the same command can resume.
    """
    started, folder = time.monotonic(), Path(out).absolute()
    options.check()
    _check_workers(workers)
    paths.check_output_folder(folder, FILE)
    unfinished = UnfinishedBuild(folder)
    unfinished.check_owner()
    files = documents.find_files(text, excluded_folder=folder)
    with _translate_disk_errors(folder), worker_pool.start_workers(workers or usable_cores()) as run:
        sources, skipped = _scan_files(run, files, strict, progress)
        identity = _compute_identity(sources, options)
        if (folder / FILE).is_file():
            return _report_finished(unfinished, identity, options, skipped)
        _require_nonempty_file(sources, text)
        # Shards of a different size cannot be reused, so the size is part of the identity of the work folder.
        size = shard_bytes or _choose_shard_bytes(sources)
        with unfinished.lock(f"{identity} {size}", note):
            plan = documents.plan_shards(sources, size)
            blank_files = sum(source.size == 0 and not source.is_lines for source in sources)
            phases = _BuildPhases(unfinished, options, plan, run, progress, note, empty=blank_files)
            data_folder = phases.write(identity, files=len(sources), skipped=len(skipped))
    notes = phases.notes + _describe_skipped_files(skipped)
    seconds = time.monotonic() - started
    counts = len(plan), phases.resumed, skipped, phases.empty, phases.duplicates
    return Report(data_folder, False, *counts, seconds, notes)


@dataclass
class _BuildPhases:
    """The phases of a build. Each keeps its results in the work folder, from which a later build resumes."""

    unfinished: UnfinishedBuild
    options: BuildOptions
    plan: list[tuple[documents.Piece, ...]]
    run: worker_pool.RunJobs
    progress: Progress
    note: Callable[[str], None]
    resumed: int = 0
    empty: int = 0
    duplicates: int = 0
    notes: list[str] = field(default_factory=list)

    def write(self, identity: str, files: int, skipped: int) -> DataFolder:
        """Run all phases, and return the data folder. dataset.json, written last, marks it as complete."""
        encoder = self._prepare_tokenizer()
        finished_shards = self._encode(encoder)
        nonempty_prefixes = [prefix for prefix, shard in finished_shards.items() if shard.documents]
        self.empty += sum(shard.empty for shard in finished_shards.values())
        skipped_lines = self._collect_skipped_lines(finished_shards)
        if not nonempty_prefixes:
            raise UserError(f"all {self.empty} documents are blank", "check --text and --json-key")

        merged = distinct_documents.find_distinct(nonempty_prefixes, encoder.vocab)
        self.duplicates = merged.duplicates
        split_counts = self.options.split or default_split(merged.documents)
        name = str(self.unfinished.folder)
        if merged.duplicates:
            name += f" ({merged.duplicates} duplicate documents left out)"
        require_nonempty_splits(split_counts, merged.documents, name)

        text = self.unfinished.work / PREFIX
        progress = partial(self.progress, "write")
        sha256 = distinct_documents.write_shuffled(merged, text, encoder.vocab, self.options.seed, progress)
        self.unfinished.publish([self._tokenizer_path(), Path(f"{text}.bin"), Path(f"{text}.idx"), *skipped_lines])
        data_folder = DataFolder(
            path=self.unfinished.folder,
            prefixes=(PREFIX,),
            tokenizer=self._tokenizer_path().name,
            vocab=encoder.vocab,
            tokens=merged.tokens,
            documents=merged.documents,
            split=split_counts,
            sha256={PREFIX: sha256},
            source={
                **{"identity": identity, "files": files, "skipped": skipped, "empty": self.empty},
                "duplicates": self.duplicates,
                **self.options.encoding(),
            },
        )
        data_folder.write()
        return data_folder

    def _collect_skipped_lines(self, finished_shards: Mapping[str, shards.ShardDone]) -> list[Path]:
        """Write the skipped lines of all shards to one file; return [file] or []. Raises UserError if too many."""
        bad = BadLines(ReadOptions(skip=True, max_bad_share=self.options.max_bad_share))
        file = self.unfinished.work / SKIPPED_FILE
        with file.open("w") as out:
            for prefix, shard in finished_shards.items():
                if not shard.bad:
                    continue
                with shards.bad_lines_path(prefix).open() as lines:
                    for line in lines:
                        out.write(line)
                        row = json.loads(line)
                        bad.add(documents.escape_path(row["file"]), row["line"], row["reason"], "")
        if not bad.count:
            return []
        bad.check(sum(shard.documents + shard.empty for shard in finished_shards.values()), "--text")
        published = self.unfinished.folder / SKIPPED_FILE
        self.notes.append(f"skipped {counted(bad.count, 'bad line')} ({bad.summary}), copied to {published}")
        return [file]

    def _tokenizer_path(self) -> Path:
        source = self.options.tokenizer
        return self.unfinished.work / ("tokenizer.model" if source and source.is_file() else "tokenizer")

    def _prepare_tokenizer(self) -> tokenizer.Tokenizer:
        """Copy or train the tokenizer, and load it."""
        path, source, vocab = self._tokenizer_path(), self.options.tokenizer, self.options.vocab_size
        if source:
            self.unfinished.remove(path)
            tokenizer.copy_files(source, path)
        elif not path.is_dir():  # an earlier build may have trained it
            self.progress("tokenizer", 0, 0)
            pieces = self._select_training_pieces()
            jobs = [shards.TokenizerJob(pieces, self.options.json_key, vocab or 0, str(path), self.options.skip)]
            list(self.run(shards.train_tokenizer, jobs))
        encoder = tokenizer.load(path, self.unfinished.work / "encoder.json")
        if vocab and encoder.vocab < vocab:
            self.notes.append(
                f"the text is too short for a vocabulary of {vocab}; the tokenizer has {encoder.vocab} ids"
            )
        return encoder

    def _select_training_pieces(self) -> tuple[documents.Piece, ...]:
        """Return the pieces of every n-th shard, with about `TRAINING_BYTES` bytes in total."""
        total = sum(piece.end - piece.start for shard in self.plan for piece in shard)
        step = -(-total // TRAINING_BYTES)
        return tuple(piece for shard in self.plan[::step] for piece in shard)

    def _encode(self, encoder: tokenizer.Tokenizer) -> dict[str, shards.ShardDone]:
        """Tokenize the shards that are not finished yet, and return the results of all shards by prefix, in order."""
        names = [str(self.unfinished.work / f"{number:06d}") for number in range(len(self.plan))]
        jobs = [
            shards.ShardJob(pieces, self.options.json_key, encoder, name, self.options.skip)
            for pieces, name in zip(self.plan, names, strict=True)
        ]
        done: dict[str, shards.ShardDone] = {}
        for job in jobs:
            shard = shards.read_finished(job.prefix)
            if shard:
                done[job.prefix] = shard
        self.resumed = len(done)
        if done:
            self.note(f"resumed: {len(done)} of {len(jobs)} shards were already finished")
        total, ready = sum(job.bytes for job in jobs), sum(job.bytes for job in jobs if job.prefix in done)
        self.progress("encode", ready, total)
        # Shards finish in any order; the result is in the order of the plan.
        for job, shard in self.run(shards.tokenize_shard, [job for job in jobs if job.prefix not in done]):
            done[job.prefix] = shard
            ready += job.bytes
            self.progress("encode", ready, total)
        return {name: done[name] for name in names}


def _scan_files(
    run: worker_pool.RunJobs, files: list[str], strict: bool, progress: Progress
) -> tuple[list[documents.Source], list[str]]:
    """Return the UTF-8 files sorted by path, and the paths of the files that are not UTF-8.

    Raises:
        UserError: a file is not UTF-8 and `strict` is set, or a file cannot be read.
    """
    sources: list[documents.Source] = []
    progress("read", 0, len(files))
    for _, part in run(documents.scan_files, (files[at : at + _JOB_FILES] for at in range(0, len(files), _JOB_FILES))):
        sources += part
        progress("read", len(sources), len(files))
    sources.sort(key=lambda source: os.fsencode(source.path))  # jobs finish in any order
    skipped_files = [source.path for source in sources if not source.utf8]
    if strict and skipped_files:
        hint = "convert them (`iconv -f latin1 -t utf-8`), or omit --strict to skip them"
        raise UserError(_list_not_utf8(skipped_files), hint)
    return [source for source in sources if source.utf8], skipped_files


def _list_not_utf8(files: list[str]) -> str:
    listed_files = ", ".join(map(documents.escape_path, files[:5]))
    if len(files) > 5:
        listed_files += f" and {len(files) - 5} more"
    verb = "is" if len(files) == 1 else "are"
    return f"{listed_files} {verb} not UTF-8"


def _require_nonempty_file(sources: list[documents.Source], text: Sequence[str]) -> None:
    """Raise UserError if all files that match the patterns `text` are empty."""
    if not any(source.size for source in sources):
        patterns = ", ".join(map(documents.escape_path, text))
        raise UserError(f"--text {patterns}: all {len(sources)} UTF-8 files are empty", "check the glob")


def _compute_identity(sources: list[documents.Source], options: BuildOptions) -> str:
    """Return a hex digest of the content of all files, in order, and of the options that affect tokenization."""
    # Without paths, so that the result does not depend on the location of the text.
    content = [(source.sha256, source.is_lines) for source in sources]
    return hashlib.sha256(json.dumps([FORMAT, content, options.encoding()]).encode()).hexdigest()


def _report_finished(
    unfinished: UnfinishedBuild, identity: str, options: BuildOptions, skipped_files: list[str]
) -> Report:
    """Return the report of a complete folder. Raises UserError if it was built from other text or options."""
    data_folder = DataFolder.load(unfinished.folder)
    hint = "choose another --out, or delete the folder"
    if not data_folder.source or data_folder.source.get("identity") != identity:
        raise UserError(f"{unfinished.folder} is complete, but was built from different text or options", hint)
    if options.split not in (None, data_folder.split):
        message = f"{unfinished.folder} is complete, but has split {data_folder.split}, not {options.split}"
        raise UserError(message, f"change split in its {FILE}, or {hint}")
    unfinished.remove_work_folder()
    return Report(data_folder, True, skipped=skipped_files, notes=_describe_skipped_files(skipped_files))


def _describe_skipped_files(skipped_files: list[str]) -> list[str]:
    return [f"skipped {len(skipped_files)}: {_list_not_utf8(skipped_files)}"] if skipped_files else []


def _choose_shard_bytes(sources: list[documents.Source]) -> int:
    """Return the bytes per shard for about 64 shards, but between 1 and 64 MiB."""
    # Small enough for resuming and load balancing, large enough to amortize the start of a job.
    return min(max(sum(source.size for source in sources) // 64, 1 << 20), 1 << 26)


def _check_workers(workers: int | None) -> None:
    max_workers = max(16, 4 * usable_cores())  # more would only take memory
    if workers is not None and not 1 <= workers <= max_workers:
        message = (
            f"--workers is {paths.shorten(workers)}; with {usable_cores()} cores it must be between 1 and {max_workers}"
        )
        raise UserError(message, "omit it to use one per core")


@contextmanager
def _translate_disk_errors(folder: Path) -> Iterator[None]:
    """Convert an OSError of a write to an error whose message has a next step."""
    try:
        yield
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}", paths.CHOOSE_OTHER_OUT) from None
    except OSError as error:
        if error.errno in (errno.EROFS, errno.ENAMETOOLONG):
            message = f"{paths.shorten(error.filename)} cannot be written: {error.strerror}"
            raise UserError(message, paths.CHOOSE_OTHER_OUT) from None
        if error.errno != errno.ENOSPC:
            raise
        free_mib = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free >> 20
        message = f"the disk is full ({free_mib} MiB free); free some space, then run the same command to resume"
        raise OSError(errno.ENOSPC, message, str(folder)) from None
