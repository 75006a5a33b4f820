"""External runs: logs of Megatron-LM, Megatron-Bridge and NeMo, and TensorBoard folders.

The supported lines are those of Megatron-LM's `training_log` (megatron/training/training.py), the function of the same
name in Megatron-Bridge (src/megatron/bridge/training/utils/train_utils.py) and NeMo's ProgressPrinter
(progress_printer.py). From logs of other launchers, only the losses are read, as in `recipes why`
(diagnosis/losses.py).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from superpod.diagnosis.log_lines import LogLine, scan
from superpod.diagnosis.losses import Series
from superpod.errors import UserError
from superpod.planner import hardware
from superpod.reports.external import external_jobs, log_fields, log_folder
from superpod.reports.runs.run_record import SCORE, Rank, Record, Span, Step, compute_interval, merge_reports
from superpod.reports.why import LOG_NAMES, SKIPPED_FOLDERS

EVENTS = "events.out.tfevents"
"""Prefix of the names of TensorBoard event files."""
MAX_FILES = 2000
RUNS_DEPTH = 4
"""Depth to which a folder is searched for run.json, which is only in folders of runs."""


def read_run(path: Path, gpu: str = "") -> Record:
    """Read a run from a log, a folder of logs or a TensorBoard folder.

    Args:
        path: the log or folder. All logs in a folder belong to one run, each to an attempt or a rank.
        gpu: type of its GPUs, which logs do not contain; "" if unknown.

    Raises:
        UserError: there is no step, the files cannot be read, TensorBoard is not installed, or the GPU is unknown.
    """
    try:
        files = [path] if path.is_file() else _list_files(path)
        events = [file for file in files if file.name.startswith(EVENTS)]
        if events:
            from superpod.reports.external import tensorboard_runs

            return tensorboard_runs.read_run(path, events, gpu)
        if not path.is_file():
            files = _select_logs(path, files)
        logs = [log for log in map(_read_log, files) if log]
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: {error.strerror}", "specify a log that you have permission to read"
        ) from error

    with_steps = [log for log in logs if log.reports or log.series.points]
    left_out = log_fields.describe_left_out([step for log in logs for step in log.implausible])
    if left_out and not any(log.reports for log in logs):
        raise UserError(f"{path}: {left_out}", "the log contains no other steps")
    if not with_steps:
        formats = "Megatron-LM, Megatron-Bridge, NeMo, or any line with a step and its loss"
        raise UserError(
            f"{path} contains no training step", f"specify the log of the rank that prints steps. Formats: {formats}"
        )
    return replace(_build_record(path, with_steps, logs, gpu), left_out=left_out)


def _list_files(folder: Path) -> list[Path]:
    """Return the files in a folder and its subfolders. Raises UserError if it contains runs of this project."""
    if not folder.is_dir():
        hint = "specify a run, a log, a folder of logs, or a TensorBoard folder"
        raise UserError(f"{folder} is neither a run folder nor a log", hint)
    files = []
    for file in log_folder.iterate_files(folder, {*SKIPPED_FOLDERS} - {"tb_logs", "wandb"}):
        if file.name == "run.json" and len(file.relative_to(folder).parts) <= RUNS_DEPTH:
            hint = f"specify one, such as {shlex.quote(str(file.parent))}"
            raise UserError(f"{folder} contains runs, but is not a run", hint)
        files.append(file)
    return files


def _select_logs(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Return the files with the name of a log. Raises UserError if there are none, or too many."""
    logs = []
    for path in files:
        is_skipped = any(part in SKIPPED_FOLDERS for part in path.relative_to(folder).parts)
        if not is_skipped and (path.suffix.lower() in LOG_NAMES or path.name in ("stdout", "stderr")):
            logs.append(path)
    if not logs:
        raise UserError(f"{folder} contains no log ({', '.join(LOG_NAMES)})", "specify a run folder or a log")
    if len(logs) > MAX_FILES:
        raise UserError(f"{folder} has more than {MAX_FILES:,} logs", "specify the folder with the logs of one run")
    return logs


@dataclass
class _Log:
    """Content of a log that was read so far."""

    path: Path
    reports: list[Step] = field(default_factory=list)
    began: dict[str, float] = field(default_factory=dict)
    """first timestamp of each attempt"""
    ended: dict[str, float] = field(default_factory=dict)
    """last timestamp of each attempt"""
    series: Series = field(default_factory=Series)
    facts: dict[str, str] = field(default_factory=dict)
    """arguments of the run by name"""
    saves_s: list[float] = field(default_factory=list)
    saved: int = 0
    memory: dict[int, float] = field(default_factory=dict)
    """rank -> peak in GiB"""
    scores: dict[int, tuple[str, float]] = field(default_factory=dict)
    """rank -> its node and relative speed"""
    implausible: list[str] = field(default_factory=list)
    """numbers of the steps that are omitted because of their step time"""
    is_nemo: bool = False
    is_bridge: bool = False
    _attempt: int = 1
    _restarted: bool = False
    _at: float = 0.0
    _is_stamped: bool = False
    _tflops: float | None = None
    _val: float | None = None

    def read_line(self, line: LogLine) -> bool:
        """Parse a line, and return whether it contained any data."""
        self._is_stamped = line.at not in (0.0, self._at)  # a line without a timestamp has that of the line before
        if self._is_stamped:
            self._at = line.at
            name = f"{self._attempt + self._restarted:03d}"
            self.began.setdefault(name, line.at)
            self.ended[name] = line.at
        is_loss = self.series.add_line(line)
        return self._parse_line(line) or is_loss

    def _parse_line(self, line: LogLine) -> bool:
        text = line.text
        match = log_fields.STEP.search(text)
        if match:
            fields = log_fields.parse_fields(match[2])
            if log_fields.has_plausible_time(fields):
                self._add_step(int(match[1]), fields, line)
            else:
                self.implausible.append(match[1])
            return True
        match = log_fields.VALIDATION.search(text)
        if match:
            self._add_validation(int(match[1]), float(match[2]))
            return True
        match = log_fields.BRIDGE.search(text)
        if match:
            self.is_bridge, self._tflops = True, float(match[1])
            return True
        match = log_fields.START.search(text)
        if match:
            self._start_attempt(match[1] or match[2])
            return True
        match = log_fields.ARGUMENT.match(text)
        if match:
            self.facts[match[1] or match[3]] = (match[2] or match[4]).strip()
            return True
        return self._parse_rare_line(text, line.rank or 0)

    def _parse_rare_line(self, text: str, rank: int) -> bool:
        """Parse a line about saves, memory or the speed of ranks, and return whether it is one."""
        if log_fields.SAVED.search(text):
            self.saved += 1
            return True
        match = log_fields.SAVE_TIME.search(text)
        if match:
            self.saves_s.append(float(match[1]) / 1000)
            return True
        match = log_fields.MEMORY.search(text)
        if match:
            gib = log_fields.parse_peak_gib(match[1], match[2])
            if gib is not None:
                self.memory[rank] = max(gib, self.memory.get(rank, 0.0))
            return True
        match = SCORE.search(text)
        if match:
            self.scores[int(match[1])] = match[2], float(match[3])
        return match is not None

    def _start_attempt(self, ranks: str | None) -> None:
        self._restarted = bool(self.reports)
        if ranks:
            self.facts["world_size"] = ranks

    def _add_step(self, step: int, fields: dict[str, float], line: LogLine) -> None:
        if "train_step_timing in s" in fields or "reduced_train_loss" in fields:
            self.is_nemo = True
            step = int(fields.get("global_step", step)) + 1
        last = self.reports[-1] if self.reports else None
        if self._restarted or (last is not None and step <= last.step):
            self._attempt, self._restarted = self._attempt + 1, False
        report = log_fields.build_step(step, f"{self._attempt:03d}", fields, self._tflops)
        self._tflops = None

        # NeMo prints the last validation loss with every step: a new value belongs to the previous step.
        val = log_fields.finite_or_none(fields.get("val_loss"))
        if val is not None and val != self._val and last is not None:
            self.reports[-1] = replace(last, val_loss=val)
        self._val = val
        self.reports.append(replace(report, t=line.at if self._is_stamped else None))

    def _add_validation(self, step: int, loss: float) -> None:
        if self.reports and self.reports[-1].step == step and math.isfinite(loss):
            self.reports[-1] = replace(self.reports[-1], val_loss=loss)


def _read_log(path: Path) -> _Log | None:
    """Return the content of a log; None if it was removed in the meantime. Raises OSError if it is unreadable."""
    log = _Log(path)
    try:
        scan(path, log.read_line)
    except FileNotFoundError:
        return None
    return log


def _build_record(path: Path, with_steps: Sequence[_Log], logs: Sequence[_Log], gpu: str) -> Record:
    facts: dict[str, str] = {}
    for log in logs:
        facts |= log.facts
    steps, repeated, spans = _merge_attempts(with_steps)
    gpus, seq = external_jobs.parse_count(facts, "world_size"), external_jobs.parse_count(facts, "seq_length")
    batch = external_jobs.parse_count(facts, "global_batch_size") or log_fields.estimate_batch(steps)
    job, unplanned = external_jobs.build_job(facts, gpu, gpus, seq, batch)
    memory = {rank: gib for log in logs for rank, gib in log.memory.items()}
    scores = {rank: score for log in logs for rank, score in log.scores.items()}
    waiting_shares = sorted(share for log in with_steps for share, _ in log.series.waiting[1:])
    anomalies = [anomaly.message for log in with_steps for anomaly in log.series.anomalies() if anomaly.lasts]
    return Record(
        name=path.name,
        path=path,
        source=_name_source(with_steps),
        steps=external_jobs.add_rates(steps, seq, gpus, batch),
        repeated=repeated,
        spans=spans,
        ranks=tuple(_build_rank(rank, memory, scores) for rank in sorted({*memory, *scores})),
        gpu=hardware.node(gpu).gpu.name if gpu else "",
        gpus=gpus,
        seq=seq,
        job=job,
        unplanned=unplanned,
        peak_gib=max(memory.values(), default=None),
        saves_s=tuple(second for log in logs for second in log.saves_s),
        saved=max(sum(log.saved for log in logs), sum(len(log.saves_s) for log in logs)),
        remark=anomalies[0] if anomalies else "",
        waiting=waiting_shares[len(waiting_shares) // 2] if len(waiting_shares) > 2 else None,
    )


def _build_rank(rank: int, memory: Mapping[int, float], scores: Mapping[int, tuple[str, float]]) -> Rank:
    node, score = scores.get(rank, ("", None))
    return Rank(rank, node, allocated_gib=memory.get(rank), score=score)


def _name_source(logs: Sequence[_Log]) -> str:
    if any(log.is_bridge for log in logs):
        return "log of Megatron-Bridge"
    if any(log.is_nemo for log in logs):
        return "log of NeMo"
    if any(log.reports for log in logs):
        return "log of Megatron-LM"
    return "log of another launcher"


def _merge_attempts(logs: Sequence[_Log]) -> tuple[tuple[Step, ...], tuple[Step, ...], tuple[Span, ...]]:
    """Return steps, repeated steps and attempts of all logs in chronological order, without copies of logs."""
    reports: list[Step] = []
    spans: list[Span] = []
    known: set[tuple[object, ...]] = set()
    for log in sorted(logs, key=lambda log: (min(log.began.values(), default=0.0), str(log.path))):
        own_steps = log.reports or _build_steps_from_losses(log.series)
        values = {(step.step, step.loss, step.seconds) for step in own_steps}
        if values <= known:
            continue
        known |= values

        offset = len(spans)  # attempts are numbered consecutively across logs
        counted_steps = _set_step_counts(own_steps)
        for name in dict.fromkeys(step.attempt for step in own_steps):
            began, ended = None, None
            timed_steps = [step for step in counted_steps if step.attempt == name and step.t is not None]
            if timed_steps:
                began, ended = log.began.get(name), log.ended.get(name)
                first = timed_steps[0]
                if first.t and first.seconds and began is not None:
                    began = min(began, first.t - first.seconds * first.count)
            spans.append(Span(f"{int(name) + offset:03d}", began, ended))
        reports += [replace(step, attempt=f"{int(step.attempt) + offset:03d}") for step in counted_steps]
    return *merge_reports(reports), tuple(spans)


def _build_steps_from_losses(series: Series) -> list[Step]:
    """Return the steps of a log that contains only losses."""
    points = sorted((*series.points, *series.bad_points), key=lambda point: point.line.number)
    steps = []
    for point in points:
        loss = log_fields.finite_or_none(point.loss)
        steps.append(Step(point.step, "001", loss=loss, bad_loss=loss is None))
    return steps


def _set_step_counts(steps: Sequence[Step]) -> list[Step]:
    """Return steps with `count` set, the number of steps that a log line covers: it may have the mean of ten steps."""
    usual_interval = compute_interval(steps)
    counted_steps = []
    for i, step in enumerate(steps):
        covered_steps = min(usual_interval, step.step)
        if i and steps[i - 1].attempt == step.attempt:
            covered_steps = step.step - steps[i - 1].step
        counted_steps.append(replace(step, count=max(1, covered_steps)))
    return counted_steps
