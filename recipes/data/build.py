"""`recipes data build`: from text to a data folder, in parallel, resumable, all or nothing."""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from superpod.errors import UserError
from superpod.recipes.data import documents, paths, shards, tokenizer, worker_pool
from superpod.recipes.data.build_options import BuildOptions
from superpod.recipes.data.folder import FILE, DataFolder, check_parts
from superpod.recipes.data.unfinished import UnfinishedBuild

PREFIX = "text"
"""The token files of a built folder are text.bin and text.idx."""
FORMAT = 1
"""Raise when the same input would be encoded otherwise than before: unfinished builds then start over."""
TRAINING_BYTES = 1 << 30
"""A tokenizer is trained on at most about this much text, taken evenly from the whole."""
_SCAN = 64

Progress = Callable[[str, int, int], None]
"""progress(phase, done, total) of the phases "read" (files), "tokenizer" (total 0: unknown), "encode" (bytes of
text) and "write" (documents)."""


@dataclass(frozen=True)
class Report:
    """A build's outcome. `resumed` of `shards` were there already; `skipped` files are not UTF-8; `empty` counts
    blank documents; `notes` are for the user to read."""

    folder: DataFolder
    up_to_date: bool = False
    shards: int = 0
    resumed: int = 0
    skipped: list[str] = field(default_factory=list)
    empty: int = 0
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
    gone on with. `note` receives a line whenever there is something to say at once.

    UserError: see docs/data.md, "What is refused". OSError (ENOSPC) when the disk is full: nothing half-written
    stands at a final name, and the same command goes on later.
    """
    started, folder = time.monotonic(), Path(out).absolute()
    options.check()
    _check_workers(workers)
    paths.check_out(folder, FILE)
    unfinished = UnfinishedBuild(folder)
    unfinished.check_owner()
    files = documents.find(text, outside=folder)
    with _disk_full(folder), worker_pool.workers(workers or _cores()) as run:
        sources, skipped = _sources(run, files, strict, progress)
        identity = _identity(sources, options)
        if (folder / FILE).is_file():
            return _finished(unfinished, identity, options, skipped)
        _refuse_empty(sources, text)
        size = shard_bytes or _shard_bytes(sources)
        with unfinished.claimed(f"{identity} {size}", note):
            plan = documents.plan(sources, size)
            blank = sum(source.size == 0 and not source.is_lines for source in sources)
            made = _Build(unfinished, options, plan, run, progress, note, empty=blank)
            found = made.write(identity, files=len(sources), skipped=len(skipped))
    notes = made.notes + _notes(skipped)
    seconds = time.monotonic() - started
    return Report(found, False, len(plan), made.resumed, skipped, made.empty, seconds, notes)


@dataclass
class _Build:
    """One pass over the phases; every phase leaves what it finished in the unfinished folder."""

    unfinished: UnfinishedBuild
    options: BuildOptions
    plan: list[tuple[documents.Piece, ...]]
    run: worker_pool.Run
    progress: Progress
    note: Callable[[str], None]
    resumed: int = 0
    empty: int = 0
    notes: list[str] = field(default_factory=list)

    def write(self, identity: str, files: int, skipped: int) -> DataFolder:
        """All phases; dataset.json is the last thing to appear."""
        chosen = self._tokenizer()
        done = self._encode(chosen)
        full = {prefix: facts for prefix, facts in done.items() if facts.documents}
        self.empty += sum(facts.empty for facts in done.values())
        if not full:
            raise UserError(f"all {self.empty} documents are blank", "check --text and --json-key")
        counted = sum(facts.documents for facts in full.values())
        split = self.options.split_for(counted)
        check_parts(split, counted, str(self.unfinished.folder))
        passing, target = self.unfinished.work / PREFIX, self.unfinished.folder
        sha256 = shards.merge(list(full), passing, chosen.vocab, self.options.seed, self._phase("write"))
        self.unfinished.publish([self._tokenizer_path(), Path(f"{passing}.bin"), Path(f"{passing}.idx")])
        found = DataFolder(
            path=target,
            prefixes=(PREFIX,),
            tokenizer=self._tokenizer_path().name,
            vocab=chosen.vocab,
            tokens=sum(facts.tokens for facts in full.values()),
            documents=counted,
            split=split,
            sha256={PREFIX: sha256},
            source={"identity": identity, "files": files, "skipped": skipped, "empty": self.empty}
            | self.options.encoding(),
        )
        found.write()
        return found

    def _phase(self, name: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(name, done, total)

    def _tokenizer_path(self) -> Path:
        given = self.options.tokenizer
        return self.unfinished.work / ("tokenizer.model" if given and given.is_file() else "tokenizer")

    def _tokenizer(self) -> tokenizer.Tokenizer:
        path, given, vocab = self._tokenizer_path(), self.options.tokenizer, self.options.vocab_size
        if given:
            self.unfinished.drop(path)
            tokenizer.copy(given, path)
        elif not path.is_dir():
            self.progress("tokenizer", 0, 0)
            jobs = [shards.TrainJob(self._training_pieces(), self.options.json_key, vocab or 0, str(path))]
            list(self.run(shards.train, jobs))
        chosen = tokenizer.load(path, self.unfinished.work / "encoder.json")
        if vocab and chosen.vocab < vocab:
            self.notes.append(f"the text is enough for a vocabulary of {chosen.vocab}, not {vocab}")
        return chosen

    def _training_pieces(self) -> tuple[documents.Piece, ...]:
        total = sum(piece.end - piece.start for shard in self.plan for piece in shard)
        step = -(-total // TRAINING_BYTES)
        return tuple(piece for shard in self.plan[::step] for piece in shard)

    def _encode(self, chosen: tokenizer.Tokenizer) -> dict[str, shards.ShardDone]:
        names = [str(self.unfinished.work / f"{number:06d}") for number in range(len(self.plan))]
        jobs = [
            shards.ShardJob(pieces, self.options.json_key, chosen, name)
            for pieces, name in zip(self.plan, names, strict=True)
        ]
        done = {job.prefix: facts for job in jobs if (facts := shards.finished(job.prefix))}
        self.resumed = len(done)
        if done:
            self.note(f"resumed: {len(done)} of {len(jobs)} shards were there")
        total, ready = sum(job.bytes for job in jobs), sum(job.bytes for job in jobs if job.prefix in done)
        self.progress("encode", ready, total)
        for job, facts in self.run(shards.encode, [job for job in jobs if job.prefix not in done]):
            done[job.prefix] = facts
            ready += job.bytes
            self.progress("encode", ready, total)
        return {name: done[name] for name in names}


def _sources(
    run: worker_pool.Run, files: list[str], strict: bool, progress: Progress
) -> tuple[list[documents.Source], list[str]]:
    """The readable sources in order of path, and the paths of those that are not UTF-8."""
    found: list[documents.Source] = []
    progress("read", 0, len(files))
    for _, part in run(documents.scan, (files[at : at + _SCAN] for at in range(0, len(files), _SCAN))):
        found += part
        progress("read", len(found), len(files))
    found.sort(key=lambda source: os.fsencode(source.path))
    skipped = [source.path for source in found if not source.utf8]
    if strict and skipped:
        hint = "convert them (iconv -f latin1 -t utf-8), or leave out --strict to skip them"
        raise UserError(f"{_named(skipped)} not UTF-8", hint)
    return [source for source in found if source.utf8], skipped


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
    content = [(source.sha256, source.is_lines) for source in sources]
    return hashlib.sha256(json.dumps([FORMAT, content, options.encoding()]).encode()).hexdigest()


def _finished(unfinished: UnfinishedBuild, identity: str, options: BuildOptions, skipped: list[str]) -> Report:
    found = DataFolder.load(unfinished.folder)
    hint = "choose another --out, or delete this folder"
    if not found.source or found.source.get("identity") != identity:
        raise UserError(f"{unfinished.folder} is finished, and was made from other text or other options", hint)
    if options.split not in (None, found.split):
        said = f"{unfinished.folder} is finished, with split {found.split}, not {options.split}"
        raise UserError(said, f"change split in its {FILE}, or {hint}")
    unfinished.discard()
    return Report(found, True, skipped=skipped, notes=_notes(skipped))


def _notes(skipped: list[str]) -> list[str]:
    return [f"skipped {len(skipped)}: {_named(skipped)} not UTF-8"] if skipped else []


def _shard_bytes(sources: list[documents.Source]) -> int:
    return min(max(sum(source.size for source in sources) // 64, 1 << 20), 1 << 26)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_workers(workers: int | None) -> None:
    most = max(16, 4 * _cores())
    if workers is not None and not 1 <= workers <= most:
        said = f"--workers {paths.short(workers)} is outside 1..{most}, for {_cores()} cores here"
        raise UserError(said, "leave it out for one a core")


@contextmanager
def _disk_full(folder: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}", "choose another --out") from None
    except OSError as error:
        if error.errno in (errno.EROFS, errno.ENAMETOOLONG):
            said = f"cannot write {paths.short(error.filename)}: {error.strerror}"
            raise UserError(said, paths.OTHER_OUT) from None
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free >> 20
        said = f"the disk is full ({free} MiB free): make room and run the same command again; what is done is kept"
        raise OSError(errno.ENOSPC, said, str(folder)) from None
