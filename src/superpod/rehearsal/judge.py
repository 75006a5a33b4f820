"""Checks a configuration in a separate process: a recipe with overrides, a user's file, or a recipe of NeMo's own.

The process imports Transformer Engine's Python before NeMo, if it is installed, and executes the user's file, which so
cannot affect the command. `ask` starts the process and reads its answer; `judge` runs in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
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
"""Time limit in seconds for NeMo's import, a user's file, and the models of three ranks of the largest recipes."""
EACH_S = 120
"""Additional seconds for each further request to the same process."""
SAID = "SUPERPOD_JUDGE_ANSWER"
"""The environment variable with the path of the answer file."""

LACKING = (
    "must be compiled with 'nccl' support",
    "Apex must be installed",
    "mamba_ssm",
    "causal_conv1d",
    "flashfftconv",
)
"""Parts of error messages that are due to this machine: PyTorch for CPUs, and packages of CUDA kernels."""


class JudgeFailed(RuntimeError):
    """The process ended without an answer, not because of a user's file."""


@dataclass
class Judgement:
    """The result of the checks of a configuration."""

    name: str
    title: str = ""
    """Model, task, GPUs, precision, sequence, batch and layout; "" where the planner does not know the model."""
    broken: list[Violation] = field(default_factory=list)
    warnings: list[Violation] = field(default_factory=list)
    verdict: str = ""
    """The planner's: ok, oom, illegal; unknown = it does not know the model."""
    short: str = ""
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    usable_gib: float | None = None
    step_time_s: float | None = None
    tight: bool = False
    unplanned: str = ""
    """Why there is no plan; "" = there is one."""
    built: dict[int, list[int]] = field(default_factory=dict)
    """Rank -> parameters of its model's chunks."""
    layers: str = ""
    """Which layers were built: Transformer Engine's, or Megatron's local ones."""
    build_error: str = ""
    """The error message of building a model; "" = none."""
    not_built: str = ""
    """What this machine lacks to build the model; "" = nothing."""

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.broken and not self.build_error and self.verdict in ("ok", "unknown")


def ask(request: Request, *, build: bool = True, limit_s: float = LIMIT_S) -> Judgement:
    """Check a request in a separate process.

    Raises:
        UserError: the request is not a configuration; or its file ended the process, or ran into the time limit.
        JudgeFailed: the process failed for another reason.
    """
    (answer,) = ask_all([request], build=build, limit_s=limit_s)
    if isinstance(answer, UserError):
        raise answer
    return answer


def ask_all(
    requests: Sequence[Request], *, build: bool = True, limit_s: float = LIMIT_S
) -> list[Judgement | UserError]:
    """Check several requests in one process, which imports NeMo once; a refused request yields its UserError.

    Raises:
        UserError, JudgeFailed: as `ask`, if the process ends before it has answered all requests.
    """
    with tempfile.TemporaryDirectory(prefix="recipes-judge-") as folder:
        answer = Path(folder, "answer.json")
        questions = [[request.recipe, request.facts(), request.gpu, build] for request in requests]
        code, log = _run(json.dumps(questions), answer, limit_s + EACH_S * (len(requests) - 1))
        if not answer.is_file():
            raise _no_answer(requests[0].recipe, code, log, limit_s)
        outcomes = _readable(json.loads(answer.read_bytes()))
    return [_answer(outcome) for outcome in outcomes]


def _no_answer(name: str, code: int | None, log: str, limit_s: float) -> Exception:
    last = (_readable(log).strip().splitlines() or ["it printed nothing"])[-1][:300]
    reason = f"took more than {limit_s:.0f} s" if code is None else f"ended with code {code}"
    if name.endswith(".py"):
        return UserError(
            f"{name}: the process that judged it {reason} before it had judged it",
            "recipe() describes a run; it must start, end and wait for nothing",
        )
    return JudgeFailed(f"the process that judged {name} {reason}: {last}")


def _answer(outcome: dict[str, Any]) -> Judgement | UserError:
    if "refused" in outcome:
        return UserError(*outcome["refused"])
    if "failed" in outcome:
        raise JudgeFailed(outcome["failed"])
    value = outcome["value"]
    for name in ("broken", "warnings"):
        value[name] = [Violation(*row) for row in value[name]]
    value["built"] = {int(rank): counts for rank, counts in value["built"].items()}
    return Judgement(**value)


LOG_BYTES = 2**16
"""Of what the process prints, the end is kept: a user's file can print without end."""


def _run(question: str, answer: Path, limit_s: float) -> tuple[int | None, str]:
    """The exit code of the process, or None where it had to be killed; and the end of what it printed."""
    # -P: a folder that is called nemo, where the command was typed, is not what is imported.
    command = [sys.executable, "-P", "-W", "ignore", "-m", __name__]
    environ = {**os.environ, SAID: str(answer), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environ,
        start_new_session=True,
    )
    printed = bytearray()
    reader = threading.Thread(target=_keep_end, args=(process.stdout, printed), daemon=True)
    reader.start()
    code: int | None = None
    watchdog = Watchdog()
    watchdog.add_group(process.pid)
    try:
        with contextlib.suppress(BrokenPipeError), cast(IO[bytes], process.stdin) as pipe:
            pipe.write(question.encode())
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        kill_group(process.pid)
        process.wait()
        watchdog.close()
        reader.join(5)  # a process that has left the group may hold the pipe
    return code, printed.decode(errors="replace")


def _keep_end(pipe: IO[bytes], kept: bytearray) -> None:
    with pipe:
        while chunk := pipe.read1(LOG_BYTES):  # pyright: ignore[reportAttributeAccessIssue]
            kept += chunk
            del kept[:-LOG_BYTES]


def _readable(value: Any) -> Any:
    """What a user's file or a library wrote, without the codes that steer a terminal."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, list):
        return [_readable(item) for item in value]
    return {name: _readable(item) for name, item in value.items()} if isinstance(value, dict) else value


# -- in the process --------------------------------------------------------------------------------------------------


def judge(request: Request, *, build: bool = True, confirm: bool = False) -> Judgement:
    """Judge a request: fields, layout, memory, and the real models of the first, a middle and the last rank.

    Args:
        request: what is judged; a file is executed.
        build: build the models, where no rule is broken.
        confirm: build them even then, to see what the libraries say.

    Raises:
        UserError: the request stands for no configuration.
    """
    from superpod.nemo2 import validation as rules
    from superpod.requests import resolve, subject

    partial, _ = resolve.build_configuration(request)
    resolve.require_runnable(partial, request.overrides)
    chain = subject.subject_kind(request.recipe) != "nemo"
    judgement = Judgement(request.recipe, broken=rules.violations(partial, request.overrides, chain=chain))
    judgement.warnings = rules.warnings(partial, request.overrides, chain=chain)
    of_recipe = known_problems(request.recipe, request.overrides)
    judgement.broken += of_recipe[0]
    judgement.warnings += of_recipe[1]
    job = None
    try:
        job = resolve.plan_job(partial, request)
    except UserError as unknown:
        judgement.unplanned, judgement.verdict = str(unknown), "unknown"
    if job is not None:
        _plan(judgement, job)
        judgement.broken += resolve.job_violations(partial, job)
    if not judgement.broken:
        judgement.broken += rules.start_violations(partial, request.overrides, job)
    if confirm or (build and not judgement.broken):
        _build(judgement, partial, job)
    return judgement


def known_problems(name: str, overrides: Sequence[str] = ()) -> tuple[list[Violation], list[Violation]]:
    """(what forbids a run, what to know of it) of one of our recipes, by its facts alone; nothing of another name.

    That its model cannot train with the pinned versions, and that it does not find the weights it should start from.
    """
    from superpod.collection import registry
    from superpod.collection.facts import missing_weights, proof_level

    if name not in registry.recipes():
        return [], []
    recipe = registry.find(name)
    problem = proof_level.unusable(recipe)
    missing, instead = missing_weights.explain(recipe)
    if any(text.startswith("resume.restore_config") for text in overrides):
        missing = ""
    broken = [Violation("model", *problem)] if problem else []
    return broken, [Violation("weights", missing, instead)] if missing else []


def _plan(judgement: Judgement, job: PlannedJob) -> None:
    from superpod.planner import explain, legality, predict

    prediction = predict.one(job)
    judgement.title = _title(job)
    judgement.verdict, judgement.tight = prediction.verdict, bool(prediction.tight)
    judgement.warnings += legality.warnings(job)
    if prediction.fit in ("tight", "does not fit"):
        judgement.short = explain.describe_shortage(job, prediction)
    judgement.allocated_gib, judgement.reserved_gib = prediction.allocated_gib_max, prediction.reserved_gib_max
    judgement.usable_gib, judgement.step_time_s = prediction.limit_gib, prediction.step_time_s


def _title(job: PlannedJob) -> str:
    from superpod.planner.explain import title

    return (
        f"{job.model.name} {job.task}, {job.gpus} x {job.node.gpu.name} {job.precision}, seq {job.seq}, "
        f"gbs {job.layout.gbs}: {title(job.layout)}"
    )


def _build(judgement: Judgement, partial: Partial, job: PlannedJob | None) -> None:
    """Build the models; what a library raises becomes `build_error`."""
    from superpod.nemo2.validation import configured_job

    world, stages = partial.trainer.num_nodes * partial.trainer.devices, partial.trainer.strategy
    pp = stages.pipeline_model_parallel_size or 1
    ranks = sorted({stage * (world // pp) for stage in (0, pp // 2, pp - 1)})
    judgement.layers = "Transformer Engine's" if _has_te() else "local"
    attention: set[str] = set()
    for rank in ranks:
        try:
            judgement.built[rank], chosen = _built(partial, rank, world, job)
            attention |= chosen
        except Exception as error:  # each library has exceptions of its own
            text = str(error).partition("\n\nFiddle context")[0].strip()
            line = text.splitlines()[0][:300] if text else ""
            what = f"rank {rank}: {type(error).__name__}{f': {line}' if line else ''}"
            if any(lacking in text for lacking in LACKING):
                judgement.not_built = what
            else:
                judgement.build_error = what
            return
    if job is not None:
        judgement.warnings += [
            *_of_another_model(judgement, job, configured_job.read_task(partial)),
            *_of_scores(job, attention),
        ]


def _of_another_model(judgement: Judgement, job: PlannedJob, task: str) -> Iterator[Violation]:
    """That the built model has other parameters than the one whose memory is planned."""
    from superpod.rehearsal.proof import parameter_counts

    planned = parameter_counts.planned(task, job)
    for (rank, chunks), counted in zip(judgement.built.items(), planned, strict=False):
        if parameter_counts.differ(job.model, sum(chunks), counted):
            yield Violation(
                "parameters",
                f"rank {rank} has {sum(chunks):,} parameters, and memory and step time are planned for {counted:,}: "
                "they are another model's",
                "trust the layout's legality alone, or describe the model in shapes/*.toml: docs/extending.md",
            )
            return


def _of_scores(job: PlannedJob, attention: set[str]) -> Iterator[Violation]:
    """That Transformer Engine takes unfused attention, which the plan has not priced."""
    if "unfused" in attention and not job.keeps_scores:
        gib = 2 * job.layout.mbs * job.model.heads / job.layout.tp * (job.seq / job.layout.cp) * job.seq / 2**30
        yield Violation(
            "unfused",
            f"Transformer Engine has only unfused attention for this: it keeps {job.seq:,} x {job.seq:,} scores of "
            f"each head, about {gib:.1f} GiB in a layer, and the memory above is planned without them",
            "undo what the fused kernels refuse (head size, dropout, mask), or plan by `recipes memory` with "
            "--option attention=unfused",
        )


def _built(partial: Partial, rank: int, world: int, job: PlannedJob | None) -> tuple[list[int], frozenset[str]]:
    """Parameters of a rank's chunks, and the attention backends that Transformer Engine chose."""
    if not _has_te():
        from superpod.rehearsal.proof.meta_build import dry_build

        return dry_build(partial, rank, world, step=True), frozenset()
    from superpod.collection.facts import environment
    from superpod.planner import hardware
    from superpod.rehearsal.te.build import build_with_te
    from superpod.requests.subject import GPU

    generation = f"sm{(job.node if job else hardware.node(GPU)).gpu.sm}"
    variables = {v.name: v.value for v in environment.variables(job)} if job else {}
    vocabulary = job.model.vocab if job else None
    build = build_with_te(partial, rank, world, generation, variables, vocabulary=vocabulary)
    return build.parameters, build.attention


def _has_te() -> bool:
    return "superpod.rehearsal.te.entry" in sys.modules and sys.modules["superpod.rehearsal.te.entry"].installed()


def prepare() -> None:
    """Import Transformer Engine's layers where they are installed, or patch NeMo for local ones."""
    from superpod.rehearsal.te import source

    try:
        source.folder()
    except UserError:
        import superpod.rehearsal.entry  # noqa: F401 - the patches, before NeMo
    else:
        import superpod.rehearsal.te.entry as te

        te.install()


def main() -> None:
    """Answer the questions on stdin into the file that `SAID` names."""
    target = Path(os.environ.pop(SAID))
    outcomes: list[dict[str, Any]] = []
    for recipe, facts, gpu, build in json.load(sys.stdin):
        outcomes.append({})
        with _answering(outcomes[-1]):
            prepare()
            outcomes[-1]["value"] = asdict(judge(Request.from_facts(recipe, facts, gpu), build=build))
    atomic_file.write(target, json.dumps(outcomes, default=str))
    sys.stdout.flush()
    os._exit(0)  # threads that a user's file has started would keep the process


@contextlib.contextmanager
def _answering(outcome: dict[str, Any]) -> Iterator[None]:
    import traceback

    try:
        yield
    except UserError as refused:
        outcome["refused"] = [str(refused), refused.hint]
    except Exception as error:  # our own failure: the command says so
        traceback.print_exc()
        outcome["failed"] = f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
