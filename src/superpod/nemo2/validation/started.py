"""Run the checks that NeMo, Lightning and Megatron make before the first step, in one process without ranks.

The objects of the configuration are constructed in the job's environment, which runs their checks: data module, logger,
AutoResume, callbacks and Lightning's trainer. Then they are connected like in `llm.pretrain`: NeMo's validation runs,
callbacks are set up, and the learning rate is computed at steps from the first to the last. An override that NeMo
overwrites meanwhile is reported, because it would have no effect.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from superpod.collection.facts.override_fields import path_of
from superpod.nemo2.signatures import find_parameter
from superpod.nemo2.validation import built, overlapping
from superpod.nemo2.validation.reading import Reader
from superpod.planner.rules.rules import Violation

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.planner.planned_job import PlannedJob

MISSING_HERE = (OSError, ImportError)
"""Exceptions for a file or package that this machine lacks; they are not errors of the configuration."""
CLEARED_FIELDS = ("trainer.strategy.pipeline_dtype",)
"""Fields that NeMo clears if they have no effect, for example without pipeline parallelism."""
_PLUGIN_OR_CALLBACK = "the precision plugin (trainer.plugins) or the overlap callback (trainer.callbacks[i])"
SOURCES = {
    **dict.fromkeys(("model.config", "optim.config", "trainer.strategy.ddp"), _PLUGIN_OR_CALLBACK),
    "trainer.strategy": "the parallel size to which it belongs",
}
"""Section of a configuration -> source of the values with which NeMo overwrites its fields when a run starts."""


@dataclass(frozen=True)
class Objects:
    """The objects constructed from a configuration."""

    model: Any
    data: Any
    trainer: Any
    optim: Any = None
    log: Any = None
    resume: Any = None

    def section(self, path: str) -> Any:
        """Return the object constructed from a section of `SOURCES`."""
        strategy = self.trainer.strategy
        return {
            "model.config": getattr(self.model, "config", None),
            "optim.config": getattr(self.optim, "config", None),
            "trainer.strategy.ddp": getattr(strategy, "ddp_config", None),
            "trainer.strategy": strategy,
        }[path]


def violations(r: Reader, job: PlannedJob | None = None) -> Iterator[Violation]:
    """Yield the settings that the libraries reject before the first step, and the overrides that they overwrite.

    Args:
        r: the configuration.
        job: the planner's job, which determines GPU and environment; None = an H100 without environment variables.
    """
    if r["model.config"] is None or r["trainer.strategy"] is None:
        return
    with _suppress_output(), _simulate_gpu(r, job):
        objects, violation = _construct_objects(r)
        if objects is None:
            if violation is not None:
                yield violation
            return
        for path, check in CHECKS.items():
            violation = _error_violation(path, lambda check=check: check(r, objects))
            if violation is not None:
                yield violation
                return
        values = {path: _get_by_path(objects, path) for path in _overridden_fields(r)}
        violation = _error_violation("the recipe", lambda: _connect_objects(r, objects))
        if violation is not None:
            yield violation
            return
        for path, before in values.items():
            after = _get_by_path(objects, path)
            if after != before:
                old, new = _format_short(before), _format_short(after)
                message = f"{path} is {old}, but NeMo overwrites it with {new} at startup"
                source = SOURCES[path.rpartition(".")[0]]
                yield Violation("written_over", message, f"change it in {source}")
        yield from _set_up_callbacks(r, objects)


# -- constructing ----------------------------------------------------------------------------------------------------


def _construct_objects(r: Reader) -> tuple[Objects | None, Violation | None]:
    """Return (objects, None), or (None, violation) for the first error.

    Return (None, None) if this machine cannot construct the model or the trainer.
    """
    import fiddle as fdl

    parts = _separate_parts(r.partial)
    # A data module whose files are not on this machine cannot be constructed; its arguments replace it.
    built_parts: dict[str, Any] = {"data": SimpleNamespace(**parts["data"].__arguments__)}
    for name, part in parts.items():
        violation = _error_violation(name, lambda name=name, part=part: built_parts.update({name: fdl.build(part)}))
        if violation is not None:
            return None, violation
    if "model" not in built_parts or "trainer" not in built_parts:
        return None, None
    fields = {name: part for name, part in built_parts.items() if not name.startswith("trainer.callbacks")}
    return Objects(**fields), None


def _separate_parts(partial: run.Partial) -> dict[str, Any]:
    """Return {path: part} for copies of a configuration's parts, in the order in which they are constructed.

    The copies lack everything that needs a GPU, a network or files.
    """
    import fiddle as fdl

    partial = copy.deepcopy(partial)
    trainer = partial.trainer
    parts: dict[str, Any] = {}
    for number, callback in enumerate(trainer.callbacks or []):
        parts[f"trainer.callbacks[{number}]"] = callback
    for name in ("log", "resume", "optim"):
        part = getattr(partial, name, None)
        if part is not None:
            parts[name] = part
    if hasattr(parts.get("optim"), "config"):
        parts["optim"].config = built.disable_gpu_software(parts["optim"].config)
    data = partial.data
    # Without a tokenizer, NeMo would download that of GPT-2.
    if find_parameter(fdl.get_callable(data), "tokenizer"):
        data.tokenizer = SimpleNamespace(vocab_size=2**16, eos_id=0)
    parts["data"] = data
    model = partial.model
    if hasattr(model, "tokenizer"):
        model.tokenizer = None
    model.config = built.disable_gpu_software(model.config)
    parts["model"] = model
    # Lightning looks for the devices when it is constructed; `_connect_objects` passes the real numbers to NeMo.
    trainer.accelerator, trainer.devices, trainer.num_nodes = "cpu", 1, 1
    parts["trainer"] = trainer
    return parts


def _error_violation(path: str, call: Callable[[], object]) -> Violation | None:
    """Run `call`, and return its exception as a violation at `path`; None = no error, or this machine causes it."""
    try:
        call()
    except MISSING_HERE:
        return None
    except Exception as error:  # each library raises its own types
        line = built.first_line(error)
        if built.is_missing_software(line):
            return None
        return Violation("started", f"{path}: {type(error).__name__}: {line}", f"check the overrides of {path}")
    return None


# -- starting --------------------------------------------------------------------------------------------------------


def _check_batch_rampup(r: Reader, objects: Objects) -> None:
    """Let Megatron compute the number of micro-batches for every batch size of a batch size ramp-up."""
    from megatron.core.num_microbatches_calculator import _build_num_microbatches_calculator

    ramp, data = r["data.rampup_batch_size"], objects.data
    dp = r.data_parallel_size
    if ramp is None or dp < 1:
        return
    calculator = _build_num_microbatches_calculator(1, ramp, data.global_batch_size, data.micro_batch_size, dp, False)
    start, increment, samples = (int(number) for number in ramp)
    increases = (data.global_batch_size - start) // increment
    for number in range(increases + 1):
        calculator.update(int(samples * number / max(1, increases)) + 1, consistency_check=True)


def _check_weights_path(_r: Reader, objects: Objects) -> None:
    """Let NeMo parse the location of the initial weights, a path or `nemo://ORG/NAME`."""
    restore_config = getattr(objects.resume, "restore_config", None)
    if restore_config is not None and restore_config.path:
        objects.resume._extract_path(restore_config.path)


def _check_schedule(r: Reader, objects: Objects) -> None:
    """Let NeMo create the learning-rate schedule, and compute the rate at steps from the first to the last."""
    import torch

    schedule, rate, last = getattr(objects.optim, "lr_scheduler", None), r["optim.config.lr"], r["trainer.max_steps"]
    if schedule is None or not rate or not last:
        return
    schedule.max_steps = last  # megatron_strategy.py, setup
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    warmup = r["optim.lr_scheduler.warmup_steps"] or 0
    try:
        scheduler = schedule.scheduler(objects.model, optimizer)["lr_scheduler"]["scheduler"]
        for step in sorted({0, 1, warmup, warmup + 1, last // 2, last - 1, last}):
            scheduler.step(step)
    except (KeyError, AttributeError):
        return  # a schedule that needs Megatron's optimizer


CHECKS: dict[str, Callable[[Reader, Objects], None]] = {
    "data": _check_batch_rampup,
    "resume.restore_config.path": _check_weights_path,
    "optim.lr_scheduler": _check_schedule,
}
"""Section of a configuration -> check that runs before the objects are connected."""


def _connect_objects(r: Reader, objects: Objects) -> None:
    """Let NeMo validate and modify the configurations, in the order of `llm.pretrain`."""
    from nemo.collections.llm import api

    strategy = objects.trainer.strategy
    devices, nodes = r["trainer.devices"], r["trainer.num_nodes"]
    sizes = SimpleNamespace(strategy=strategy, num_devices=devices, num_nodes=nodes)
    api._validate_config(objects.model, objects.data, sizes)  # pyright: ignore[reportArgumentType]
    if objects.optim is not None:
        objects.optim.connect(objects.model)
    strategy.connect(objects.model)
    trainer = SimpleNamespace(strategy=strategy, model=objects.model)
    with _set_app_state(r):
        for callback in objects.trainer.callbacks:
            if type(callback).__name__ != overlapping.CALLBACK:
                continue
            with mock.patch.object(callback, "_check_num_cuda_device_max_connections"):
                callback.setup(trainer, objects.model, "fit")
    config = objects.model.config
    is_interleaved = (strategy.virtual_pipeline_model_parallel_size or 1) > 1
    if config.overlap_p2p_comm and strategy.pipeline_model_parallel_size > 1 and not is_interleaved:
        # Megatron raises this at the first step (schedules.py, forward_backward_pipelining_without_interleaving).
        raise ValueError("overlap_p2p_comm requires the interleaved schedule, that is, virtual stages")


REFUSALS = ("AssertionError", "ValueError", "TypeError", "NotImplementedError", "MisconfigurationException")
"""Exceptions with which callbacks reject a configuration; the replaced objects may cause others."""


def _set_up_callbacks(r: Reader, objects: Objects) -> Iterator[Violation]:
    """Set up the callbacks of NeMo and Lightning, and yield their errors.

    Other callbacks, such as NVIDIA's fault tolerance or a user's own, may need a real rank and are skipped.
    """
    from lightning.pytorch.callbacks import Checkpoint, ProgressBar

    trainer = objects.trainer
    if objects.log is not None:
        objects.log._setup_trainer_loggers(trainer, "nemo_experiments", None)
    for number, callback in enumerate(trainer.callbacks[: len(r["trainer.callbacks"] or [])]):
        library = type(callback).__module__.partition(".")[0]
        if library not in ("nemo", "lightning"):
            continue
        if isinstance(callback, Checkpoint | ProgressBar) or type(callback).__name__ == overlapping.CALLBACK:
            continue
        hooks = [lambda callback=callback: callback.setup(trainer, objects.model, "fit")]
        if library == "lightning":  # NeMo's may install signal handlers or communicate
            hooks.append(lambda callback=callback: callback.on_train_start(trainer, objects.model))
        for hook in hooks:
            violation = _error_violation(f"trainer.callbacks[{number}]", hook)
            if violation is not None and any(f": {name}: " in violation.message for name in REFUSALS):
                yield violation
                break


@contextlib.contextmanager
def _simulate_gpu(r: Reader, job: PlannedJob | None) -> Iterator[None]:
    """Set the environment variables of a job, and let torch report the compute capability of its GPU."""
    import torch

    from superpod.collection.facts import environment

    sm = job.node.gpu.sm if job is not None else 90
    gpu = SimpleNamespace(major=sm // 10, minor=sm % 10)
    variables = {v.name: v.value for v in environment.variables(job, r.overrides)} if job is not None else {}
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(gpu.major, gpu.minor)),
    ):
        yield


@contextlib.contextmanager
def _set_app_state(r: Reader) -> Iterator[None]:
    """Set the data-parallel size in NeMo's `AppState`, from which the overlap callback reads it, and restore it."""
    from nemo.utils import AppState

    state = AppState()
    old_state = dict(vars(state))
    state.data_parallel_size = r.data_parallel_size
    try:
        yield
    finally:
        vars(state).clear()
        vars(state).update(old_state)


# -- comparing -------------------------------------------------------------------------------------------------------


def _overridden_fields(r: Reader) -> Iterator[str]:
    """Yield the paths of overridden fields that are directly in a section of `SOURCES`."""
    for path in dict.fromkeys(path_of(text) for text in r.overrides):
        if path.rpartition(".")[0] in SOURCES and path not in CLEARED_FIELDS:
            yield path


def _get_by_path(objects: Objects, path: str) -> Any:
    """Return the value of a field in a section of `SOURCES`; None if it does not exist."""
    section, _, field = path.rpartition(".")
    return getattr(objects.section(section), field, None)


def _format_short(value: Any) -> str:
    return str(getattr(value, "__name__", repr(value)))[:80]


@contextlib.contextmanager
def _suppress_output() -> Iterator[None]:
    """Suppress the libraries' logs and warnings, and restore the process-wide settings that they change."""
    import gc
    import warnings

    import torch

    level, gc_enabled = logging.root.manager.disable, gc.isenabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), mock.patch.dict(os.environ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        torch.use_deterministic_algorithms(deterministic)
        if gc_enabled:
            gc.enable()
