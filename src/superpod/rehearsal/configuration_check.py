"""Checks a configuration in a separate process: a recipe with overrides, a user's file, or one of NeMo's own recipes.

The process imports Transformer Engine's Python package before NeMo, if it is installed. It also executes the user's
file, which therefore cannot affect the command. `check_in_subprocess` starts the process and reads its answer; `check`
runs in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from superpod.common import atomic_file
from superpod.errors import UserError, readable
from superpod.planner.rules.rules import Violation
from superpod.requests.request import Request
from superpod.runtime.processes.attempt_processes import kill_group
from superpod.runtime.processes.watchdog import Watchdog

if TYPE_CHECKING:
    from nemo_run import Partial

    from superpod.planner.planned_job import PlannedJob

LIMIT_S = 900
"""Time limit in seconds for importing NeMo, executing a user's file, and building the models of three ranks."""
LIMIT_PER_REQUEST_S = 120
"""Additional seconds for each further request to the same process."""
ANSWER_FILE = "SUPERPOD_CHECK_ANSWER"
"""The environment variable with the path of the answer file."""
LOG_BYTES = 2**16
"""Number of bytes at the end of the process's output that are kept, because a user's file may print any amount."""

MISSING_HERE = (
    "must be compiled with 'nccl' support",
    "Apex must be installed",
    "mamba_ssm",
    "causal_conv1d",
    "flashfftconv",
)
"""Substrings of errors whose cause is this machine: PyTorch without CUDA, or a missing package of CUDA kernels."""


class CheckProcessError(RuntimeError):
    """The process that checks configurations failed for a reason other than a user's file."""


@dataclass
class CheckReport:
    """The result of checking a configuration."""

    name: str
    """The recipe, file or NeMo recipe that was checked."""
    title: str = ""
    """Model, task, GPUs, precision, sequence, batch and layout; "" if the planner does not know the model."""
    broken: list[Violation] = field(default_factory=list)
    warnings: list[Violation] = field(default_factory=list)
    verdict: str = ""
    """The planner's result: ok, oom, illegal, or unknown if it does not know the model."""
    short: str = ""
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    usable_gib: float | None = None
    step_time_s: float | None = None
    step_time: str = ""
    """The step time with its interval."""
    step_time_low_s: float | None = None
    step_time_high_s: float | None = None
    extrapolation: str = ""
    """A warning if the prediction goes beyond the measured runs, or ""."""
    tight: bool = False
    unplanned: str = ""
    """The reason why the run was not planned; "" if it was."""
    built: dict[int, list[int]] = field(default_factory=dict)
    """Rank -> number of parameters of each of its model chunks."""
    layers: str = ""
    """The layers that were built: Transformer Engine's, or Megatron's local ones."""
    build_error: str = ""
    """The error raised by the build of a model; "" if there was none."""
    not_built: str = ""
    """What this machine lacks for building the model, or ""."""

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.broken and not self.build_error and self.verdict in ("ok", "unknown")


def check_in_subprocess(request: Request, *, build: bool = True, limit_s: float = LIMIT_S) -> CheckReport:
    """Check a request in a separate process.

    Raises:
        UserError: the request is not a valid configuration, or its file ended the process or exceeded the time limit.
        CheckProcessError: the process failed for another reason.
    """
    (answer,) = check_all_in_subprocess([request], build=build, limit_s=limit_s)
    if isinstance(answer, UserError):
        raise answer
    return answer


def check_all_in_subprocess(
    requests: Sequence[Request], *, build: bool = True, limit_s: float = LIMIT_S
) -> list[CheckReport | UserError]:
    """Check several requests in one process, which imports NeMo only once.

    Returns:
        For each request, its report or the UserError that rejects it.

    Raises:
        UserError: a user's file ended the process or exceeded the time limit.
        CheckProcessError: the process failed for another reason.
    """
    with tempfile.TemporaryDirectory(prefix="recipes-check-") as folder:
        answer_file = Path(folder, "answer.json")
        questions = [[request.recipe, request.facts(), request.gpu, build] for request in requests]
        total_s = limit_s + LIMIT_PER_REQUEST_S * (len(requests) - 1)
        code, log = _run_process(json.dumps(questions), answer_file, total_s)
        if not answer_file.is_file():
            raise _no_answer_error(requests[0].recipe, code, log, limit_s)
        outcomes = _remove_control_codes(json.loads(answer_file.read_bytes()))
    return [_parse_outcome(outcome) for outcome in outcomes]


def _no_answer_error(name: str, code: int | None, log: str, limit_s: float) -> Exception:
    reason = f"exited with code {code}"
    if code is None:
        reason = f"took more than {limit_s:.0f} s"
    if name.endswith(".py"):
        return UserError(
            f"{name}: the process that checks it {reason} before the check was complete",
            "recipe() must only return a description of the run: it must not start, end or wait for anything",
        )
    lines = _remove_control_codes(log).strip().splitlines() or ["no output"]
    return CheckProcessError(f"the process that checks {name} {reason}: {lines[-1][:300]}")


def _parse_outcome(outcome: dict[str, Any]) -> CheckReport | UserError:
    if "refused" in outcome:
        return UserError(*outcome["refused"])
    if "failed" in outcome:
        raise CheckProcessError(outcome["failed"])
    value = outcome["value"]
    for name in ("broken", "warnings"):
        value[name] = [Violation(*row) for row in value[name]]
    value["built"] = {int(rank): counts for rank, counts in value["built"].items()}
    return CheckReport(**value)


def _run_process(questions: str, answer_file: Path, limit_s: float) -> tuple[int | None, str]:
    """Run the process that checks configurations; return its exit code (None = exceeded the limit) and last output."""
    # -P: do not import a folder named nemo in the working directory.
    command = [sys.executable, "-P", "-W", "ignore", "-m", __name__]
    environ = {**os.environ, ANSWER_FILE: str(answer_file), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environ,
        start_new_session=True,
    )
    printed_bytes = bytearray()
    reader = threading.Thread(target=_keep_end, args=(process.stdout, printed_bytes), daemon=True)
    reader.start()
    code: int | None = None
    watchdog = Watchdog()
    watchdog.add_group(process.pid)
    try:
        with contextlib.suppress(BrokenPipeError), cast(IO[bytes], process.stdin) as pipe:
            pipe.write(questions.encode())
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        kill_group(process.pid)
        process.wait()
        watchdog.close()
        reader.join(5)  # a process outside of the group may keep the pipe open
    return code, printed_bytes.decode(errors="replace")


def _keep_end(pipe: IO[bytes], tail: bytearray) -> None:
    """Read `pipe` until it is closed, and keep its last `LOG_BYTES` bytes in `tail`."""
    with pipe:
        for chunk in iter(lambda: pipe.read1(LOG_BYTES), b""):  # pyright: ignore[reportAttributeAccessIssue]
            tail += chunk
            del tail[:-LOG_BYTES]


def _remove_control_codes(value: Any) -> Any:
    """Remove terminal control codes from all strings of a JSON value."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, list):
        return [_remove_control_codes(item) for item in value]
    if isinstance(value, dict):
        return {name: _remove_control_codes(item) for name, item in value.items()}
    return value


# -- in the separate process -----------------------------------------------------------------------------------------


def check(request: Request, *, build: bool = True, confirm: bool = False) -> CheckReport:
    """Check the fields, layout and memory of a request, and build the models of the first, a middle and the last stage.

    Args:
        request: the configuration to check; a file is executed.
        build: build the models if no rule is violated.
        confirm: build them even if a rule is violated, to record the errors of the libraries.

    Raises:
        UserError: the request is not a valid configuration.
    """
    from superpod.nemo2 import validation as rules
    from superpod.requests import resolve, subject

    partial, _ = resolve.build_configuration(request)
    resolve.require_runnable(partial, request.overrides)
    chain = subject.subject_kind(request.recipe) != "nemo"
    report = CheckReport(request.recipe, broken=rules.violations(partial, request.overrides, chain=chain))
    report.warnings = rules.warnings(partial, request.overrides, chain=chain)
    problems, warnings = known_problems(request.recipe, request.overrides)
    report.broken += problems
    report.warnings += warnings

    job = None
    try:
        job = resolve.plan_job(partial, request)
    except UserError as unknown:
        report.unplanned, report.verdict = str(unknown), "unknown"
    if job is not None:
        _plan(report, job)
        report.broken += resolve.job_violations(partial, job)
    if not report.broken:
        report.broken += rules.start_violations(partial, request.overrides, job)
    if confirm or (build and not report.broken):
        _build(report, partial, job)
    return report


def known_problems(name: str, overrides: Sequence[str] = ()) -> tuple[list[Violation], list[Violation]]:
    """Return the errors and the warnings about a recipe that follow from the registry; both are empty for other names.

    Error: the model cannot train with the pinned versions. Warning: the initial weights are missing.
    """
    from superpod.collection import registry
    from superpod.collection.facts import missing_weights, proof_level

    if name not in registry.recipes():
        return [], []
    recipe = registry.find(name)
    problem = proof_level.training_problem(recipe)
    missing, instead = missing_weights.explain(recipe)
    if any(text.startswith("resume.restore_config") for text in overrides):
        missing = ""
    violations = [Violation("model", *problem)] if problem else []
    return violations, [Violation("weights", missing, instead)] if missing else []


def _plan(report: CheckReport, job: PlannedJob) -> None:
    """Store the planner's prediction and warnings for `job` in `report`."""
    from superpod.planner import explain, legality, predict, suggestions

    prediction = predict.one(job)
    report.title = (
        f"{job.model.name} {job.task}, {job.gpus} x {job.node.gpu.name} {job.precision}, seq {job.seq}, "
        f"gbs {job.layout.gbs}: {explain.title(job.layout)}"
    )
    report.verdict, report.tight = prediction.verdict, bool(prediction.tight)
    report.warnings += legality.warnings(job)
    if prediction.fit in ("tight", "does not fit"):
        report.short = suggestions.describe_shortage(job, prediction)
    report.allocated_gib, report.reserved_gib = prediction.allocated_gib_max, prediction.reserved_gib_max
    report.usable_gib, report.step_time_s = prediction.limit_gib, prediction.step_time_s
    report.step_time, report.extrapolation = prediction.step_time, prediction.extrapolation
    report.step_time_low_s, report.step_time_high_s = prediction.step_time_low_s, prediction.step_time_high_s


def _build(report: CheckReport, partial: Partial, job: PlannedJob | None) -> None:
    """Build the models of three pipeline ranks, and store their parameters or the first exception in `report`."""
    from superpod.nemo2.validation import configured_job

    world = partial.trainer.num_nodes * partial.trainer.devices
    pp = partial.trainer.strategy.pipeline_model_parallel_size or 1
    ranks = sorted({stage * (world // pp) for stage in (0, pp // 2, pp - 1)})
    report.layers = "Transformer Engine's" if _has_te() else "local"
    attention: set[str] = set()
    for rank in ranks:
        try:
            report.built[rank], backends = _build_rank(partial, rank, world, job)
            attention |= backends
        except Exception as error:  # each library raises its own types
            text = str(error).partition("\n\nFiddle context")[0].strip()
            message = f"rank {rank}: {type(error).__name__}"
            if text:
                message += f": {text.splitlines()[0][:300]}"
            if any(part in text for part in MISSING_HERE):
                report.not_built = message
            else:
                report.build_error = message
            return
    if job is not None:
        report.warnings += _compare_parameters(report, job, configured_job.read_task(partial))
        report.warnings += _check_attention(job, attention)


def _compare_parameters(report: CheckReport, job: PlannedJob, task: str) -> Iterator[Violation]:
    """Yield a warning if the built model and the planner's model have different numbers of parameters."""
    from superpod.rehearsal.proof import parameter_counts

    planned = parameter_counts.planned_counts(task, job)
    for (rank, chunks), counted in zip(report.built.items(), planned, strict=False):
        if parameter_counts.is_different(job.model, sum(chunks), counted):
            yield Violation(
                "parameters",
                f"rank {rank} has {sum(chunks):,} parameters, but memory and step time were predicted for {counted:,}: "
                "the planner's model differs from the configured one",
                "rely only on the check of the layout, or describe the model in shapes/*.toml: docs/extending.md",
            )
            return


def _check_attention(job: PlannedJob, attention: set[str]) -> Iterator[Violation]:
    """Yield a warning if Transformer Engine selected `unfused` attention, but the plan does not include its scores."""
    if "unfused" in attention and not job.keeps_scores:
        gib = 2 * job.layout.mbs * job.model.heads / job.layout.tp * (job.seq / job.layout.cp) * job.seq / 2**30
        yield Violation(
            "unfused",
            f"Transformer Engine supports only unfused attention for this model, which stores {job.seq:,} x "
            f"{job.seq:,} scores per head, about {gib:.1f} GiB per layer; the planned memory does not include them",
            "change the setting that the fused kernels do not support (head size, dropout, mask), or plan with "
            "`recipes memory` and --option attention=unfused",
        )


def _build_rank(partial: Partial, rank: int, world: int, job: PlannedJob | None) -> tuple[list[int], frozenset[str]]:
    """Build the model of a rank; return the parameters of each chunk and TE's attention backends (none without TE)."""
    if not _has_te():
        from superpod.rehearsal.proof.meta_build import dry_build

        return dry_build(partial, rank, world, step=True), frozenset()
    from superpod.collection.facts import environment
    from superpod.planner import hardware
    from superpod.rehearsal.te.build import build_with_te
    from superpod.requests.subject import DEFAULT_GPU

    if job is None:
        build = build_with_te(partial, rank, world, f"sm{hardware.node(DEFAULT_GPU).gpu.sm}")
    else:
        variables = {v.name: v.value for v in environment.variables(job)}
        generation = f"sm{job.node.gpu.sm}"
        build = build_with_te(partial, rank, world, generation, variables, vocabulary=job.model.vocab)
    return build.parameters, build.attention


def _has_te() -> bool:
    """Return whether `import_nemo` has found Transformer Engine."""
    entry = sys.modules.get("superpod.rehearsal.te.import_te")
    return entry is not None and entry.is_installed()


def import_nemo() -> None:
    """Import NeMo with Transformer Engine's layers if they are installed; otherwise, patch it to use local layers."""
    from superpod.rehearsal.te import source

    if source.is_installed():
        import superpod.rehearsal.te.import_te as te

        te.install()
    else:
        import superpod.rehearsal.entry  # noqa: F401 - the patches, before NeMo


def main() -> None:
    """Check the requests on stdin, and write their outcomes as JSON to the path in the variable `ANSWER_FILE`."""
    answer_file = Path(os.environ.pop(ANSWER_FILE))
    outcomes: list[dict[str, Any]] = []
    for recipe, facts, gpu, build in json.load(sys.stdin):
        try:
            import_nemo()
            outcome = {"value": asdict(check(Request.from_facts(recipe, facts, gpu), build=build))}
        except UserError as refused:
            outcome = {"refused": [str(refused), refused.hint]}
        except Exception as error:  # a bug in this project, which the command reports as such
            traceback.print_exc()
            outcome = {"failed": f"{type(error).__name__}: {error}"}
        outcomes.append(outcome)
    atomic_file.write(answer_file, json.dumps(outcomes, default=str))
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads that a user's file has started


if __name__ == "__main__":
    main()
