"""Runs that this project did not make: logs of Megatron-LM, Megatron-Bridge and NeMo, and TensorBoard folders.

The lines are those that Megatron-LM's `training_log` (megatron/training/training.py), Megatron-Bridge's (of the same
name, src/megatron/bridge/training/utils/train_utils.py) and NeMo's ProgressPrinter (progress_printer.py) print. Of logs
of other launchers the losses are read, as `recipes why` reads them (diagnosis/losses.py).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from superpod.common import walk
from superpod.diagnosis.log_lines import LogLine, scan
from superpod.diagnosis.losses import Series
from superpod.errors import UserError
from superpod.planner import hardware
from superpod.reports.external import external_jobs, log_fields
from superpod.reports.runs.run_record import SCORE, Rank, Record, Span, Step, interval, merged
from superpod.reports.why import LOG_NAMES, SKIPPED

EVENTS = "events.out.tfevents"
"""How the files of TensorBoard begin."""
MOST_FILES = 2000
RUNS_DEPTH = 4
"""Parts of the path of a run.json below a folder that holds runs, or folders of runs."""


def read_run(path: Path, gpu: str = "") -> Record:
    """What a log, a folder of logs or a TensorBoard folder holds of a run.

    Args:
        path: all logs in a folder are one run's, an attempt or a rank each.
        gpu: on which it ran, where that is known: no log says it.

    Raises:
        UserError: there is no step in it, or it cannot be read; TensorBoard is not installed; no such GPU.
    """
    try:
        files = [path] if path.is_file() else _below(path)
        if events := [file for file in files if file.name.startswith(EVENTS)]:
            from superpod.reports.external import tensorboard_runs

            return tensorboard_runs.read_run(path, events, gpu)
        logs = [log for file in (files if path.is_file() else _logs(path, files)) if (log := _read(file))]
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}", "name a log that you may read") from error
    telling = [log for log in logs if log.reports or log.series.points]
    left_out = log_fields.describe_left_out([step for log in logs for step in log.insane])
    if left_out and not any(log.reports for log in logs):
        raise UserError(f"{path}: {left_out}", "its times are wrong, and nothing is left to report")
    if not telling:
        forms = "Megatron-LM, Megatron-Bridge, NeMo, or any line with a step and its loss"
        raise UserError(f"{path} holds no step of a training", f"name the log of the rank that prints steps: {forms}")
    return replace(_of_logs(path, telling, logs, gpu), left_out=left_out)


def _below(folder: Path) -> list[Path]:
    """The files below a folder. Logs of several runs are no run: one in which runs of this project lie is refused."""
    if not folder.is_dir():
        raise UserError(
            f"{folder} is neither a run folder nor a log", "name a run, a log, a folder of logs, or of TensorBoard's"
        )
    files = []
    for file in walk.below(folder, {*SKIPPED} - {"tb_logs", "wandb"}):
        if file.name == "run.json" and len(file.relative_to(folder).parts) <= RUNS_DEPTH:
            raise UserError(f"{folder} holds runs, and is none", f"name one, such as {shlex.quote(str(file.parent))}")
        files.append(file)
    return files


def _logs(folder: Path, below: Sequence[Path]) -> list[Path]:
    files = [
        path for path in below
        if not {*path.relative_to(folder).parts} & {*SKIPPED}
        and (path.suffix.lower() in LOG_NAMES or path.name in ("stdout", "stderr"))
    ]  # fmt: skip
    if not files:
        raise UserError(f"{folder} holds no log ({', '.join(LOG_NAMES)})", "name a run folder or a log")
    if len(files) > MOST_FILES:
        raise UserError(f"{folder} has more than {MOST_FILES:,} logs", "name the folder of one run's logs")
    return files


@dataclass
class _Log:
    """What one log tells."""

    path: Path
    reports: list[Step] = field(default_factory=list)
    began: dict[str, float] = field(default_factory=dict)
    """by attempt, the first time that stands in it"""
    ended: dict[str, float] = field(default_factory=dict)
    series: Series = field(default_factory=Series)
    facts: dict[str, str] = field(default_factory=dict)
    """arguments that were printed"""
    saves_s: list[float] = field(default_factory=list)
    saved: int = 0
    memory: dict[int, float] = field(default_factory=dict)
    """by rank, the peak in GiB"""
    scores: dict[int, tuple[str, float]] = field(default_factory=dict)
    """by rank, its node and its speed"""
    insane: list[str] = field(default_factory=list)
    """steps whose lines are not taken, for the time that they name"""
    is_nemo: bool = False
    is_bridge: bool = False
    _attempt: int = 1
    _restarted: bool = False
    _at: float = 0.0
    _is_stamped: bool = False
    _tflops: float | None = None
    _val: float | None = None

    def look(self, line: LogLine) -> bool:
        """Take a line; whether it tells anything."""
        self._is_stamped = line.at not in (0.0, self._at)  # a line without a time has the time of the last that had one
        if self._is_stamped:
            self._at = line.at
            name = f"{self._attempt + self._restarted:03d}"
            self.began.setdefault(name, line.at)
            self.ended[name] = line.at
        waits = self.series.take(line)
        return self._take(line) or waits

    def _take(self, line: LogLine) -> bool:
        text = line.text
        if match := log_fields.STEP.search(text):
            fields = log_fields.parse_fields(match[2])
            if log_fields.has_sane_time(fields):
                self._step(int(match[1]), fields, line)
            else:
                self.insane.append(match[1])
        elif match := log_fields.VALIDATION.search(text):
            self._validated(int(match[1]), float(match[2]))
        elif match := log_fields.BRIDGE.search(text):
            self.is_bridge, self._tflops = True, float(match[1])
        elif match := log_fields.START.search(text):
            self._started(match[1] or match[2])
        elif match := log_fields.ARGUMENT.match(text):
            self.facts[match[1] or match[3]] = (match[2] or match[4]).strip()
        else:
            return self._take_rare(text, line.rank or 0)
        return True

    def _take_rare(self, text: str, rank: int) -> bool:
        """Saves, memory, and how fast ranks are."""
        if log_fields.SAVED.search(text):
            self.saved += 1
        elif match := log_fields.SAVE_TIME.search(text):
            self.saves_s.append(float(match[1]) / 1000)
        elif match := log_fields.MEMORY.search(text):
            if (gib := log_fields.parse_peak_gib(match[1], match[2])) is not None:
                self.memory[rank] = max(gib, self.memory.get(rank, 0.0))
        elif match := SCORE.search(text):
            self.scores[int(match[1])] = match[2], float(match[3])
        else:
            return False
        return True

    def _started(self, ranks: str | None) -> None:
        self._restarted = bool(self.reports)
        if ranks:
            self.facts["world_size"] = ranks

    def _step(self, step: int, fields: dict[str, float], line: LogLine) -> None:
        if "train_step_timing in s" in fields or "reduced_train_loss" in fields:
            self.is_nemo = True
            step = int(fields.get("global_step", step)) + 1
        last = self.reports[-1] if self.reports else None
        if self._restarted or (last is not None and step <= last.step):
            self._attempt, self._restarted = self._attempt + 1, False
        attempt = f"{self._attempt:03d}"
        report = log_fields.build_step(step, attempt, fields, self._tflops)
        self._tflops = None
        val = log_fields.finite_or_none(fields.get("val_loss"))
        if val is not None and val != self._val and last is not None:  # repeated until the next validation
            self.reports[-1] = replace(last, val_loss=val)
        self._val = val
        self.reports.append(replace(report, t=line.at if self._is_stamped else None))

    def _validated(self, step: int, loss: float) -> None:
        if self.reports and self.reports[-1].step == step and math.isfinite(loss):
            self.reports[-1] = replace(self.reports[-1], val_loss=loss)


def _read(path: Path) -> _Log | None:
    """What a log tells; None of one that was removed since it was found. Raises OSError."""
    log = _Log(path)
    try:
        scan(path, log.look)
    except FileNotFoundError:
        return None
    return log


def _of_logs(path: Path, telling: Sequence[_Log], logs: Sequence[_Log], gpu: str) -> Record:
    facts: dict[str, str] = {}
    for log in logs:
        facts |= log.facts
    steps, repeated, spans = _attempts(telling)
    source = _source(telling)
    gpus, seq = external_jobs.parse_count(facts, "world_size"), external_jobs.parse_count(facts, "seq_length")
    batch = external_jobs.parse_count(facts, "global_batch_size") or log_fields.estimate_batch(steps)
    job, unplanned = external_jobs.build_job(facts, gpu, gpus, seq, batch)
    memory = {rank: gib for log in logs for rank, gib in log.memory.items()}
    scores = {rank: score for log in logs for rank, score in log.scores.items()}
    waiting = [share for log in telling for share, _ in log.series.waiting[1:]]
    return Record(
        name=path.name,
        path=path,
        source=source,
        steps=external_jobs.add_rates(steps, seq, gpus, batch),
        repeated=repeated,
        spans=spans,
        ranks=tuple(_rank(rank, memory, scores) for rank in sorted({*memory, *scores})),
        gpu=hardware.node(gpu).gpu.name if gpu else "",
        gpus=gpus,
        seq=seq,
        job=job,
        unplanned=unplanned,
        peak_gib=max(memory.values(), default=None),
        saves_s=tuple(second for log in logs for second in log.saves_s),
        saved=max(sum(log.saved for log in logs), sum(len(log.saves_s) for log in logs)),
        remark=next((remark.words for log in telling for remark in log.series.remarks() if remark.lasts), ""),
        waiting=sorted(waiting)[len(waiting) // 2] if len(waiting) > 2 else None,
    )


def _rank(rank: int, memory: Mapping[int, float], scores: Mapping[int, tuple[str, float]]) -> Rank:
    node, score = scores.get(rank, ("", None))
    return Rank(rank, node, allocated_gib=memory.get(rank), score=score)


def _source(logs: Sequence[_Log]) -> str:
    if any(log.is_bridge for log in logs):
        return "log of Megatron-Bridge"
    if any(log.is_nemo for log in logs):
        return "log of NeMo"
    return "log of Megatron-LM" if any(log.reports for log in logs) else "log of another launcher"


def _attempts(logs: Sequence[_Log]) -> tuple[tuple[Step, ...], tuple[Step, ...], tuple[Span, ...]]:
    """Steps, repeated steps and attempts of all logs in the order of time; a second copy of the same lines is left."""
    reports: list[Step] = []
    spans: list[Span] = []
    known: set[tuple[object, ...]] = set()
    for log in sorted(logs, key=lambda log: (min(log.began.values(), default=0.0), str(log.path))):
        own = log.reports or _of_points(log.series)
        values = {(step.step, step.loss, step.seconds) for step in own}
        if values <= known:
            continue
        known |= values
        offset = len(spans)
        counted = _counted(own)
        for name in dict.fromkeys(step.attempt for step in own):
            stamps = [step for step in counted if step.attempt == name and step.t is not None]
            began, ended = (log.began.get(name), log.ended.get(name)) if stamps else (None, None)
            if stamps and stamps[0].t and stamps[0].seconds and began is not None:
                began = min(began, stamps[0].t - stamps[0].seconds * stamps[0].count)
            spans.append(Span(f"{int(name) + offset:03d}", began, ended))
        reports += [replace(step, attempt=f"{int(step.attempt) + offset:03d}") for step in counted]
    return *merged(reports), tuple(spans)


def _of_points(series: Series) -> list[Step]:
    """The steps of a log of which only the losses are read."""
    points = sorted((*series.points, *series.bad_points), key=lambda point: point.line.number)
    return [
        Step(
            point.step,
            "001",
            loss=log_fields.finite_or_none(point.loss),
            bad_loss=log_fields.finite_or_none(point.loss) is None,
        )
        for point in points
    ]


def _counted(steps: Sequence[Step]) -> list[Step]:
    """The steps with how many each stands for: a log with one line for ten steps has their mean time."""
    usual = interval(steps)
    counted = []
    for i, step in enumerate(steps):
        before = steps[i - 1] if i and steps[i - 1].attempt == step.attempt else None
        gap = step.step - before.step if before else min(usual, step.step)
        counted.append(replace(step, count=max(1, gap)))
    return counted
