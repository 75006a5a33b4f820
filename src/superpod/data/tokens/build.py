"""`recipes data build`: make a data folder from text. Parallel, resumable, and complete or not there at all."""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from superpod.common.cpu_threads import usable_cores
from superpod.data.folder import FILE, DataFolder, check_parts
from superpod.data.readers import documents, paths
from superpod.data.samples.samples import SKIPPED, BadLines, Reading
from superpod.data.tokens import shards, tokenizer, worker_pool
from superpod.data.tokens.build_options import BuildOptions
from superpod.data.tokens.unfinished import UnfinishedBuild
from superpod.errors import UserError

PREFIX = "text"
"""The token files of a built folder are text.bin and text.idx."""
FORMAT = 1
"""Raise it when the same input would be encoded differently: unfinished builds then start over."""
TRAINING_BYTES = 1 << 30
"""A tokenizer is trained on at most about this many bytes of text, taken evenly from the whole."""
_SCAN = 64
"""Files that one job reads to digest them."""

Progress = Callable[[str, int, int], None]
"""progress(phase, done, total) of the phases "read" (files), "tokenizer" (total 0: unknown), "encode" (bytes of
text) and "write" (documents)."""


@dataclass(frozen=True)
class Report:
    """A build's outcome. An earlier build had left `resumed` of the `shards`; `skipped` files are not UTF-8; `empty`
    counts blank documents, `duplicates` those that repeat another; `notes` are for the user to read."""

    folder: DataFolder
    up_to_date: bool = False
    shards: int = 0
    resumed: int = 0
    skipped: list[str] = field(default_factory=list)
    empty: int = 0
    duplicates: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


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
    """Make the data folder `out` from the files that the patterns in `text` name (see `documents.find`).

    The result depends on the content and order of the files and on `options` only, not on `workers` (default: one
    for each core) or on interruptions. A finished folder from the same input is left alone; an unfinished one is
    continued. `note` receives a line that the user should see at once.

    Raises:
        UserError: see docs/data.md, "What is refused".
        OSError: ENOSPC, the disk is full. No half-written file has a final name, and the same command continues later.
    """
    started, folder = time.monotonic(), Path(out).absolute()
    options.check()
    _check_workers(workers)
    paths.check_out(folder, FILE)
    unfinished = UnfinishedBuild(folder)
    unfinished.check_owner()
    files = documents.find(text, outside=folder)
    with _explained_disk_errors(folder), worker_pool.workers(workers or usable_cores()) as run:
        sources, skipped = _sources(run, files, strict, progress)
        identity = _identity(sources, options)
        if (folder / FILE).is_file():
            return _finished(unfinished, identity, options, skipped)
        _refuse_empty(sources, text)
        # Shards of another size are other shards: the size is part of what the work folder was made from.
        size = shard_bytes or _shard_bytes(sources)
        with unfinished.claimed(f"{identity} {size}", note):
            plan = documents.plan(sources, size)
            blank = sum(source.size == 0 and not source.is_lines for source in sources)
            phases = _Phases(unfinished, options, plan, run, progress, note, empty=blank)
            data_folder = phases.write(identity, files=len(sources), skipped=len(skipped))
    notes = phases.notes + _notes(skipped)
    seconds = time.monotonic() - started
    counts = len(plan), phases.resumed, skipped, phases.empty, phases.duplicates
    return Report(data_folder, False, *counts, seconds, notes)


@dataclass
class _Phases:
    """The phases of one build; each leaves what it finished in the work folder, where the next build finds it."""

    unfinished: UnfinishedBuild
    options: BuildOptions
    plan: list[tuple[documents.Piece, ...]]
    run: worker_pool.Run
    progress: Progress
    note: Callable[[str], None]
    resumed: int = 0
    empty: int = 0
    duplicates: int = 0
    notes: list[str] = field(default_factory=list)

    def write(self, identity: str, files: int, skipped: int) -> DataFolder:
        """Run all phases; dataset.json is written last, so that a folder with one is complete."""
        encoder = self._tokenizer()
        shard_facts = self._encode(encoder)
        filled = {prefix: shard for prefix, shard in shard_facts.items() if shard.documents}
        self.empty += sum(shard.empty for shard in shard_facts.values())
        left_out = self._left_out(shard_facts)
        if not filled:
            raise UserError(f"all {self.empty} documents are blank", "check --text and --json-key")
        merged = shards.distinct(list(filled), encoder.vocab)
        self.duplicates = merged.duplicates
        split = self.options.split_for(merged.documents)
        left_over = f" ({merged.duplicates} duplicate documents left out)" if merged.duplicates else ""
        check_parts(split, merged.documents, f"{self.unfinished.folder}{left_over}")
        text = self.unfinished.work / PREFIX
        sha256 = shards.merge(merged, text, encoder.vocab, self.options.seed, self._phase("write"))
        self.unfinished.publish([self._tokenizer_path(), Path(f"{text}.bin"), Path(f"{text}.idx"), *left_out])
        data_folder = DataFolder(
            path=self.unfinished.folder,
            prefixes=(PREFIX,),
            tokenizer=self._tokenizer_path().name,
            vocab=encoder.vocab,
            tokens=merged.tokens,
            documents=merged.documents,
            split=split,
            sha256={PREFIX: sha256},
            source={
                **{"identity": identity, "files": files, "skipped": skipped, "empty": self.empty},
                "duplicates": self.duplicates,
                **self.options.encoding(),
            },
        )
        data_folder.write()
        return data_folder

    def _left_out(self, shard_facts: Mapping[str, shards.ShardDone]) -> list[Path]:
        """The file of all bad lines, if there are any; UserError for more than the share that is allowed."""
        bad = BadLines(Reading(skip=True, max_bad_share=self.options.max_bad_share))
        together = self.unfinished.work / SKIPPED
        with together.open("w") as out:
            for prefix, shard in shard_facts.items():
                if not shard.bad:
                    continue
                with shards.bad_lines(prefix).open() as lines:
                    for line in lines:
                        out.write(line)
                        row = json.loads(line)
                        bad.add(documents.shown(row["file"]), row["line"], row["reason"], "")
        if not bad.count:
            return []
        bad.check(sum(shard.documents + shard.empty for shard in shard_facts.values()), "--text")
        self.notes.append(f"skipped {bad.count} bad lines ({bad.summary}): {self.unfinished.folder / SKIPPED}")
        return [together]

    def _phase(self, name: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(name, done, total)

    def _tokenizer_path(self) -> Path:
        source = self.options.tokenizer
        return self.unfinished.work / ("tokenizer.model" if source and source.is_file() else "tokenizer")

    def _tokenizer(self) -> tokenizer.Tokenizer:
        path, source, vocab = self._tokenizer_path(), self.options.tokenizer, self.options.vocab_size
        if source:
            self.unfinished.drop(path)
            tokenizer.copy(source, path)
        elif not path.is_dir():  # an earlier build may have trained it
            self.progress("tokenizer", 0, 0)
            pieces = self._training_pieces()
            jobs = [shards.TrainJob(pieces, self.options.json_key, vocab or 0, str(path), self.options.skip)]
            list(self.run(shards.train, jobs))
        encoder = tokenizer.load(path, self.unfinished.work / "encoder.json")
        if vocab and encoder.vocab < vocab:
            self.notes.append(f"the text is enough for a vocabulary of {encoder.vocab}, not {vocab}")
        return encoder

    def _training_pieces(self) -> tuple[documents.Piece, ...]:
        """Every n-th shard, so many that they hold about `TRAINING_BYTES` together."""
        total = sum(piece.end - piece.start for shard in self.plan for piece in shard)
        step = -(-total // TRAINING_BYTES)
        return tuple(piece for shard in self.plan[::step] for piece in shard)

    def _encode(self, encoder: tokenizer.Tokenizer) -> dict[str, shards.ShardDone]:
        """Encode the shards that no earlier build finished; facts of all shards by prefix, in the plan's order."""
        names = [str(self.unfinished.work / f"{number:06d}") for number in range(len(self.plan))]
        jobs = [
            shards.ShardJob(pieces, self.options.json_key, encoder, name, self.options.skip)
            for pieces, name in zip(self.plan, names, strict=True)
        ]
        done = {job.prefix: shard for job in jobs if (shard := shards.finished(job.prefix))}
        self.resumed = len(done)
        if done:
            self.note(f"resumed: {len(done)} of {len(jobs)} shards were there")
        total, ready = sum(job.bytes for job in jobs), sum(job.bytes for job in jobs if job.prefix in done)
        self.progress("encode", ready, total)
        # Shards are finished in any order, and put back in the plan's at the end.
        for job, shard in self.run(shards.encode, [job for job in jobs if job.prefix not in done]):
            done[job.prefix] = shard
            ready += job.bytes
            self.progress("encode", ready, total)
        return {name: done[name] for name in names}


def _sources(
    run: worker_pool.Run, files: list[str], strict: bool, progress: Progress
) -> tuple[list[documents.Source], list[str]]:
    """The UTF-8 sources in order of path, and the paths of the files that are not UTF-8."""
    sources: list[documents.Source] = []
    progress("read", 0, len(files))
    for _, part in run(documents.scan, (files[at : at + _SCAN] for at in range(0, len(files), _SCAN))):
        sources += part
        progress("read", len(sources), len(files))
    sources.sort(key=lambda source: os.fsencode(source.path))  # jobs end in any order
    skipped = [source.path for source in sources if not source.utf8]
    if strict and skipped:
        hint = "convert them (iconv -f latin1 -t utf-8), or leave out --strict to skip them"
        raise UserError(f"{_named(skipped)} not UTF-8", hint)
    return [source for source in sources if source.utf8], skipped


def _named(files: list[str]) -> str:
    more = f" and {len(files) - 5} more" if len(files) > 5 else ""
    verb = "is" if len(files) == 1 else "are"
    return f"{', '.join(map(documents.shown, files[:5]))}{more} {verb}"


def _refuse_empty(sources: list[documents.Source], text: Sequence[str]) -> None:
    if not any(source.size for source in sources):
        named = ", ".join(map(documents.shown, text))
        raise UserError(f"--text {named}: {len(sources)} UTF-8 files, all of them empty", "check what the glob names")


def _identity(sources: list[documents.Source], options: BuildOptions) -> str:
    """Digest of the content of all sources in order, and of the options that decide the encoding."""
    # No paths: text that was moved gives the same folder.
    content = [(source.sha256, source.is_lines) for source in sources]
    return hashlib.sha256(json.dumps([FORMAT, content, options.encoding()]).encode()).hexdigest()


def _finished(unfinished: UnfinishedBuild, identity: str, options: BuildOptions, skipped: list[str]) -> Report:
    data_folder = DataFolder.load(unfinished.folder)
    hint = "choose another --out, or delete this folder"
    if not data_folder.source or data_folder.source.get("identity") != identity:
        raise UserError(f"{unfinished.folder} is finished, and was made from other text or other options", hint)
    if options.split not in (None, data_folder.split):
        message = f"{unfinished.folder} is finished, with split {data_folder.split}, not {options.split}"
        raise UserError(message, f"change split in its {FILE}, or {hint}")
    unfinished.discard()
    return Report(data_folder, True, skipped=skipped, notes=_notes(skipped))


def _notes(skipped: list[str]) -> list[str]:
    return [f"skipped {len(skipped)}: {_named(skipped)} not UTF-8"] if skipped else []


def _shard_bytes(sources: list[documents.Source]) -> int:
    # About 64 shards, of 1 to 64 MiB: small enough to resume and to share out, large enough to be worth a job.
    return min(max(sum(source.size for source in sources) // 64, 1 << 20), 1 << 26)


def _check_workers(workers: int | None) -> None:
    most = max(16, 4 * usable_cores())  # more only cost memory; a mistyped number could take the machine down
    if workers is not None and not 1 <= workers <= most:
        message = f"--workers {paths.short(workers)} is outside 1..{most}, for {usable_cores()} cores here"
        raise UserError(message, "leave it out for one per core")


@contextmanager
def _explained_disk_errors(folder: Path) -> Iterator[None]:
    """Turn the system's errors on writing into messages with a next move."""
    try:
        yield
    except PermissionError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}", "choose another --out") from None
    except OSError as error:
        if error.errno in (errno.EROFS, errno.ENAMETOOLONG):
            message = f"cannot write {paths.short(error.filename)}: {error.strerror}"
            raise UserError(message, paths.OTHER_OUT) from None
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free >> 20
        message = f"the disk is full ({free} MiB free): make room and run the same command again; what is done is kept"
        raise OSError(errno.ENOSPC, message, str(folder)) from None
